"""What benchmarks.scaling counts, computes from its measurements, and writes."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import scaling
from benchmarks.flops import training_flops
from benchmarks.program import sizes_that_fit, tp_sizes, without_out
from benchmarks.scaling_report import Result, communication_row, report, time_row, traffic_rows
from benchmarks.timing import Ranks, command, file_stem, measure, weak_scaling_efficiency
from benchmarks.traffic import Traffic, by_size, replay, silent_collectives
from benchmarks.workload import PHASES, Training, Workload, add_options, config_from, model_name
from parallel import collectives
from parallel.group import TPGroup, single_device
from parallel.traffic import Recorder, Sent
from tests.helpers import own_collectives
from tests.pool import Pool
from tests.programs import python, torchrun
from tests.test_benchmarks import FakeClock, FakeRanks
from tests.test_collectives import CONFIGS, LAYERS, PRE, backward_of, expected, forward_of
from tpblock import Activation, ModelConfig, Norm, Placement, preset

BATCH, SEQ = 2, 6
TOKENS = BATCH * SEQ

# --- the clock


def test_c91_each_phase_starts_and_stops_with_all_ranks_and_its_warm_up_is_dropped() -> None:
    log: list[str] = []
    clock = FakeClock(log)
    phases = {"forward": clock.contender("f", [9.0, 1.0, 2.0]), "backward": clock.contender("b", [8.0, 3.0, 4.0])}
    found = measure({"step": phases}, FakeRanks(log), rounds=2, warmup=1, clock=clock)
    assert found == {"step, forward": [1.0, 2.0], "step, backward": [3.0, 4.0]}
    assert log == ["meet", "clock", "f", "meet", "clock", "meet", "clock", "b", "meet", "clock"] * 3


def test_c91_the_slowest_rank_counts_in_each_phase() -> None:
    log: list[str] = []
    clock = FakeClock(log)
    phases = {"forward": clock.contender("f", [1.0]), "backward": clock.contender("b", [5.0])}
    found = measure({"step": phases}, FakeRanks(log, other=3.0), rounds=1, warmup=0, clock=clock)
    assert found == {"step, forward": [3.0], "step, backward": [5.0]}


def test_phases_keep_their_order_when_contenders_turn_round_and_steps_are_averaged() -> None:
    log: list[str] = []
    clock = FakeClock(log)
    contenders: dict[str, Any] = {"whole": clock.contender("w", [1.0] * 4)}
    contenders["phases"] = {"x": clock.contender("x", [1.0, 3.0] * 2), "y": clock.contender("y", [2.0, 6.0] * 2)}
    found = measure(contenders, FakeRanks(log), rounds=2, warmup=0, steps=2, clock=clock)
    assert list(found) == ["whole", "phases, x", "phases, y"]
    assert found == {"whole": [1.0, 1.0], "phases, x": [2.0, 2.0], "phases, y": [4.0, 4.0]}
    assert [entry for entry in log if entry in "wxy"] == list("wwxyxyxyxyww")


def meet_alone(group: TPGroup) -> list[float]:
    """The first two of four ranks time something, which the others know nothing of."""
    ranks = Ranks(torch.empty(0).device, group)
    ranks.meet()
    return ranks.slowest([float(group.rank), 5.0 - group.rank])


def test_a_group_of_some_ranks_meets_without_the_others(pool: Pool) -> None:
    assert pool.run(2, meet_alone) == [[1.0, 5.0]] * 2
    assert Ranks(torch.device("cpu"), single_device()).slowest([2.0]) == [2.0]


# --- rates


def result(ranks: int, *, step: float, tokens: int = 128, valid: int = 96, **phases: float) -> Result:
    seconds = {"phases": 0.0, "computation": 0.0, "collectives": 0.0, **phases}
    samples = {f"{name}, {phase}": [t / 4, t / 4] for name, t in seconds.items() for phase in ("forward", "optimizer")}
    samples |= {f"{name}, backward": [t / 2, t / 2] for name, t in seconds.items()}
    samples |= {"step": [step, step], "matrix": [0.5, 0.5]}
    sent = [Sent("all_reduce", 1000, torch.float32, 4000.0)]
    traffic = {"forward": sent * 2, "backward": sent, "optimizer": []} if ranks > 1 else dict.fromkeys(PHASES, [])
    return Result(ranks, 8, tokens, valid, samples, traffic, 5_000_000, 4 * 10**12, 10**12)


def test_c89_c92_rates_are_of_the_global_batch_and_valid_tokens_are_told_apart() -> None:
    row = time_row(result(4, step=1.0, phases=1.0), None, weak=False, peak_tflops=None)
    assert (row["tokens/s"], row["tokens/s a device"], row["valid tokens/s"]) == ("128", "32", "96")
    assert row["TFLOP/s a device"] == "1.000"
    assert (row["peak TFLOP/s"], row["MFU, %"]) == ("2.000", "50.0")
    assert row["efficiency t1/(N tN)"] == "-"  # one device was not measured
    assert time_row(result(4, step=1.0), None, weak=False, peak_tflops=4.0)["MFU, %"] == "25.0"


def test_c92_efficiency_is_that_of_the_same_batch_or_of_one_that_grows() -> None:
    one, four = result(1, step=8.0), result(4, step=4.0)
    assert time_row(four, one, weak=False, peak_tflops=None)["efficiency t1/(N tN)"] == "0.500"
    assert time_row(one, one, weak=False, peak_tflops=None)["efficiency t1/(N tN)"] == "1.000"
    assert time_row(result(4, step=10.0), one, weak=True, peak_tflops=None)["efficiency t1/tN"] == "0.800"
    assert weak_scaling_efficiency(3.0, 3.0) == 1.0


def test_communication_is_exposed_beyond_the_computation_and_hidden_for_the_rest() -> None:
    found = result(2, step=1.0, phases=1.0, computation=0.75, collectives=0.375)
    assert found.exposed == [0.25, 0.25] and found.hidden == [0.125, 0.125]
    row = communication_row(found)
    assert row["exposed, % of the step"] == "25.0 (25.0 to 25.0)" and row["hidden, % of the step"] == "12.5 (12.5 to 12.5)"
    assert (row["collectives a step"], row["their tensors, MB"], row["sent by a rank, MB"]) == ("3", "0.012", "0.012")
    assert row["peak memory of a rank, MB"] == "5.0"
    assert [(r["phase"], r["number"], r["MB in all"]) for r in traffic_rows(found)] == [
        ("forward", "2", "0.008"),
        ("backward", "1", "0.004"),
    ]


def test_one_rank_has_nothing_to_send_or_to_hide() -> None:
    alone = replace(
        result(1, step=1.0, phases=1.0),
        samples={**dict.fromkeys(["step", "matrix"], [1.0])} | {f"phases, {phase}": [1.0] for phase in PHASES},
    )
    assert alone.by_round("computation") == [3.0]
    assert (alone.exposed, alone.hidden) == ([0.0], [0.0])
    assert "all_reduce" not in report([alone], False, None, [])


# --- what is sent


def record(group: TPGroup, config: ModelConfig, sp: bool) -> list[list[tuple[str, int, str]]]:
    training = Training(Workload(config, BATCH, SEQ, sequence_parallel=sp), group, torch.empty(0).device)
    sent = scaling.count_traffic(training)
    return [[(s.kind, s.elements, str(s.dtype).removeprefix("torch.")) for s in sent[phase]] for phase in PHASES]


def counted(found: list[tuple[str, int, str]]) -> dict[tuple[str, int, str], int]:
    return {key: found.count(key) for key in found}


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_seen_to_send_what_the_formula_says(pool: Pool, name: str, sp: bool) -> None:
    config, ranks = CONFIGS[name], 2
    size, norm = TOKENS * config.dim, config.dim * (2 if config.norm is Norm.LAYERNORM else 1)
    loss = (1, "all_gather", 3 * TOKENS * ranks)
    beside = [(1, "reduce_scatter", size), (1, "all_gather", size)] if sp else [(1, "all_reduce", size)]
    final = [(1, "all_reduce", norm)] if sp else []
    for forward, backward, optimizer in pool.run(ranks, record, config, sp):
        blocks = [(LAYERS * n, kind, elements) for n, kind, elements in forward_of(config, sp)]
        assert counted(forward) == expected(*blocks, *beside, loss)
        blocks = [(LAYERS * n, kind, elements) for n, kind, elements in backward_of(config, sp, ranks)]
        assert counted(backward) == expected(*blocks, *beside, *final)
        assert counted(optimizer) == {("all_reduce", 1, "float64"): 1}


def send(group: TPGroup) -> list[Any]:
    """[what a rank sends of 12 numbers, kind by kind, by the process group, through shared memory, and in a replay]"""
    x = torch.ones(12)
    recorders = [Recorder(group) for _ in range(3)]
    for recorder, how in zip(recorders, (own_collectives, nullcontext), strict=False):
        with recorder, how():
            collectives.start_all_reduce(x.clone(), group)()
            collectives.start_reduce_scatter(x, group, [3] * 4)()
            collectives.all_gather(x[:3], group, [3] * 4)
            collectives.all_to_all(x, group, given=[3] * 4, taken=[3] * 4, most=12)
    again = replay(recorders[0].collectives[:3], group, x.device)
    with recorders[2]:
        again()
    return [[(s.kind, s.bytes, s.sent) for s in recorder.collectives] for recorder in recorders]


def test_bytes_that_are_sent_and_sent_again(pool: Pool) -> None:
    for ring, direct, again in pool.run(4, send):
        assert ring == [
            ("all_reduce", 48, 72.0),
            ("reduce_scatter", 48, 36.0),
            ("all_gather", 48, 36.0),
            ("all_to_all", 48, 36.0),
        ]
        assert direct == ring
        assert again == direct[:3]


def test_traffic_adds_up() -> None:
    sent = [Sent("all_reduce", 12, torch.float32, 72.0), Sent("all_gather", 6, torch.float64, 36.0)]
    assert Traffic.of(sent) == Traffic(2, 96, 108.0)


def test_collectives_are_grouped_by_kind_and_size_the_largest_sum_first() -> None:
    small, large = Sent("all_reduce", 2, torch.float32, 1.0), Sent("all_gather", 5, torch.float32, 1.0)
    assert by_size([small, large, small]) == [(large, 1), (small, 2)]


def step_silently(group: TPGroup, sp: bool) -> tuple[int, bool]:
    training = Training(Workload(PRE, 1, 5, sequence_parallel=sp), group, torch.empty(0).device)
    before = [p.detach().clone() for p in training.model.parameters()]
    with Recorder(group) as recorder, silent_collectives():
        training.step()
    unchanged = all(torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True))
    training.step()  # the real ones are back
    return len(recorder.collectives), unchanged


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel, uneven"])
def test_silent_collectives_send_nothing_and_weights_stay(pool: Pool, sp: bool) -> None:
    assert pool.run(4, step_silently, sp) == [(0, True)] * 4


# --- the command line


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(arguments)


def test_a_preset_with_changes_and_a_model_of_sizes() -> None:
    small = options("--preset", "llama-3-8b", "--layers", "2")
    assert config_from(small) == replace(preset("llama-3-8b"), layers=2)
    assert model_name(small) == "llama-3-8b, layers 2"
    own = options("--dim", "64", "--heads", "2", "--activation", "gelu", "--placement", "parallel", "--seq-len", "5000")
    config = config_from(own)
    assert (config.dim, config.head_dim, config.activation) == (64, 32, Activation.GELU)
    assert config.placement is Placement.PARALLEL and config.max_seq_len == 5000
    with pytest.raises(ValueError, match="--seq-len 2000 is longer than the 1024 tokens of gpt-2"):
        config_from(options("--preset", "gpt-2", "--seq-len", "2000"))


def test_sizes_that_do_not_fit_are_told_with_both_numbers() -> None:
    assert tp_sizes("4,1,2,2") == [1, 2, 4]
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1, got 0"):
        tp_sizes("0,1")
    fit, notes = sizes_that_fit(PRE, [1, 4, 16], 32)
    assert fit == [1, 4]
    assert notes == [
        "Not measured at 16 ranks: 8 query heads cannot be dealt over 16 tensor-parallel shards (KV heads: 4)."
    ] or notes == ["Not measured at 16 ranks: vocab: 20 cannot be dealt over 16 tensor-parallel shards, one would hold none."]
    assert sizes_that_fit(PRE, [8], 2)[1] == ["Not measured at 8 ranks: only 2 ranks were started."]


def test_labels_that_do_not_count() -> None:
    ids, labels = Workload(PRE, 2, 10, padding=0.3).data(torch.device("cpu"))
    assert (labels != -100).sum() == 2 * 7 and torch.equal(labels[:, :7], ids[:, 1:8])
    whole = Training(Workload(PRE, 2, 6), single_device(), torch.device("cpu"))
    assert whole.valid == 2 * 5  # the last token of a sequence has no next one
    with pytest.raises(ValueError, match="below 1, got 1.5"):
        Workload(PRE, 2, 10, padding=1.5)


def test_names_of_files_and_commands_have_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    line = command("benchmarks.scaling", 2, without_out(["--tp", "1,2", "--out", "/x/y", "--weak", "--out=/z"]))
    assert line == "torchrun --nproc-per-node 2 -m benchmarks.scaling --tp 1,2 --weak"
    stem = file_stem("scaling", "Dim 2 x 3", device=torch.device("cpu"))
    assert stem.startswith("scaling-dim-2-x-3-") and torch.__version__.replace("+", "-") in stem
    assert set(stem) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")


TINY = ["--dim", "32", "--layers", "1", "--heads", "4", "--vocab-size", "30", "--batch", "2", "--seq-len", "8"]
TINY += ["--rounds", "2", "--warmup", "1", "--padding", "0.5"]


@pytest.mark.parametrize("mode", [(), ("--weak", "--sequence-parallel", "--checkpointing", "--dtype", "bfloat16")])
def test_the_program_on_two_ranks(tmp_path: Path, mode: tuple[str, ...]) -> None:
    out = tmp_path / "results"
    ended = torchrun(2, "-m", "benchmarks.scaling", *TINY, "--tp", "1,2,4", "--out", str(out), *mode, cwd=tmp_path)
    assert ended.code == 0, ended.errors
    assert "Not measured at 4 ranks: only 2 ranks were started." in ended.output and "waited idle" in ended.output
    numbers, text, plot = sorted(out.iterdir())
    assert plot.read_bytes().startswith(b"\x89PNG") and str(tmp_path) not in text.read_text() + numbers.read_text()
    told = json.loads(numbers.read_text())
    one, two = (told["samples"][size] for size in ("1", "2"))
    weak = 2 if "--weak" in mode else 1
    assert (one["batch"], two["batch"], two["tokens"], two["valid"]) == (2, 2 * weak, 16 * weak, 8 * weak)
    config = ModelConfig(vocab_size=30, dim=32, layers=1, heads=4)
    assert two["flops"] == training_flops(config, 2 * weak, 8).model == weak * one["flops"]
    assert one["collectives"] == 0 < two["collectives"] and one["sent_bytes"] == 0 < two["sent_bytes"]
    assert two["peak_bytes"] < weak * one["peak_bytes"]
    assert {len(seconds) for seconds in two["seconds"].values()} == {2}
    assert set(told) >= {"command", "commit", "cpu", "versions", "model", "batch"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp 4", "Not measured at 4 ranks: only 1 ranks were started."),
        ("--tp 1 --preset gpt-3-175b", r"Not measured at 1 ranks: it takes 2,[\d.]+ GB, there are [\d.,]+ GB of memory."),
        ("--rounds 0", "--rounds is at least 1 and --warmup at least 0, got 0 and 2"),
        ("--compile --warmup 0", "--compile needs --warmup 1 at least, in which it compiles, got 0"),
        ("--peak-tflops 0", "--peak-tflops is above 0, got 0.0"),
        ("--weak --strong", "argument --strong: not allowed with argument --weak"),
        ("--tp 0", "argument --tp: a number of ranks is at least 1, got 0"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        scaling.main(line.split())
    assert ended.value.code == 2 and re.search(rf"error: {message}\n$", capsys.readouterr().err)


def test_help(tmp_path: Path) -> None:
    ended = python("-m", "benchmarks.scaling", "--help", cwd=tmp_path)
    assert ended.code == 0 and "--sequence-parallel" in ended.output and "idle at a barrier" in ended.output
