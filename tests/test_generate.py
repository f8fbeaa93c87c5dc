"""New tokens: greedy ones and drawn ones, the same on every rank; and the program that turns them into text as they come."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from launch.environment import Environment, UserError
from launch.generate import GenerateConfig, run, stop_ids
from launch.tokenizer import TextStream, read_tokenizer
from parallel.group import TPGroup, single_device
from parallel.state import scatter_state
from tests.oracle_loading import random_state
from tests.pool import Pool
from tests.programs import python, torchrun
from tests.tiny_llama import BOS, EOS, make_tokenizer, write_folder
from tpblock import Decoder, LongRopeScaling, ModelConfig, generate
from tpblock.formats.convert import open_checkpoint, shard
from tpblock.generate import draw, warp

CONFIG = ModelConfig(vocab_size=53, dim=24, layers=2, heads=6, kv_heads=2, head_dim=4, d_ff=14, max_seq_len=16)
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])
NEW = 11
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "seed": 4},
]


LONG = replace(
    CONFIG,
    rope_scaling=LongRopeScaling(
        short_factor=(1.0, 1.5), long_factor=(2.0, 5.0), original_max_seq_len=IDS.shape[1] + 4, attention_factor=1.2
    ),
)
"""Its frequencies change in the middle of what is generated."""


def decoder(group: TPGroup, dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG, **options: Any) -> Decoder:
    model = Decoder(config, group=group, dtype=dtype, **options)
    scatter_state(model, {name: value.to(dtype) for name, value in random_state(config).items()}, model.group)
    return model


def new_tokens(model: Decoder, **options: Any) -> Tensor:
    """[batch, steps]"""
    return torch.stack(list(generate(model, IDS, NEW, **options)), 1)


@pytest.mark.parametrize("config", [CONFIG, LONG, replace(LONG, sliding_window=6)])
def test_greedy_tokens_are_those_of_whole_forward_passes(config: ModelConfig) -> None:
    model, ids = decoder(single_device(), config=config), IDS
    for _ in range(NEW):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
    found = new_tokens(model)
    assert torch.equal(found, ids[:, IDS.shape[1] :])
    assert len(found.unique()) > 5


def sample(group: TPGroup, dtype: torch.dtype, virtual_shards: int | None) -> list[Tensor]:
    model = decoder(group, dtype, virtual_shards=virtual_shards)
    return [new_tokens(model, **options).cpu() for options in SAMPLING]


@pytest.mark.parametrize(("dtype", "virtual_shards"), [(torch.float64, None), (torch.float32, 4), (torch.bfloat16, 4)])
def test_tokens_are_the_same_on_every_rank_and_any_number_of_ranks(
    pool: Pool, dtype: torch.dtype, virtual_shards: int | None
) -> None:
    expected = pool.run(1, sample, dtype, virtual_shards)[0]
    assert len({str(tokens) for tokens in expected}) == len(SAMPLING)
    for ranks in (2, 3, 4):
        for found in pool.run(ranks, sample, dtype, virtual_shards):
            assert all(map(torch.equal, found, expected))


def test_draws_follow_the_seed() -> None:
    model = decoder(single_device())
    one, again, other = (new_tokens(model, temperature=2.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(new_tokens(model, temperature=7.0, top_k=1), new_tokens(model))


def test_tokens_come_as_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls, plain = decoder(single_device()), [], Decoder.next_logits
    monkeypatch.setattr(Decoder, "next_logits", lambda *args: (calls.append(args[1].shape), plain(*args))[1])
    steps = generate(model, IDS, NEW)
    assert calls == []
    for count in (1, 2, 3):
        next(steps)
        assert calls == [(3, 5), (3, 1), (3, 1)][:count]
    assert len(list(steps)) == NEW - 3


def test_of_equal_logits_the_lowest_id_wins() -> None:
    model = decoder(single_device())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not new_tokens(model).any()


def test_a_sequence_ends_at_a_stop_token_and_the_last_ends_all() -> None:
    model = decoder(single_device())
    endless = new_tokens(model)
    stop = [int(endless[0, 2]), int(endless[1, 4])]
    ends = [next((i for i, id_ in enumerate(row.tolist()) if id_ in stop), NEW - 1) for row in endless]
    found = new_tokens(model, stop=stop)
    assert min(ends) < found.shape[1] - 1 == max(ends)
    for row, (tokens, end) in enumerate(zip(endless, ends, strict=True)):
        assert torch.equal(found[row, : end + 1], tokens[: end + 1])
        assert set(found[row, end:].tolist()) == {int(tokens[end])}


@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("top_k", [None, 1, 7, 500])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.4, 0.95, 1.0])
def test_distributions_are_those_of_transformers(temperature: float, top_k: int | None, top_p: float | None) -> None:
    from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    expected = logits = 3 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
    warpers += [] if top_p is None else [TopPLogitsWarper(top_p)]
    for warper in warpers:
        expected = warper(None, expected)
    found = warp(logits, temperature, top_k, top_p)
    assert torch.equal(found, expected)
    assert found.isfinite().any(-1).all()


def test_draws_have_the_probabilities_that_the_scores_say() -> None:
    scores = torch.tensor([-torch.inf, 0.0, 1.5, -torch.inf, -3.0, 0.5, -torch.inf])
    count = 200_000
    found = draw(scores.expand(count, -1), key=5, step=0)
    frequencies = found.bincount(minlength=7) / count
    expected = scores.softmax(-1)
    assert ((frequencies - expected).abs() <= 4 * (expected * (1 - expected) / count).sqrt()).all()
    some = scores.expand(20, -1)
    assert torch.equal(draw(some, 5, 0), found[:20])
    assert not torch.equal(draw(some, 5, 1), found[:20]) and not torch.equal(draw(some, 6, 0), found[:20])


REFUSED = [
    (IDS, 12, {}, "a prompt of 5 tokens and 12 new ones are longer than the model's max_seq_len 16"),
    (IDS, 0, {}, "max_new_tokens must be at least 1, got 0"),
    (IDS[:, :0], 1, {}, r"prompts need a token at least, got ids \[batch, prompt\] of shape \(3, 0\)"),
    (IDS[0], 1, {}, r"of shape \(5,\)"),
    (IDS + 44, 1, {}, "the token id 53 is not in the model's vocabulary of 53"),
    (IDS - 2, 1, {}, "the token id -1 is not in the model's vocabulary of 53"),
    (IDS, 1, {"temperature": -0.5}, "temperature must be 0, or finite and at least 1e-06, got -0.5"),
    (IDS, 1, {"temperature": float("nan")}, "temperature must be 0, or finite and at least 1e-06, got nan"),
    (IDS, 1, {"temperature": 1e-40}, "temperature must be 0, or finite and at least 1e-06, got 1e-40"),
    (IDS, 1, {"top_k": 0}, "top_k must be at least 1, got 0"),
    (IDS, 1, {"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    (IDS, 1, {"top_p": 1.5}, "top_p must be above 0 and at most 1, got 1.5"),
    (IDS, 1, {"seed": -1}, r"the seed must be an integer in \[0, 2\*\*63\), got -1"),
]


@pytest.mark.parametrize(("ids", "new", "options", "message"), REFUSED, ids=[case[-1][:40] for case in REFUSED])
def test_refusals(ids: Tensor, new: int, options: dict[str, Any], message: str) -> None:
    """Before the first token is asked for."""
    with pytest.raises(ValueError, match=message):
        generate(decoder(single_device()), ids, new, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_tokens_of_logits_that_are_not_finite(value: float, temperature: float) -> None:
    model = decoder(single_device())
    with torch.no_grad():
        model.stack.norm.weight[0] = value
    with pytest.raises(ValueError, match="the logits of new token 1 are not finite numbers"):
        list(generate(model, IDS, 2, temperature=temperature))


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.add, ids), stream.rest()]


def test_text_is_never_cut_within_a_character() -> None:
    tokenizer = make_tokenizer()
    text = "é — 日本語 🎉👩‍🚀!\n  x"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text) + 10  # most characters are several tokens
    for cut in range(len(ids)):
        if "\ufffd" not in tokenizer.decode(ids[:cut]):
            pieces = streamed(tokenizer, [BOS, *ids[:cut]], [*ids[cut:], EOS])
            assert "".join(pieces) == text[len(tokenizer.decode(ids[:cut])) :]
            assert not any("\ufffd" in piece for piece in pieces)
    *pieces, rest = streamed(tokenizer, [], ids[:1])
    assert (pieces, rest) == ([""], "\ufffd")  # the first half of é, and then no more


def test_spaces_between_words_are_kept() -> None:
    """Of decoders that drop the first one."""
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2}, "c"))
    tokenizer.decoder = decoders.Metaspace()
    assert streamed(tokenizer, [0, 1], [1, 2, 0]) == [" b", "c", " a", ""]
    assert streamed(tokenizer, [], [0, 1]) == ["a", " b", ""]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "a model"
    write_folder(folder)
    return folder


def expected_text(folder: Path, text: str, count: int) -> tuple[str, int]:
    """What transformers makes of it, greedily, and in how many tokens."""
    from transformers import LlamaForCausalLM

    tokenizer, model = read_tokenizer(folder), LlamaForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(text).ids])
    assert ids[0, 0] == BOS
    new = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=EOS)[0, ids.shape[1] :].tolist()
    return tokenizer.decode(new), len(new)


def run_here(folder: Path, **options: Any) -> None:
    config = GenerateConfig(folder=folder, tp=1, **options)
    run(config, Environment(config, torchrun=False))


def test_the_program_continues_texts(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two on a single device; one from stdin on two ranks, from a folder cut for three."""
    prompts = ("def f(x):", "🎉 is")
    expected = [expected_text(tiny, prompt, 20) for prompt in prompts]
    run_here(tiny, prompt=prompts, max_new_tokens=20)
    told = capfd.readouterr()
    assert told.out == "".join(f"{text}\n" for text, _ in expected)
    lines = told.err.splitlines()[-2:]
    for line, prompt, (_, count) in zip(lines, prompts, expected, strict=True):
        first = f"prompt: {len(read_tokenizer(tiny).encode(prompt))} tokens, "
        assert line.startswith(first) and f" tokens/s; new: {count} tokens, " in line and line.endswith(" tokens/s")

    shard(open_checkpoint(tiny), tmp_path / "cut", 3)
    options = ["--max-new-tokens", "20", "--device", "cpu"]
    ended = torchrun(2, "-m", "launch.generate", "cut", *options, cwd=tmp_path, text=prompts[0] + "\n")
    assert ended.code == 0, ended.errors
    assert ended.output == expected[0][0] + "\n"
    assert ended.errors.count("tokens/s; new: ") == 1


