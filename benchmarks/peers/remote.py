"""The processes of a contender, one a rank, started once: each waits for commands in its standard input, so that contenders take
turns without the cost of a start."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, NoReturn

from benchmarks.peers.common import UnsupportedError
from benchmarks.timing import ROOT

TAIL = 2000
"""How many characters of what a failed rank wrote are shown."""


class FailedError(Exception):
    """A contender ended, was silent for too long, or reported an error. Its processes are gone."""


class Remote:
    """A contender's processes. ``command``: what starts one rank; torchrun's variables say which. ``timeout``: the seconds in which
    they must answer, which may include a compilation."""

    def __init__(self, name: str, command: Sequence[str], ranks: int, timeout: float = 1200.0) -> None:
        self.name, self.command, self.ranks, self.timeout = name, list(command), ranks, timeout
        self._processes: list[subprocess.Popen[str]] = []
        self._files = contextlib.ExitStack()
        self._errors: list[IO[str]] = []
        self._lines: queue.Queue[tuple[int, str | None]] = queue.Queue()

    def ask(self, **request: object) -> list[Any]:
        """Every rank's reply to the same request. The processes are started if they are not there.

        Raises:
            FailedError, UnsupportedError: with the reason.
        """
        if not self._processes:
            try:
                self._start()
            except OSError as error:
                self._fail(f"cannot be started: {error}")
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
        except OSError:
            self._fail("ended")
        end = time.monotonic() + self.timeout
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < self.ranks:
            rank, reply = self._reply(end)
            replies[rank] = reply
            if "error" in reply:  # the other ranks may be waiting for this one
                self.stop()
                raise FailedError(f"{self.name}, rank {rank}: {reply['error']}")
        if reasons := [reply["unsupported"] for reply in replies.values() if "unsupported" in reply]:
            raise UnsupportedError(reasons[0])
        return [replies[rank]["value"] for rank in range(self.ranks)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # a command that it never read
                process.stdin.close()  # type: ignore[union-attr]
        self._files.close()
        self._processes, self._errors, self._lines = [], [], queue.Queue()

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_"))}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.ranks)}
        shared |= {"LOCAL_WORLD_SIZE": str(self.ranks), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        for rank in range(self.ranks):
            errors = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
            threading.Thread(target=_read, args=(rank, process, self._lines), daemon=True).start()
            self._processes.append(process)
            self._errors.append(errors)

    def _reply(self, end: float) -> tuple[int, dict[str, Any]]:
        """The next reply of any rank."""
        try:
            rank, line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            self._fail(f"no answer in {self.timeout:g} seconds")
        if line is None:
            self._fail(f"rank {rank} ended with exit code {self._processes[rank].wait()}")
        return rank, json.loads(line)

    def _fail(self, reason: str) -> NoReturn:
        """Stops everything and raises, with the end of what the ranks wrote."""
        tails = []
        for rank, file in enumerate(self._errors):
            file.seek(0)
            if text := file.read().strip():
                tails.append(f"rank {rank} wrote: {text[-TAIL:]}")
        self.stop()
        raise FailedError("\n".join([f"{self.name}: {reason}", *tails]))


def _read(rank: int, process: subprocess.Popen[str], lines: queue.Queue[tuple[int, str | None]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put((rank, line))
    lines.put((rank, None))
