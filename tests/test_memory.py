"""The memory formula of the benchmarks against bytes measured in a real step, and the meter that measures them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import KINDS, Measured, measure_rank, variants
from benchmarks.memory_formula import training_bytes
from benchmarks.meter import LiveBytes, held_bytes
from benchmarks.program import pretended_group
from benchmarks.workload import Workload
from parallel import matmul
from parallel.group import TPGroup, single_device
from tests.helpers import onednn_everywhere
from tests.pool import Pool
from tests.programs import torchrun
from tpblock import Activation, Bias, ModelConfig, Norm, Placement, Position, QKNorm

CPU = torch.device("cpu")

LLAMA = ModelConfig(vocab_size=97, dim=64, layers=3, heads=8, kv_heads=4, d_ff=152, max_seq_len=32)
GPT = ModelConfig(
    vocab_size=96,
    dim=64,
    layers=2,
    heads=8,
    activation=Activation.GELU,
    norm=Norm.LAYERNORM,
    position=Position.LEARNED,
    max_seq_len=32,
    bias=True,
    tied_embeddings=True,
)


CONFIGS = {
    "grouped-query": LLAMA,
    "multi-query, heads of another width": replace(LLAMA, kv_heads=1, head_dim=16),
    "uneven": replace(LLAMA, heads=9, kv_heads=3, head_dim=8, d_ff=151),
    "gpt": GPT,
    "relu": replace(GPT, activation=Activation.RELU, bias=Bias.QKV),
    "parallel": replace(LLAMA, placement=Placement.PARALLEL),
    "parallel, relu": replace(GPT, placement=Placement.PARALLEL, activation=Activation.RELU),
    "two norms": replace(GPT, placement=Placement.PARALLEL_TWO_NORMS, tied_embeddings=False),
    "two RMS norms": replace(LLAMA, placement=Placement.PARALLEL_TWO_NORMS),
    "qk-norm": replace(LLAMA, qk_norm=QKNorm.PER_HEAD),
    "qk-norm, learned positions": replace(GPT, qk_norm=QKNorm.PER_HEAD),
    "part of each head rotated": replace(LLAMA, rotary_fraction=0.5),
}


def work(config: ModelConfig, **options: Any) -> Workload:
    return Workload(config, batch=3, seq=21, **options)  # 63 tokens: uneven shares


def check(found: Measured) -> None:
    assert found.peak_ratio == pytest.approx(1, abs=0.05), found
    for kind in KINDS:
        assert abs(found.difference(kind)) < 5, (kind, found)
    # what the formula leaves out is the loss and the like: some numbers, whatever the sizes
    assert found.measured.activations - found.formula.activations in range(64), found
    assert found.measured.parameters == found.formula.parameters
    assert found.measured.gradients == found.formula.gradients and found.measured.optimizer == found.formula.optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("ranks", "sequence", "again"), [(1, False, False), (2, False, False), (4, True, False), (8, True, True)]
)
def test_measured_bytes_are_the_formulas(
    config: ModelConfig, dtype: torch.dtype, ranks: int, sequence: bool, again: bool
) -> None:
    workload = work(config, dtype=dtype, sequence_parallel=sequence, activation_checkpointing=again)
    with pretended_group(ranks) as group:
        check(measure_rank(workload, group, CPU))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")
@pytest.mark.parametrize("most", [2**12, 2**21], ids=["in parts", "as a whole"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_copies_that_onednn_is_given(config: ModelConfig, most: int) -> None:
    workload, ratios = work(config), []
    with onednn_everywhere(), mock.patch.object(matmul, "MOST_COPIED", most), pretended_group(4) as group:
        for mode in variants(workload, 4):
            ratios.append(measure_rank(mode, group, CPU).peak_ratio)
    assert ratios == pytest.approx([1] * len(ratios), abs=0.05)


def measure_on(group: TPGroup, workload: Workload) -> Measured:
    return measure_rank(workload, group, torch.empty(0).device)


@pytest.mark.parametrize("config", [LLAMA, CONFIGS["uneven"]], ids=["even", "uneven"])
def test_every_rank_of_a_real_group_needs_what_the_formula_says(pool: Pool, config: ModelConfig) -> None:
    if pool.device(0).type != "cpu":
        pytest.skip("the tests know the bytes of the CPU")
    workload = work(config, sequence_parallel=True)
    found = pool.run(3, measure_on, workload)
    for rank, one in enumerate(found):
        assert (one.rank, one.ranks) == (rank, 3)
        check(one)
    with pretended_group(
        3
    ) as group:  # the same bytes without the other ranks; the peak depends a little on the sending thread
        alone = measure_rank(workload, group, CPU)
    assert alone.measured == found[0].measured
    assert alone.peak == pytest.approx(found[0].peak, rel=0.05)


SIZES = {
    "wide": (2, 32, {"dim": 256, "d_ff": 512, "vocab_size": 500}),
    "deep": (4, 32, {"layers": 8}),
    "many tokens": (2, 550, {"layers": 2, "max_seq_len": 550}),
    "large vocabulary": (1, 16, {"vocab_size": 5000}),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("config", [LLAMA, GPT], ids=["llama", "gpt"])
def test_the_peak_is_the_formulas_for_other_sizes(config: ModelConfig, size: tuple[int, int, dict[str, Any]]) -> None:
    batch, seq, sizes = size
    workload = Workload(replace(config, head_dim=None, **sizes), batch, seq)
    sums = []
    for ranks in (1, 2, 4):
        with pretended_group(ranks) as group:
            for mode in variants(workload, ranks):
                found = measure_rank(mode, group, CPU)
                assert found.peak_ratio == pytest.approx(1, abs=0.05), found
                sums.append(found.formula.total / found.peak)
    assert max(abs(ratio - 1) for ratio in sums) > 0.05, "the sum of what is kept would pass for the peak"


def test_losses_of_several_chunks_gather_their_gradient_in_float32() -> None:
    config = replace(LLAMA, layers=1)
    workload = Workload(replace(config, max_seq_len=1100), batch=1, seq=1100, dtype=torch.bfloat16)
    check(measure_rank(workload, single_device(), CPU))


def test_the_paper_has_32_bytes_a_token_and_width_for_gpt_without_its_dropout() -> None:
    """Korthikanti et al., equation 1: 34 s b h, of which 2 are dropout masks and the scores another term."""
    config = replace(GPT, d_ff=256, dim=64, tied_embeddings=False)
    two, one = (training_bytes(work(replace(config, layers=layers), dtype=torch.bfloat16)).activations for layers in (2, 1))
    statistics = 63 * (2 * 2 * 2 + 8 * 4)  # of two norms in bfloat16, of 8 heads in float32
    assert two - one == 32 * 63 * 64 + statistics


def test_what_the_formula_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="without dropout, got 0.5 and 0"):
        training_bytes(work(replace(LLAMA, dropout=0.5)))
    with pytest.raises(ValueError, match="a window of 4 of 21 tokens"):
        training_bytes(work(replace(LLAMA, sliding_window=4)))


def test_the_meter_counts_each_storage_once_and_as_long_as_it_lives() -> None:
    before = torch.ones(100)
    with LiveBytes() as used:
        view = before.view(10, 10)
        before.add_(1)
        assert used.now == 0
        a = torch.ones(1000)
        b = a[10:].view(-1)
        assert used.now == 4000
        del a
        assert used.now == 4000
        c = b + 1
        assert used.now == 4000 + 4 * 990
        del b, view
        assert used.now == 4 * 990
    assert used.peak == 4000 + 4 * 990
    assert held_bytes([c, [c.view(990), {"d": before}]]) == 4 * 990 + 400


TINY = ["--dim", "16", "--layers", "1", "--heads", "4", "--vocab-size", "30", "--batch", "2", "--seq-len", "8"]


def test_the_program_on_one_process_and_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main([*TINY, "--tp", "1,2,4,8", "--out", str(tmp_path / "a")])
    alone = capsys.readouterr().out
    assert alone.count("first alone |") == 4 + 4 and "Not measured at 8 ranks: " in alone
    assert "| peak of a step, MB | peak by the formula, MB | peak, measured / formula |" in alone
    two = torchrun(2, "-m", "benchmarks.memory", *TINY, "--tp", "1,2,4", "--out", str(tmp_path / "b"), cwd=tmp_path)
    assert two.code == 0, two.errors
    for folder in ("a", "b"):
        names = sorted((tmp_path / folder).iterdir())
        assert [path.suffix for path in names] == [".json", ".md", ".png"]
        assert str(tmp_path) not in names[0].read_text() + names[1].read_text()


def test_a_wrong_command_line_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        memory.main(["--dim", "30", "--heads", "4"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: dim 30 is not a multiple of heads 4: give head_dim explicitly\n"
