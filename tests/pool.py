"""A pool of gloo (or NCCL) processes that serves all multi-rank tests of one pytest session.

    def check(group: TPGroup, size: int) -> Tensor: ...          # at module level, so that it can be pickled

    def test_it(pool):
        results = pool.run(2, check, 16)                         # one result a rank

What a run guarantees:

* an exception of the same type on every rank is raised again as it is, so that ``pytest.raises(ValueError)`` also proves that
  no rank was left behind; anything else becomes a :class:`WorkerError` that shows every failing rank;
* a run that hangs fails after ``timeout`` seconds with the stack of every worker;
* workers that may be out of step are replaced before the next run.

With TPBLOCK_TEST_DEVICE=cuda the ranks live on GPUs: NCCL for groups that have a GPU a rank, else gloo on shared cards.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests import pool_worker

GRACE = 10.0
"""Seconds that the other ranks get to finish once one has failed."""


class WorkerError(RuntimeError):
    """Ranks that failed in different ways, hung or died."""


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    pipe: connection.Connection
    log: Path
    imported: set[str] = field(default_factory=set)

    def log_tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:].strip() if self.log.exists() else ""


def device_type() -> str:
    """The string cpu, or cuda if TPBLOCK_TEST_DEVICE says so."""
    return os.environ.get("TPBLOCK_TEST_DEVICE", "cpu")


class Pool:
    """``size`` worker processes, started at the first run and replaced after a run that left them in an unknown state."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    @staticmethod
    def device(rank: int) -> torch.device:
        """Where a rank's tensors live. Inside a worker this is also ``torch.get_default_device()``."""
        return pool_worker.device_of(rank, device_type())

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """``function(group, *args)`` on the first ``ranks`` workers, ``group`` being a TPGroup of exactly these."""
        return self._run(("group", ranks), ranks, function, args, timeout)

    def run_mesh(self, tp: int, dp: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
        """``function(mesh, *args)`` with a DeviceMesh of dimensions ("dp", "tp"); rank = dp_rank * tp + tp_rank."""
        mesh = ("mesh", dp, tp)
        self._start()
        self._exchange(range(self.size), pickle.dumps(mesh), timeout)  # making groups takes every process of the world
        return self._run(mesh, tp * dp, function, args, timeout)

    def pids(self) -> list[int | None]:
        self._start()
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        for worker in self._workers:
            worker.pipe.close()  # an idle worker takes this as the end
        for worker in self._workers:
            worker.process.join(1)
        self._kill()

    def _run(self, place: tuple[Any, ...], ranks: int, function: Any, args: tuple[Any, ...], timeout: float) -> list[Any]:
        if not 1 <= ranks <= self.size:
            raise ValueError(f"{ranks} ranks asked of a pool of {self.size}")
        self._start()
        self._import(range(ranks), function.__module__)
        task = pickle.dumps((place, function, args))
        outcomes = self._exchange(range(ranks), task, timeout)
        if not any(isinstance(outcome, pool_worker.Failure) for outcome in outcomes):
            return outcomes
        self._check_in_step(ranks, outcomes)
        raise _as_exception(outcomes)

    def _import(self, ranks: range, module: str) -> None:
        """Loads the test's module beforehand: on a busy machine one worker may need longer for it than another by GRACE."""
        if any(module not in self._workers[rank].imported for rank in ranks):
            self._exchange(ranks, pickle.dumps(("import", module)), 120)
        for rank in ranks:
            self._workers[rank].imported.add(module)

    def _exchange(self, ranks: range, message: bytes, timeout: float) -> list[Any]:
        """Sends one message to some workers and returns what each answers. Raises if one hangs or dies."""
        for rank in ranks:
            self._workers[rank].pipe.send_bytes(message)
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Any] = {}
        dead: list[int] = []
        while len(outcomes) + len(dead) < len(ranks):
            waiting = {self._workers[r].pipe: r for r in ranks if r not in outcomes and r not in dead}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._lost(f"no answer from ranks {sorted(waiting.values())} after {timeout:g} s", outcomes)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    outcomes[rank] = pickle.loads(self._workers[rank].pipe.recv_bytes())
                except EOFError:
                    dead.append(rank)
                if rank in dead or isinstance(outcomes[rank], pool_worker.Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        if dead:
            raise self._lost(f"ranks {dead} died", outcomes)
        return [outcomes[rank] for rank in ranks]

    def _check_in_step(self, ranks: int, outcomes: list[Any]) -> None:
        """After failures: keeps the workers only if all failed alike and a collective still works between them."""
        alike = all(isinstance(o, pool_worker.Failure) and o.kind == outcomes[0].kind for o in outcomes)
        try:
            echo = self._exchange(range(ranks), pickle.dumps(("echo", ranks)), GRACE) if alike else [None]
        except WorkerError:
            return
        if echo != [sum(range(ranks))] * ranks:
            self._kill()

    def _lost(self, what: str, outcomes: dict[int, Any]) -> WorkerError:
        """The error for workers that hang or died, with all that is known of each; the workers are given up."""
        for worker in self._workers:
            if worker.process.is_alive():
                os.kill(worker.process.pid or 0, signal.SIGUSR1)  # faulthandler writes the stacks to the log
        time.sleep(0.5)
        report = [what]
        for worker in self._workers:
            outcome = outcomes.get(worker.rank)
            if isinstance(outcome, pool_worker.Failure):
                report.append(f"--- rank {worker.rank} raised\n{outcome.trace}")
            else:
                state = "has answered or is idle" if worker.rank in outcomes else f"exit code {worker.process.exitcode}"
                report.append(f"--- rank {worker.rank} ({state})\n{worker.log_tail()}")
        self._kill()
        return WorkerError("\n".join(report))

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="tpblock-pool-"))
        context = get_context("spawn")  # a forked child would inherit OpenMP and CUDA in an unusable state
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                log = self._folder / f"rank{rank}.log"
                arguments = (rank, self.size, theirs, str(self._folder / "store"), str(log), device_type())
                process = context.Process(target=pool_worker.serve, args=arguments, daemon=True, name=f"rank{rank}")
                process.start()
                theirs.close()
                self._workers.append(_Worker(rank, process, ours, log))
        self._exchange(range(self.size), pickle.dumps(("echo", self.size)), 120)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _as_exception(outcomes: list[Any]) -> BaseException:
    failures = {rank: o for rank, o in enumerate(outcomes) if isinstance(o, pool_worker.Failure)}
    traces = [f"--- rank {rank} of {len(outcomes)}\n{failure.trace}" for rank, failure in failures.items()]
    first = next(iter(failures.values()))
    if len(failures) == len(outcomes) and all(f.kind == first.kind for f in failures.values()) and first.exception is not None:
        for trace in traces:
            first.exception.add_note(trace)
        return first.exception
    summary = "; ".join(f"rank {rank}: {failure.kind}: {failure.message}" for rank, failure in failures.items())
    return WorkerError("\n".join([f"{len(failures)} of {len(outcomes)} ranks failed: {summary}", *traces]))
