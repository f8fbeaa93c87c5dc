"""The timing loop of the benchmarks under a clock that only moves when told, and the arithmetic of rates.

The numbered cases are ways in which other programs measured wrongly: without warm-up, without a barrier, on one rank, with the
tokens counted once a rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import block
from benchmarks.plain import PlainBlock
from benchmarks.timing import Ranks, Spread, Throughput, commit, header, measure, save, strong_scaling_efficiency, table
from parallel import collectives
from parallel.group import TPGroup, single_device


class FakeRanks(Ranks):
    """Two ranks, of which the other needs ``other`` seconds for everything; meeting takes no time."""

    def __init__(self, log: list[str], other: float = 0.0) -> None:
        super().__init__(torch.device("cpu"))
        self.log, self.other = log, other

    def meet(self) -> None:
        self.log.append("meet")

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        return [max(s, self.other) for s in seconds]


class FakeClock:
    """A contender takes the next of its ``seconds``."""

    def __init__(self, log: list[str]) -> None:
        self.now, self.log = 0.0, log

    def __call__(self) -> float:
        self.log.append("clock")
        return self.now

    def contender(self, name: str, seconds: Sequence[float]) -> Callable[[], None]:
        coming = iter(seconds)

        def run() -> None:
            self.log.append(name)
            self.now += next(coming)

        return run


def test_c91_warm_up_is_dropped_and_all_ranks_meet_before_start_and_stop() -> None:
    log: list[str] = []
    clock = FakeClock(log)
    contender = clock.contender("a", [100.0, 50.0, 1.0, 2.0, 3.0])
    assert measure({"a": contender}, FakeRanks(log), rounds=3, warmup=2, clock=clock) == {"a": [1.0, 2.0, 3.0]}
    assert log == ["meet", "clock", "a", "meet", "clock"] * 5


def test_c91_the_slowest_rank_counts() -> None:
    log: list[str] = []
    clock = FakeClock(log)
    contender = clock.contender("a", [9.0, 1.0, 4.0, 2.0])
    assert measure({"a": contender}, FakeRanks(log, other=3.0), rounds=3, warmup=1, clock=clock) == {"a": [3.0, 4.0, 3.0]}


def test_c91_meeting_waits_for_the_device_and_then_for_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"synchronise {device}"))
    monkeypatch.setattr(dist, "barrier", lambda group: log.append("barrier"))
    monkeypatch.setattr(collectives, "all_reduce", lambda x, group: log.append(f"sum over {group.size}"))
    Ranks(torch.device("cuda", 1), TPGroup(0, 2)).meet()
    Ranks(torch.device("cpu"), TPGroup(0, 2)).meet()
    assert log == ["synchronise cuda:1", "barrier", "sum over 2"]


def test_c91_the_maximum_is_taken_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(values: torch.Tensor, group: TPGroup, op: str) -> torch.Tensor:
        assert group.size == 2 and op == "max" and values.dtype == torch.float64
        return torch.maximum(values, torch.tensor([2.0, 2.0], dtype=torch.float64))

    monkeypatch.setattr(collectives, "all_reduce", all_reduce)
    assert Ranks(torch.device("cpu"), TPGroup(0, 2)).slowest([1.0, 3.0]) == [2.0, 3.0]


def test_contenders_take_turns_in_alternating_order_and_steps_are_averaged() -> None:
    log: list[str] = []
    clock = FakeClock(log)
    contenders = {name: clock.contender(name, [1.0, 2.0] * 3) for name in ("a", "b")}
    result = measure(contenders, FakeRanks(log), rounds=2, warmup=1, steps=2, clock=clock)
    assert result == {"a": [1.5, 1.5], "b": [1.5, 1.5]}
    assert [entry for entry in log if entry in contenders] == list("aabbbbaaaabb")


def test_c89_tokens_of_the_global_batch_count_once_however_many_ranks_share_it() -> None:
    rate = Throughput(tokens=8 * 16, valid=8 * 16, seconds=1.0, devices=4)
    assert rate.raw_per_second == 128
    assert rate.raw_per_second_and_device == 32


def test_c92_raw_and_valid_tokens_and_the_efficiency_of_strong_scaling() -> None:
    rate = Throughput(tokens=1000, valid=600, seconds=0.5, devices=2)
    assert (rate.raw_per_second, rate.valid_per_second) == (2000, 1200)
    assert strong_scaling_efficiency(8.0, 2.0, 4) == 1.0
    assert strong_scaling_efficiency(1.0, 2.0, 2) == 0.25  # two devices slower than one


def test_spread_is_the_median_between_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert f"{Spread(1.0, 0.5, 2.0):.1f}" == "1.0 (0.5 to 2.0)"


def test_results_say_how_they_were_made(tmp_path: Path) -> None:
    about = header("python -m benchmarks.block", torch.device("cpu"))
    assert {"command", "commit", "cpu", "threads a rank", "versions"} <= about.keys()
    assert about["commit"] == commit()
    save("x", "Title", table([{"a": "1", "b": "2"}]), about, {"a": [1.0]}, folder=tmp_path)
    text = (tmp_path / "x.md").read_text()
    assert text.startswith("# Title\n\n- command: `python -m benchmarks.block`\n")
    assert text.endswith("| a | b |\n| --- | --- |\n| 1 | 2 |\n")
    assert json.loads((tmp_path / "x.json").read_text())["samples"] == {"a": [1.0]}


def test_the_block_is_compared_with_an_equal_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    size = block.Size(dim=128, batch=2, seq=8)
    case = block.Case(size, single_device(), torch.device("cpu"))
    case.plain()
    whole = PlainBlock.forward
    monkeypatch.setattr(PlainBlock, "forward", lambda self, x, cos, sin: whole(self, x, cos, -sin))
    with pytest.raises(AssertionError, match="output"):
        case.plain()