def test_ids_for_a_folder_without_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_folder(tmp_path / "bare", tokenizer=False)
    new = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, do_sample=False, pad_token_id=EOS)[0, 3:]
    run_here(tmp_path / "bare", ids=(5, 6, 7), max_new_tokens=9)
    assert capfd.readouterr().out == " ".join(map(str, new.tolist())) + "\n"
    drawn = []
    for seed in (1, 1, 2):
        run_here(tmp_path / "bare", ids=(5, 6, 7), max_new_tokens=9, temperature=1.5, top_k=50, top_p=0.99, seed=seed)
        drawn.append(capfd.readouterr().out)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("fields", "generation", "expected"),
    [({"eos_token_id": 1}, None, [1]), ({"eos_token_id": [3, 4]}, None, [3, 4]), ({"eos_token_id": None}, None, []),
     ({"eos_token_id": 1}, {"eos_token_id": [2, 0]}, [2, 0]), ({"eos_token_id": 1}, {"eos_token_id": 0}, [0]),
     ({"eos_token_id": 1}, {}, [1])],
)  # fmt: skip
def test_the_folder_says_which_tokens_end_a_text(
    tiny: Path, tmp_path: Path, fields: Any, generation: Any, expected: Any
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = open_checkpoint(tiny)
    hf = replace(checkpoint.hf, config={**checkpoint.hf.config, **fields})
    assert stop_ids(replace(checkpoint, path=tmp_path, hf=hf)) == expected


@pytest.mark.parametrize("ids", ["2", [2, None], 1 << 80])
def test_what_ends_a_text_has_to_be_token_ids(tiny: Path, tmp_path: Path, ids: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match="eos_token_id must be a token id or several, got"):
        stop_ids(replace(open_checkpoint(tiny), path=tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ("x",), "ids": (1,)}, "--prompt and --ids cannot go together, got 1 texts and 1 ids"),
        ({"prompt": ("x",), "max_new_tokens": 63}, "a prompt of 2 tokens and 63 new ones are longer than .* max_seq_len 64"),
        ({"ids": (300,)}, "the token id 300 is not in the model's vocabulary of 300"),
        ({"prompt": ("x\udcff",)}, r"the tokenizer cannot read 'x\\udcff': "),
        ({"prompt": ("x",), "temperature": -1.0}, "temperature must be 0, or finite and at least 1e-06, got -1.0"),
        ({"prompt": ("x",), "max_new_tokens": 9, "virtual_shards": 7}, "6 query heads cannot be dealt over 7"),
    ],
)
def test_faults(tiny: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run_here(tiny, **options)
    assert caught.value.code == 2


def test_stdin_that_holds_no_text(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(b"caf\xe9"))
    monkeypatch.setattr("sys.stdin", terminal)
    with pytest.raises(UserError, match="'utf-8' codec can't decode byte 0xe9"):
        run_here(tiny)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    with pytest.raises(UserError, match="there is nothing to continue: give a --prompt, or a text on stdin"):
        run_here(tiny)


def test_faulty_folders_and_the_end_of_the_program(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a folder"):
        run_here(tmp_path / "nowhere", prompt=("x",))
    write_folder(tmp_path / "bare", tokenizer=False)
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*bare.tokenizer\.json: "):
        run_here(tmp_path / "bare", prompt=("x",))
    (tmp_path / "bare" / "tokenizer.json").unlink()
    ended = python("-m", "launch.cli", "generate", "bare", "--tp", "1", "--prompt", "x", cwd=tmp_path)
    assert (ended.code, ended.output) == (2, "")
    assert ended.errors == "error: bare has no tokenizer.json: give the --ids to continue in place of a text\n"
