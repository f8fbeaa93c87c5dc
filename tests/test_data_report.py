"""Batches as functions of their coordinates; the verdict of the comparison; what is drawn and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE

from launch.data import HELD_OUT, Corpus
from launch.report import TOLERANCES, Trace, compare, plot
from tests.tiny_llama import make_tokenizer


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.standard_library()


def test_batches_are_slices_of_the_global_batch(corpus: Corpus) -> None:
    ids, labels = corpus.batch(32, 8, seed=1, step=7)
    assert ids.shape == labels.shape == (8, 32)
    assert torch.equal(ids[:, 1:], labels[:, :-1])
    for rank in range(4):
        part = corpus.batch(32, 8, seed=1, step=7, dp_rank=rank, dp_size=4)
        assert torch.equal(part[0], ids[2 * rank : 2 * rank + 2]) and torch.equal(part[1], labels[2 * rank : 2 * rank + 2])
    for other in (corpus.batch(32, 8, seed=1, step=8), corpus.batch(32, 8, seed=2, step=7)):
        assert not torch.equal(other[0], ids)
    with pytest.raises(ValueError, match="batch of 8 .* 3 data-parallel"):
        corpus.batch(32, 8, seed=1, step=7, dp_size=3)


def test_the_text_is_pythons_and_the_held_out_part_is_apart(corpus: Corpus) -> None:
    train, validation = corpus.train.tobytes(), corpus.validation.tobytes()
    assert b"import" in train and len(train) > 10 * len(validation) / 2
    assert not set(train.split(b"\0")) & {text for text in validation.split(b"\0") if len(text) > 1000}
    assert corpus.fingerprint() == Corpus.standard_library().fingerprint()
    batches = corpus.validation_batches(32, 2, 5)
    assert len(batches) == 5 and batches[0][0].shape == (2, 32)
    with pytest.raises(ValueError, match="do not fit"):
        corpus.check(len(validation))


def test_with_a_tokenizer_batches_are_tokens_from_the_same_places(corpus: Corpus) -> None:
    tokenizer = make_tokenizer()
    tokens = replace(corpus, tokenizer=tokenizer)
    assert (corpus.unit, tokens.unit) == ("byte", "token") and corpus.fingerprint() != tokens.fingerprint()
    for as_bytes, ids, labels in (
        (corpus.batch(200, 4, seed=1, step=7)[0], *tokens.batch(200, 4, seed=1, step=7)),
        (corpus.validation_batches(200, 4, 1)[0][0], *tokens.validation_batches(200, 4, 1)[0]),
    ):
        assert ids.shape == labels.shape == (4, 200) and ids.max() < 300
        assert torch.equal(ids[:, 1:], labels[:, :-1])
        for row, text in zip(ids.tolist(), as_bytes.tolist(), strict=True):
            decoded = tokenizer.decode(row)
            assert decoded[:50] == bytes(text).decode(errors="ignore")[:50] and len(decoded) > 200
    with pytest.raises(ValueError, match="a text of 300 different tokens is more than the model's vocabulary of 299"):
        tokens.check(200, 299)


def test_sequences_longer_than_the_text_go_round() -> None:
    """Text of 40 tokens at most: whatever the window, no more are to be had than twice over."""
    text = np.frombuffer(b"0123456789" * 4, dtype=np.uint8)
    corpus = Corpus(text, text, make_tokenizer())
    ids, _ = corpus.batch(39, 2, seed=0, step=0)
    assert ids.shape == (2, 39)
    with pytest.raises(ValueError, match=r"the tokenizer makes \d+ tokens of all the text, \d+ are needed"):
        Corpus(text, text, Tokenizer(BPE())).batch(8, 1, seed=0, step=0)


def test_a_folder_without_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    for i in range(HELD_OUT):
        (tmp_path / "site-packages" / f"{i}.py").write_text("x")
    with pytest.raises(ValueError, match="holds 0 Python source files"):
        Corpus.standard_library(tmp_path)


def trace(*losses: float) -> Trace:
    return Trace([torch.tensor(loss) for loss in losses], [torch.tensor(1.0) for _ in losses])


def test_the_comparison_finds_what_differs() -> None:
    weights = {"a": torch.ones(4), "b": torch.ones(4)}
    same = compare(trace(4, 3, 2, 1), weights, trace(4, 3, 2, 1), weights, TOLERANCES["float32"])
    assert same.equal and len(same.differences) == 5
    early = compare(trace(4, 3.001, 2, 1), weights, trace(4, 3, 2, 1), weights, TOLERANCES["float32"])
    assert [d.equal for d in early.differences] == [False, True, True, True, True]
    assert early.differences[0].where == "step 2"
    assert early.differences[0].absolute == pytest.approx(1e-3, rel=1e-3)
    off = {"a": torch.ones(4), "b": torch.ones(4) * 1.05}
    apart = compare(trace(4, 3, 2, 1), off, trace(4, 3, 2, 1), weights, TOLERANCES["float32"])
    assert not apart.equal and apart.differences[-1].where == "b"
    assert apart.differences[-1].relative == pytest.approx(0.05, rel=1e-3)


def test_later_steps_in_bfloat16_are_shown_but_not_judged() -> None:
    weights, off = {"a": torch.ones(4)}, {"a": torch.zeros(4)}
    drifted = compare(trace(4, 3, 2, 1), off, trace(4, 3, 2, 3), weights, TOLERANCES["bfloat16"])
    assert drifted.equal and drifted.differences[-1].relative == 1.0
    assert not compare(trace(4, 3, 2.1, 1), off, trace(4, 3, 2, 3), weights, TOLERANCES["bfloat16"]).equal


@pytest.mark.parametrize("at", [0, 3])
def test_a_loss_that_is_no_number_differs(at: int) -> None:
    values = [4.0, 3.0, 2.0, 1.0]
    values[at] = float("nan")
    assert not compare(trace(*values), {}, trace(4, 3, 2, 1), {}, TOLERANCES["float32"]).equal


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    plot({"training": [(1, 3.0), (2, 2.0)], "validation": []}, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
