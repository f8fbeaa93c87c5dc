"""Starts the programs as their users do, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# No run in the tests takes longer than this by itself; most of the time goes into importing torch.
BOUND = 180.0


@dataclass
class Ended:
    code: int
    output: str
    errors: str
    seconds: float


def start(command: list[str], cwd: Path, timeout: float = BOUND, text: str = "") -> Ended:
    """Runs a command in a session of its own, with ``text`` on its stdin, and kills all of it if it does not end."""
    outer = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "COLUMNS")}
    path = os.pathsep.join(filter(None, [str(ROOT), outer.get("PYTHONPATH")]))
    env = {**outer, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    began = time.monotonic()
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=cwd, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(text, timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"{command} did not end in {timeout} s\n{output}\n{errors}")
    return Ended(process.returncode, output, errors, time.monotonic() - began)


def python(*arguments: str, cwd: Path, text: str = "") -> Ended:
    return start([sys.executable, *arguments], cwd, text=text)


def torchrun(ranks: int, *arguments: str, cwd: Path, text: str = "") -> Ended:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return python(*command, *arguments, cwd=cwd, text=text)
