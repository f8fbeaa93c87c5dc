"""The cost model against sums by hand, the work it counts against real steps, and the programs around it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import calibrate, cost_model, predict, rates
from benchmarks.cost_model import (
    BUCKET,
    Collective,
    Engine,
    Launch,
    Link,
    Machine,
    Plan,
    Speeds,
    compute_seconds,
    exposed_seconds,
    fit,
    interpolate,
    phase_seconds,
)
from benchmarks.cost_model import predict as predicted
from benchmarks.data_sheets import SHEETS, machine
from benchmarks.flops import training_flops
from benchmarks.memory_formula import peak_bytes, training_bytes
from benchmarks.scaling import count_traffic
from benchmarks.traffic import Sent
from benchmarks.work import Attention, Pass, Phase, Product, Send, step_work
from benchmarks.workload import PHASES, Training, Workload
from parallel.group import TPGroup, single_device
from tests.helpers import own_collectives
from tests.pool import Pool
from tests.programs import torchrun
from tests.test_collectives import CONFIGS, PRE
from tpblock import ModelConfig, Position, preset

F32 = torch.float32
NONE = Launch(layer=0, rest=0)


def simple(**changes: Any) -> Machine:
    """100 operations and 10 bytes a second, collectives of 2 ranks 3 s + 0.5 s a byte, no launches."""
    speeds = {
        "matrix": {"float32": [(1, 100)]},
        "attention": {"float32 forward": [(1, 50)], "float32 backward": [(1, 25)]},
        "memory": {"float32 add": [(1, 10)], "any": [(1, 1e9)]},
        "launch": dict.fromkeys(PHASES, NONE),
        "overlap": changes.pop("overlap", 0.0),
    }
    told = {
        "name": "simple",
        "sources": {},
        "peak": {"float32": 100},
        "memory_bytes": 1e12,
        "devices_per_node": 4,
        "asynchronous": False,
        "shared": True,
        "speeds": {1: speeds, 2: speeds},
        "collectives": {2: {"all_reduce": Collective(seconds=3, seconds_per_byte=0.5)}},
    }
    return Machine.model_validate(told | changes)


# --- arithmetic by hand


def test_a_product_attention_and_a_pass() -> None:
    product, on = Product(2, 3, 5), simple()
    assert product.flops == 60 and product.side == pytest.approx(30 ** (1 / 3), abs=1e-3)
    assert compute_seconds(Phase(products=Counter({product: 2})), on, 1, F32) == pytest.approx(2 * 60 / 100)
    forward, backward = Attention(4, 4, 1), Attention(4, 4, 1, backward=True)
    assert compute_seconds(Phase(attention=Counter([forward, backward])), on, 1, F32) == pytest.approx(64 / 50 + 160 / 25)
    assert compute_seconds(Phase(passes=Counter({Pass("add", 40): 3})), on, 1, F32) == pytest.approx(12)
    slow = simple(speeds={1: simple().speeds[1].model_copy(update={"memory": {"any": ((1, 2),)}})})
    assert compute_seconds(Phase(products=Counter([product])), slow, 1, F32) == pytest.approx((10 + 15 + 6) * 4 / 2)


def test_a_collective_and_what_it_hides_behind() -> None:
    sent, beside = Sent("all_reduce", 10, F32), Product(2, 3, 5)
    alone = Phase(sent=Counter({Send(sent): 2}))
    assert exposed_seconds(alone, simple(), 2, 2, F32) == pytest.approx(2 * (3 + 0.5 * 40))
    hidden = Phase(sent=Counter([Send(sent, beside)]))
    assert exposed_seconds(hidden, simple(overlap=0.5), 2, 2, F32) == pytest.approx(23 - 0.5 * 0.6)  # the product is shorter
    quick = simple(overlap=1.0, collectives={2: {"all_reduce": Collective(seconds=0.1, seconds_per_byte=0)}})
    assert exposed_seconds(hidden, quick, 2, 2, F32) == 0


def test_launches_are_added_or_run_ahead() -> None:
    work, load = Phase(products=Counter([Product(2, 3, 5)])), Workload(PRE, 1, 2)  # 0.6 s, three layers
    speeds = simple().speeds[1].model_copy(update={"launch": dict.fromkeys(PHASES, Launch(layer=1, rest=0.5))})
    added = phase_seconds("forward", work, load, simple(speeds={1: speeds}), 1, 1)
    ahead = phase_seconds("forward", work, load, simple(speeds={1: speeds}, asynchronous=True), 1, 1)
    assert (added.compute, ahead.compute) == (pytest.approx(0.6 + 3.5), pytest.approx(3.5))


def test_a_ring_within_a_node_and_over_nodes() -> None:
    node, network = Link(latency=1, bandwidth=10, start=2), Link(latency=5, bandwidth=1)
    on = simple(collectives={}, node=node, network=network)
    assert on.collective("all_reduce", 4)(100) == pytest.approx(2 + 6 * 1 + 2 * 3 / 4 * 100 / 10)
    assert on.collective("all_gather", 4)(100) == pytest.approx(2 + 3 * 1 + 3 / 4 * 100 / 10)
    over = on.collective("reduce_scatter", 4, apart=2)  # two of the group on each of two nodes: two adapters
    assert over(100) == pytest.approx(3 * 5 + 3 / 4 * 100 / 2)
    assert on.collective("all_reduce", 2)(100) == pytest.approx(2 + 2 + 10)
    with pytest.raises(ValueError, match="collectives of 2 ranks over nodes of 4 devices: measured were 2"):
        simple().collective("all_reduce", 2, apart=4)


def test_points_are_interpolated_in_logarithms() -> None:
    points = ((10.0, 1.0), (1000.0, 100.0))
    assert [interpolate(points, x) for x in (1, 10, 100, 1000, 5000)] == pytest.approx([1, 1, 10, 100, 100])


def test_the_fit_finds_what_was_planted_and_gives_nothing_negative() -> None:
    sizes = rates.MESSAGES
    found = fit({size: 5e-5 + 2e-9 * size for size in sizes})
    assert found.seconds == pytest.approx(5e-5) and found.seconds_per_byte == pytest.approx(2e-9)
    assert found.error < 1e-9
    noisy = fit({size: (5e-5 + 2e-9 * size) * (1.1 if place % 2 else 0.9) for place, size in enumerate(sizes)})
    assert noisy.seconds == pytest.approx(5e-5, rel=0.15) and noisy.seconds_per_byte == pytest.approx(2e-9, rel=0.15)
    assert noisy.error == pytest.approx(0.1, rel=0.2)
    convex = fit({1000: 1e-6, 10_000: 1e-4, 100_000: 3e-3})
    assert convex.seconds == 0 < convex.seconds_per_byte
    falling = fit({1000: 3.0, 10_000: 2.0, 100_000: 1.0})
    assert falling.seconds_per_byte == 0 < falling.seconds


# --- what is counted


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputation"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_operations_are_those_of_the_formula_on_every_rank(name: str, ranks: int, again: bool) -> None:
    config = CONFIGS[name]
    for rank in range(ranks):
        work = step_work(Workload(config, 2, 6, activation_checkpointing=again), rank, ranks)
        flops = training_flops(config, 2, 6, rank, ranks, activation_checkpointing=again)
        assert work["forward"].flops == flops.forward
        assert work["backward"].flops == flops.backward + flops.attention_again + flops.recomputation
    if config.kv_heads >= ranks:
        shares = [step_work(Workload(config, 2, 6), rank, ranks) for rank in range(ranks)]
        whole = step_work(Workload(config, 2, 6), 0, 1)
        assert sum(w["forward"].flops for w in shares) == whole["forward"].flops


def sent_by(group: TPGroup, config: ModelConfig, sp: bool, again: bool) -> list[Counter[tuple[str, int, str]]]:
    load = Workload(config, 3, 6, sequence_parallel=sp, activation_checkpointing=again)
    with own_collectives():
        sent = count_traffic(Training(load, group, torch.empty(0).device))
    return [Counter((s.kind, s.elements, str(s.dtype)) for s in sent[phase]) for phase in PHASES]


LEARNED = replace(CONFIGS["pre, biases"], position=Position.LEARNED, tied_embeddings=True, max_seq_len=6)


@pytest.mark.parametrize("again", [False, True], ids=["", "recomputation"])
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sequence-parallel"])
@pytest.mark.parametrize("config", [*CONFIGS.values(), LEARNED], ids=[*CONFIGS, "learned positions"])
def test_collectives_are_those_that_a_real_step_is_seen_to_send(
    pool: Pool, config: ModelConfig, sp: bool, again: bool
) -> None:
    """18 tokens on four ranks: under sequence parallelism they are padded to 20 on the wire."""
    work = step_work(Workload(config, 3, 6, sequence_parallel=sp, activation_checkpointing=again), 0, 4)
    counted = []
    for phase in PHASES:
        found: Counter[tuple[str, int, str]] = Counter()
        for s, number in work[phase].collectives.items():
            found[s.kind, s.elements, str(s.dtype)] += number
        counted.append(found)
    assert pool.run(4, sent_by, config, sp, again)[0] == counted


# --- predictions


LOAD = Workload(preset("llama-3-8b"), 64, 2048, torch.bfloat16)


def test_more_ranks_compute_less_each_and_the_model_needs_the_same() -> None:
    found = [predicted(LOAD, Plan(tp=tp, micro=1), machine("h100")) for tp in (1, 2, 4, 8)]
    assert [f.compute for f in found] == sorted((f.compute for f in found), reverse=True)
    assert len({f.model_flops for f in found}) == 1
    assert found[0].exposed == 0 < found[1].exposed < found[2].exposed
    for f in found:
        assert f.step == pytest.approx(f.compute + f.exposed + f.data) and 0 < f.mfu < 0.75
        assert f.throughput.raw_per_second == pytest.approx(64 * 2048 / f.step)
    better = predicted(LOAD, Plan(tp=2, micro=1), machine("h100", matrix_efficiency=0.9))
    assert better.compute < found[1].compute and better.mfu > found[1].mfu


@pytest.mark.parametrize("sp", [False, True])
def test_memory_is_that_of_the_formula(sp: bool) -> None:
    load = replace(LOAD, sequence_parallel=sp)
    found = predicted(load, Plan(tp=4, dp=2, micro=4), machine("h100"))
    formula = training_bytes(replace(load, batch=4), 0, 4, on_gpu=True)
    peak = peak_bytes(replace(load, batch=4), 0, 4, on_gpu=True, accumulate=True)
    assert found.held == formula and found.memory == peak + 2 * BUCKET
    whole = replace(load, batch=4)
    for master, more in ((False, 0), (True, 12 * formula.parameters // 2 - formula.optimizer)):
        alone = predicted(whole, Plan(tp=4, micro=4, master=master), machine("h100"))
        assert alone.memory == peak_bytes(whole, 0, 4, on_gpu=True) + more
    shared = predicted(load, Plan(tp=4, dp=2, micro=32, engine="fsdp2"), machine("h100")).held
    assert shared.parameters == math.ceil(formula.parameters / 2) and shared.gradients == math.ceil(formula.gradients / 2)
    assert shared.optimizer == math.ceil(formula.optimizer / 2)
    several = predicted(load, Plan(tp=4, dp=2, micro=4, engine="fsdp2"), machine("h100")).held
    assert several.gradients == 2 * formula.gradients  # whole, in float32, until the last micro-batch
    master = predicted(load, Plan(tp=4, dp=2, micro=4, master=True), machine("h100")).held
    assert master.optimizer == 12 * formula.parameters // 2


def test_replicas_add_their_gradients_behind_backward() -> None:
    config = ModelConfig(vocab_size=16, dim=16, layers=2, heads=2, d_ff=16)
    load = Workload(config, 4, 4)
    fast = simple(collectives={2: {"all_reduce": Collective(seconds=0, seconds_per_byte=1e-6)}}, overlap=0.0)
    found = predicted(load, Plan(tp=1, dp=2, micro=2), fast)
    assert config.parameters() * 4 < BUCKET
    assert found.data == pytest.approx(config.parameters() * 4e-6)
    assert found.micro_batches == 1 and predicted(load, Plan(tp=1, dp=2, micro=1), fast).micro_batches == 2
    with pytest.raises(ValueError, match="4 sequences cannot be dealt over 2 replicas in micro-batches of 3"):
        predicted(load, Plan(tp=1, dp=2, micro=3), fast)
    with pytest.raises(ValueError, match="measured with 2 ranks at most, which share its cores: not with 4"):
        predicted(load, Plan(tp=1, dp=4, micro=1), fast)
    with pytest.raises(ValueError, match="no rate for bfloat16; there are float32"):
        predicted(replace(load, dtype=torch.bfloat16), Plan(tp=1, micro=1), fast)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_overlap_hides_its_share_of_the_shorter_and_no_more(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "BUCKET", 2**10)
    config = ModelConfig(vocab_size=16, dim=16, layers=50, heads=2, d_ff=16)
    load, kinds = Workload(config, 4, 4), ("all_reduce", "all_gather", "reduce_scatter")

    def data(seconds_per_byte: float, overlap: float) -> float:
        sent = {2: dict.fromkeys(kinds, Collective(seconds=0, seconds_per_byte=seconds_per_byte))}
        return predicted(load, Plan(tp=1, dp=2, micro=2, engine=engine), simple(collectives=sent, overlap=overlap)).data

    fast, slow = 1e-6, 1e3  # the computation is longer, and shorter
    assert 0.2 * data(fast, 0.0) == pytest.approx(data(fast, 0.8), rel=0.05)  # but for what nothing covers
    hidden = data(slow, 0.0) - data(slow, 0.8)
    assert 0 < hidden < 1e-3 * data(slow, 0.0)
    assert hidden == pytest.approx(0.8 / 0.4 * (data(slow, 0.0) - data(slow, 0.4)))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_collectives_beyond_the_largest_measured_on_a_cpu_are_told(engine: Engine) -> None:
    config = ModelConfig(vocab_size=16, dim=16, layers=2, heads=2, d_ff=16)
    load, kinds = Workload(config, 4, 4), ("all_reduce", "all_gather", "reduce_scatter")
    sent = {2: dict.fromkeys(kinds, Collective(seconds=0, seconds_per_byte=1e-6))}
    for tp, dp, most in ((2, 1, 4 * 4 * 16 * 4), (1, 2, config.parameters() * 4)):
        plan = Plan(tp=tp, dp=dp, micro=4 // dp, engine=engine)
        beyond = [predicted(load, plan, simple(collectives=sent, largest_collective=n)).beyond for n in (None, 64, 10**6)]
        assert beyond[0] == beyond[2] == 0 and (beyond[1] == most if dp == 1 or engine == "ddp" else 0 < beyond[1] < most)
    assert predicted(load, plan, simple(collectives=sent, largest_collective=64, shared=False)).beyond == 0


def test_every_figure_of_a_data_sheet_has_its_source() -> None:
    for name, sheet in SHEETS.items():
        figures = {key for key, value in vars(sheet).items() if isinstance(value, float)} - {"attention"}
        assert set(sheet.sources) == figures, name
        assert all("https://" in source and any(c.isdigit() for c in source) for source in sheet.sources.values())
        assert sheet.float32 < sheet.bfloat16 and sheet.network < sheet.nvlink < sheet.bandwidth
        assert Machine.model_validate_json(machine(name).model_dump_json()) == machine(name)
    assert (SHEETS["h100"].bfloat16, SHEETS["h100"].bandwidth, SHEETS["h100"].memory) == (989e12, 3.35e12, 80e9)


# --- the programs


def test_the_program_answers_with_a_table_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict.main(["--model", "llama3-70b", "--gpus", "8,16,64", "--gpu", "h100", "--out", str(tmp_path)])
    told = capsys.readouterr().out
    numbers, text, plot = sorted(tmp_path.iterdir())
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 10_000
    written = text.read_text()
    assert "For 64 GPUs: TP 1 x DP 64 with fsdp2" in told and "For 8 GPUs: nothing fits" in written
    assert "does not fit" in written and "--out" not in written and str(tmp_path) not in written + numbers.read_text()
    assert "https://www.nvidia.com" in written
    rows = json.loads(numbers.read_text())["samples"]
    assert list(rows) == ["8", "16", "64"]
    assert {(row["tp"], row["dp"]) for row in rows["64"]} == {(1, 64), (2, 32), (4, 16), (8, 8)}
    for row in rows["64"]:
        assert row["step_seconds"] > 0 and (row["bytes"]["peak"] <= row["bytes"]["usable"]) == row["fits"]


def run_to_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        predict.main(list(arguments))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("error: ")
    return error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "llama-9"], "unknown model 'llama-9'; there are stack-100m, llama-2-7b"),
        (["--model", "gpt-2", "--gpu", "h900"], "unknown GPU 'h900'; there are a100-80g, h100, h200, b200"),
        (["--model", "gpt-2", "--gpus", "12"], "12 GPUs are not whole nodes of 8"),
        (["--model", "gpt-2", "--gpus", "64", "--batch", "3"], "nothing runs on 64 GPUs"),
        (["--model", "gpt-2", "--gpus", "8", "--tp", "3"], "No TP of 3 ranks: it does not divide the 8 GPUs of a node"),
        (["--model", "gpt-2", "--seq-len", "2000"], "--seq-len 2000 is longer than the 1024 tokens of gpt-2"),
        (["--model", "gpt-2", "--matrix-efficiency", "2"], "above 0 and at most 1, got 2.0"),
        (["--model", "gpt-2", "--matrix-efficiency", "0"], "above 0 and at most 1, got 0.0"),
        (["--model", "gpt-2", "--seq-len", "0"], "2 tokens at least, got 256 of 0"),
        (["--model", "gpt-2", "--usable-memory", "0"], "above 0 and at most 1, got 0.0"),
        (["--model", "gpt-2", "--gpu", "nowhere.json"], "nowhere.json cannot be read as JSON"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert said in run_to_error(capsys, *arguments)


WHOLE = simple().model_dump(mode="json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "not a file of benchmarks.calibrate"),
        ('{"samples": {"machine": 3}}', "not a file of benchmarks.calibrate"),
        (json.dumps({"samples": {"machine": WHOLE | {"memory_bytes": -1}}}), "memory_bytes: Input should be greater than 0"),
        (json.dumps({"samples": {"machine": WHOLE | {"memory_bytes": float("nan")}}}), "memory_bytes: Input should be"),
        (json.dumps({"samples": {"machine": WHOLE | {"speeds": {}}}}), "the speeds of a single rank are missing"),
        (json.dumps({"samples": {"machine": WHOLE | {"extra": 1}}}), "extra: Extra inputs are not permitted"),
        (json.dumps({"samples": {"machine": WHOLE}}), "simple has no rate for float32"),
    ],
)
def test_hostile_calibrations_are_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    path = tmp_path / "machine.json"
    if said.startswith("simple has"):
        content = content.replace('"matrix": {"float32"', '"matrix": {"float64"')
    path.write_text(content)
    assert said in run_to_error(capsys, "--model", "gpt-2", "--gpus", "2", "--gpu", str(path), "--out", str(tmp_path))


def test_a_folder_of_hugging_face_is_a_model_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    fields |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    fields |= {"max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu"}
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    assert predict.model_of(str(folder / "config.json"))[1] == predict.model_of(str(folder))[1]
    assert predict.model_of(str(folder))[1].d_ff == 48
    (folder / "config.json").write_text("{}")
    assert "architecture None is not supported" in run_to_error(capsys, "--model", str(folder))


def test_calibration_on_two_ranks_and_a_prediction_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results"
    ended = torchrun(2, "-m", "benchmarks.calibrate", "--quick", "--rounds", "1", "--out", str(out), cwd=tmp_path)
    assert ended.code == 0, ended.errors
    numbers, text = sorted(out.iterdir())
    told = json.loads(numbers.read_text())
    assert (
        set(told) >= {"command", "commit", "cpu", "versions"} and str(tmp_path) not in text.read_text() + numbers.read_text()
    )
    found = Machine.load(numbers)
    assert set(found.speeds) == {1, 2} and set(found.collectives) == {2}
    assert set(found.collectives[2]) == {"all_reduce", "all_gather", "reduce_scatter"}
    arguments = ["--model", "gpt-2", "--gpu", str(numbers), "--batch", "2", "--out", str(out), "--seq-len", "64"]
    predict.main([*arguments, "--gpus", "1,2"])
    assert "For 2 GPUs: TP" in capsys.readouterr().out
    assert "measured with 2 ranks at most" in run_to_error(capsys, *arguments, "--gpus", "4", "--gpus-per-node", "4")


def test_a_block_of_pretended_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--vocab-size", "64", "--dim", "64", "--heads", "8", "--layers", "1", "--batch", "1", "--seq-len", "16"]
    calibrate.main(["--fake-tp", "1,4,16", "--quick", "--rounds", "1", "--out", str(tmp_path), *sizes])
    told = capsys.readouterr().out
    assert "Not measured at 16 ranks: 8 query heads cannot be dealt over 16" in told
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["samples"]["compared"]
    assert [row["TP"] for row in rows] == ["1", "4"] and all(float(row["forward, predicted/measured"]) > 0 for row in rows)
    assert not torch.distributed.is_initialized()


def test_mistakes_of_calibration(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in [
        (["--rounds", "0"], "--rounds is at least 1, got 0"),
        (["--tp", "2"], "--tp begins with 1"),
        (["--dim", "64"], "a model or batch has no effect without --fake-tp"),
        (["--batch", "2"], "a model or batch has no effect without --fake-tp"),
        (["--fake-tp", "2", "--padding", "0.5"], "--tp and --padding have no effect with --fake-tp"),
        (["--preset", "gpt-2", "--fake-tp", "64"], "Not measured at 64 ranks: 12 query heads cannot be dealt over 64"),
    ]:
        with pytest.raises(SystemExit):
            calibrate.main(arguments)
        assert said in capsys.readouterr().err


def test_overlap_is_the_share_of_the_shorter() -> None:
    one = rates.Calibration(single_device(), torch.device("cpu"), F32, rates.Scale(torch.device("cpu"), True))
    samples = {"beside, product": [4.0], "beside, sum": [2.0], "beside, both": [5.0]}
    assert one._hidden(samples) == 0.5
    assert one._hidden(samples | {"beside, both": [9.0]}) == 0.0
    assert one._hidden(samples | {"beside, both": [3.0]}) == 1.0


def test_speeds_are_work_by_seconds() -> None:
    one = rates.Calibration(single_device(), torch.device("cpu"), F32, rates.Scale(torch.device("cpu"), True))
    samples = {name: [2.0 * one.calls[name]] for name in one.work}
    for layers, seconds in zip(rates.LAYERS, (0.5, 0.5 + 0.1 * (rates.LAYERS[1] - rates.LAYERS[0])), strict=True):
        samples |= {f"launches {layers}, {phase}": [seconds] for phase in PHASES}
    found: Speeds = one.speeds(samples)
    assert dict(found.matrix["float32"]) == {64.0: 3 * 64**3, 128.0: 3 * 128**3}
    assert found.launch["forward"].layer == pytest.approx(0.1) and found.launch["forward"].rest == pytest.approx(0.4)
    (size, rate) = found.memory["float32 add"][0]
    assert rate == size / 2
    assert {"float32 rmsnorm backward", "float32 swiglu", "float32 loss", "float32 update"} <= set(found.memory)
