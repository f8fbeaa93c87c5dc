"""A real pretrained model, SmolLM2-135M-Instruct, against transformers: 9 query and 3 KV heads on 1, 2, 3 and 4 ranks.

The folder is made once and kept in pytest's cache directory (some 270 MB).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from launch.tokenizer import read_tokenizer
from parallel import matmul
from parallel.group import TPGroup
from tests import smollm2
from tests.pool import Pool
from tests.programs import torchrun
from tpblock import Decoder, generate, load_pretrained, save_pretrained
from tpblock.formats.convert import open_checkpoint, shard

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.skipif(bool(smollm2.missing()), reason=smollm2.missing()),
]

NEW = 40
PROMPTS = [  # of each the first LENGTH tokens, so that all five go through the models together
    "The capital of France is Paris, and the capital of Germany",
    "Once upon a time there was a little girl who lived in",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 5, 8, 13, 21, 34",
]
LENGTH = 10
LARGEST_DIFFERENCE = 1e-3 if matmul.ONEDNN_IS_FASTER else 3e-4
"""Between our float32 logits, which reach 38, and those of transformers. Each intermediate number is rounded by 6e-8 of itself,
and sums are taken in another order; thirty layers amplify that. Measured: 4e-5 on one rank, 5e-5, 8e-5 and 5e-5 on 2, 3 and 4. With
the products of oneDNN, which rounds up to twice as much as MKL (see matmul.py), 5e-4 on one rank."""


class Expected(NamedTuple):
    """What transformers computes in float32: ids [5, LENGTH], logits [5, LENGTH, vocab], greedy tokens [5, up to NEW]."""

    ids: Tensor
    logits: Tensor
    tokens: Tensor


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    folder = request.config.cache.mkdir("smollm2") / "model"
    smollm2.make_folder(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> Iterator[Expected]:
    from transformers import LlamaForCausalLM

    tokenizer = read_tokenizer(folder)
    ids = torch.tensor([tokenizer.encode(prompt).ids[:LENGTH] for prompt in PROMPTS])
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(ids).logits
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[:, LENGTH:]
    yield Expected(ids, logits, tokens)


def load(group: TPGroup, folder: str, **options: Any) -> Decoder:
    return load_pretrained(folder, group=group, device=torch.get_default_device(), **options)


@torch.no_grad()
def logits(model: Decoder, ids: Tensor) -> Tensor:
    return model(ids.to(model.head_weight.device)).cpu()


def compute(group: TPGroup, folder: str, ids: Tensor, stop: list[int]) -> tuple[Tensor | None, Tensor]:
    """Logits of the prompts (from rank 0) and greedy tokens."""
    model = load(group, folder, dtype=torch.float32)
    tokens = torch.stack(list(generate(model, ids, NEW, stop=stop)), 1)
    found = logits(model, ids)
    return (found if group.rank == 0 else None), tokens.cpu()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_logits_and_greedy_tokens_equal_transformers(pool: Pool, folder: Path, expected: Expected, ranks: int) -> None:
    results = pool.run(ranks, compute, str(folder), expected.ids, [2], timeout=250)
    assert 10 < expected.logits.abs().max() < 100
    assert (results[0][0] - expected.logits).abs().max() < LARGEST_DIFFERENCE
    for _, tokens in results:
        assert torch.equal(tokens, expected.tokens)


def test_the_program_writes_what_transformers_generates(folder: Path, expected: Expected, tmp_path: Path) -> None:
    tokenizer, row = read_tokenizer(folder), 1
    prompt, text = (tokenizer.decode(ids[row].tolist()) for ids in (expected.ids, expected.tokens))
    assert tokenizer.encode(prompt).ids == expected.ids[row].tolist()
    options = ["--prompt", prompt, "--max-new-tokens", str(NEW), "--dtype", "float32", "--device", "cpu"]
    ended = torchrun(3, "-m", "launch.generate", str(folder), *options, cwd=tmp_path)
    assert ended.code == 0, ended.errors
    assert ended.output == text + "\n"


def save(group: TPGroup, folder: str, out: str) -> None:
    save_pretrained(load(group, folder), out)


def test_a_saved_model_has_the_same_bytes(pool: Pool, folder: Path, tmp_path: Path) -> None:
    pool.run(2, save, str(folder), str(tmp_path / "saved"))
    files = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == files
    assert len([name for name in files if name.endswith(".safetensors")]) == 3
    for name in files:
        ours, theirs = ((path / name).read_bytes() for path in (tmp_path / "saved", folder))
        assert ours == theirs or (name.endswith(".json") and json.loads(ours) == json.loads(theirs)), name


def last_logits(group: TPGroup, folder: str, ids: Tensor) -> Tensor:
    return logits(load(group, folder, dtype=torch.float32), ids)[:, -1]


def test_a_folder_cut_for_four_ranks_is_the_same_model_on_three(
    pool: Pool, folder: Path, expected: Expected, tmp_path: Path
) -> None:
    shard(open_checkpoint(folder), tmp_path / "cut", 4)
    cut, whole = (pool.run(3, last_logits, str(path), expected.ids) for path in (tmp_path / "cut", folder))
    for ours, theirs in zip(cut, whole, strict=True):
        assert torch.equal(ours, theirs)
