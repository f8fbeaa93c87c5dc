"""benchmarks.compare: how contenders take turns and what is made of it, with contenders that only pretend to compute; and one real
run against the peers that are installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import compare, program
from benchmarks.peers import common
from benchmarks.peers.remote import FailedError, Remote

FAKE = """
import json, os, sys, time

name, log = sys.argv[1:]
rank, turns = int(os.environ["RANK"]), 0
for line in sys.stdin:
    request = json.loads(line)
    reply = {"value": 0}
    if request["do"] == "build":
        reply = {"value": ["torch 2.0" if name == "megatron" else "torch 1.0", f"{name} 1.0"]}
        if name == "transformers":
            reply = {"unsupported": "not installed (No module named 'transformers')"}
    elif request["do"] == "check":
        loss = 2.5 if name == "dtensor" else 2.0
        reply = {"value": {"numbers": {"loss": [loss, loss]}, "collectives": 4}}
    elif request["do"] == "time":
        if name == "autotp":
            print("the disk is full", file=sys.stderr, flush=True)
            os._exit(3)
        turns += 1
        slowest = 0.05 if turns == 2 else 100.0 if turns == 1 else {"tpblock": 1.0, "megatron": 4.0}[name]
        reply = {"value": slowest / (2 - rank)}
        if rank == 0:
            with open(log, "a") as file:
                file.write(f"{name} {request['steps']}\\n")
    elif request["do"] == "raise" and rank == 1:
        reply = {"error": "ValueError: of rank 1"}
    elif request["do"] in ("raise", "hang"):
        time.sleep(60)
    print(json.dumps(reply), flush=True)
"""


class Run(NamedTuple):
    code: int
    folder: Path
    errors: str

    def file(self, ending: str) -> Path:
        [file] = (self.folder / "out").glob(f"compare-2-ranks-megatron-*.{ending}")
        return file


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Remote]:
    script = tmp_path_factory.mktemp("fake") / "fake.py"
    script.write_text(FAKE)
    return lambda name: Remote(name, [sys.executable, str(script), name, str(script.parent / "log")], ranks=2, timeout=20.0)


@pytest.fixture(scope="module")
def run(fake: Callable[[str], Remote], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four peers, and what each pretends: see FAKE."""
    folder = Path(fake("").command[-1]).parent
    peers = "megatron,dtensor,transformers,autotp"
    arguments = f"--peers {peers} --sizes latency --what model --passes backward --sequence-parallel off --compile off"
    with pytest.MonkeyPatch.context() as patch:
        errors: list[str] = []
        patch.setattr(sys.stderr, "write", errors.append)
        code = compare.main([*arguments.split(), "--rounds", "3", "--warmup", "2", "--out", str(folder / "out")], fake)
    return Run(code, folder, "".join(errors))


def test_contenders_take_turns_in_alternating_order(run: Run) -> None:
    turns = [line.split() for line in (run.folder / "log").read_text().splitlines()]
    ours, peer = "tpblock", "megatron"
    assert [name for name, _ in turns[:10]] == [ours, peer, peer, ours, ours, peer, peer, ours, ours, peer]
    assert [int(steps) for _, steps in turns[:10]] == [1] * 4 + [2] * 6  # 0.1 seconds of what takes 0.05


def test_warm_up_is_dropped_and_the_slowest_rank_counts(run: Run) -> None:
    samples = json.loads(run.file("json").read_text())["samples"]
    assert samples == {
        "model, latency (dim 256, 64 tokens), forward + backward, megatron": {"ours": [1.0] * 3, "peer": [4.0] * 3}
    }


def test_the_table_has_ratio_interval_and_goal_and_is_drawn(run: Run) -> None:
    text = run.file("md").read_text()
    case = "model, latency (dim 256, 64 tokens) | forward + backward | megatron"
    assert f"| {case} | 1000.00 | 4000.00 | **0.250** (0.250 to 0.250) | 0.85 | 3 | 4; 4 |" in text
    assert (
        "- versions of tpblock: torch 1.0, tpblock 1.0\n" in text
        and "- megatron runs on torch 2.0, ours on torch 1.0." in text
    )
    assert "`gloo` is ours over" in text and "- ranks: 2\n" in text and str(run.folder) not in text
    assert run.file("png").stat().st_size > 1000


def test_different_results_are_an_error_that_names_both_numbers(run: Run) -> None:
    message = "dtensor is not compared in model, latency (dim 256, 64 tokens): loss 2 of ours, 2.5 of theirs"
    assert run.code == 1 and f"error: {message}" in run.errors
    assert f"- Error: {message}" in run.file("md").read_text()


def test_a_peer_that_is_missing_or_crashes_is_noted(run: Run) -> None:
    text = run.file("md").read_text()
    assert "- transformers, model: not installed (No module named 'transformers')." in text
    assert "- Error: autotp, model, latency (dim 256, 64 tokens): failed." in text
    assert "ended with exit code 3" in text and "wrote: the disk is full" in text


def test_an_error_or_silence_of_one_rank_ends_the_contender_which_can_start_again(fake: Callable[[str], Remote]) -> None:
    remote = fake("megatron")
    with pytest.raises(FailedError, match="megatron, rank 1: ValueError: of rank 1"):
        remote.ask(do="raise")
    remote.timeout = 1.0
    with pytest.raises(FailedError, match="megatron: no answer in 1 seconds"):
        remote.ask(do="hang")
    remote.timeout = 20.0
    assert remote.ask(do="build") == [["torch 2.0", "megatron 1.0"]] * 2
    remote.stop()


def test_the_interval_of_a_known_sample() -> None:
    assert compare.interval([0.5] * 7) == compare.Interval(0.5, 0.5, 0.5)
    ratios = [0.9 + 0.002 * i for i in range(101)]
    spread = compare.interval(ratios)
    # Of the order statistics of 101 values, those at 50 -+ 1.96 * sqrt(101) / 2 bound the median with 95%.
    assert spread.median == pytest.approx(1.0)
    assert (spread.low, spread.high) == (pytest.approx(ratios[40], abs=0.005), pytest.approx(ratios[60], abs=0.005))


def test_numbers_are_compared_at_their_scale() -> None:
    ours = {"output": (0.001, 2.0), "loss": (3.0, 3.0)}
    assert compare.mismatch(ours, {"output": (0.00110, 2.0), "loss": (3.0002, 3.0)}) is None
    assert compare.mismatch(ours, {"output": (0.00130, 2.0), "loss": (3.0, 3.0)}) == "output 0.001 of ours, 0.0013 of theirs"
    assert "nan of theirs" in str(compare.mismatch(ours, {"output": (0.001, 2.0), "loss": (float("nan"), 3.0)}))
    assert "the other loss" in str(compare.mismatch(ours, {"loss": (3.0, 3.0)}))


def test_the_command_leaves_out_paths_of_this_machine() -> None:
    given = ["--rounds", "3", "--megatron-python", "/home/me/bin/python", "--out", "/home/me"]
    assert compare.without_paths(given) == ["--rounds", "3", "--megatron-python", "OTHER/bin/python"]
    assert compare.without_paths(["--megatron-python=/home/me"]) == ["--megatron-python=OTHER/bin/python"]


def test_every_peer_has_a_file_and_unknown_ones_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name for peer in compare.PEERS for name in compare.pair(peer)} == common.MODULES.keys()
    with pytest.raises(SystemExit):
        compare.main(["--peers", "dtensor,horovod"])
    assert "horovod: not one of" in capsys.readouterr().err


def test_more_ranks_than_heads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--ranks", "8"])
    assert "--ranks is from 1 to 4, the heads of the narrowest size, got 8" in capsys.readouterr().err


@pytest.mark.parametrize(("peer", "why"), [("transformers", "nothing was compared"), ("autotp", "the disk is full")])
def test_a_run_without_results_or_with_a_failure_is_no_success(
    fake: Callable[[str], Remote], tmp_path: Path, capsys: pytest.CaptureFixture[str], peer: str, why: str
) -> None:
    arguments = f"--peers {peer} --sizes latency --what model --passes step --sequence-parallel off --compile off"
    assert compare.main([*arguments.split(), "--rounds", "1", "--out", str(tmp_path)], fake) == 1
    assert why in capsys.readouterr().err


def test_names_of_runs_tell_them_apart_and_stay_short() -> None:
    parser = compare.make_parser()

    def name(*arguments: str) -> str:
        return program.name_of_run(parser.parse_args(arguments), parser, compare.NAMES)

    runs = [
        [],
        ["--passes", "step"],
        ["--layers", "2"],
        ["--compile", "off"],
        ["--sequence-parallel", "off"],
        ["--what", "block"],
    ]
    long = ["--peers", "dtensor,transformers,autotp,megatron-sdpa", "--sizes", "latency,middle", "--passes", "forward"]
    names = [name(*run) for run in [*runs, long, [*long, "--compile", "on"]]]
    assert len(set(names)) == len(names) and max(map(len, names)) <= program.LONGEST_NAME
    assert names[0] == "" and names[2] == "layers 2"


@pytest.mark.slow
def test_the_real_contenders_agree_and_are_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs = {"transformers": "transformers", "autotp": "deepspeed", "megatron": "megatron", "megatron-sdpa": "megatron"}
    own = ("parallel", "gloo", "mkl")
    peers = [*own, "dtensor", *(peer for peer, package in needs.items() if importlib.util.find_spec(package))]
    monkeypatch.setitem(compare.SIZES, "latency", (128, 2, 16))
    switches = "--sequence-parallel both --compile off --layers 2 --ranks 2 --rounds 1 --warmup 1"
    code = compare.main(["--sizes", "latency", "--peers", ",".join(peers), *switches.split(), "--out", str(tmp_path)])
    text = capsys.readouterr().out
    assert code == 0 and "failed" not in text, text
    for peer in peers:
        forms = 2 if peer in (*own, "dtensor") else 1
        assert text.count(f"| {peer} |") == 2 * forms * len(common.PASSES), f"{peer}:\n{text}"
