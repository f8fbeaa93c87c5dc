"""The worker side of tests/pool.py: one rank that answers messages until its pipe closes."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils._pytree import tree_map

from parallel import collectives
from parallel.group import TPGroup, single_device

linear = functional.linear
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


@dataclass
class Failure:
    """An exception on one rank: ``exception`` is None if it cannot be pickled."""

    kind: str
    message: str
    trace: str
    exception: BaseException | None


def device_of(rank: int, device_type: str) -> torch.device:
    return torch.device("cuda", rank % torch.cuda.device_count()) if device_type == "cuda" else torch.device(device_type)


def serve(rank: int, world: int, pipe: Connection, store: str, log: str, device_type: str) -> None:
    """Answers messages, which are pickles of one of

    * ("echo", ranks): the sum of the ranks, by an all-reduce over the group of ``ranks``;
    * ("import", name): imports the module and answers None;
    * ("mesh", dp, tp): makes the mesh (on every worker) and answers None;
    * (("group", ranks) or ("mesh", dp, tp), function, args): what the function returns, tensors on the CPU.
    """
    output = open(log, "w")  # noqa: SIM115  (stays open as long as the process)
    os.dup2(output.fileno(), sys.stdout.fileno())
    os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then closes the pipes
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if device_type == "cuda" else 0
    if device_type == "cuda":
        torch.cuda.set_device(rank % gpus)
        torch.set_default_device(device_of(rank, device_type))
    dist.init_process_group(
        "nccl" if gpus >= world else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=COLLECTIVE_TIMEOUT,
    )
    groups = {1: single_device()}
    for size in range(2, world + 1):
        backend = "nccl" if gpus >= size else "gloo"
        process_group = dist.new_group(list(range(size)), timeout=COLLECTIVE_TIMEOUT, backend=backend)
        if rank < size:
            groups[size] = TPGroup.from_process_group(process_group)

    @cache
    def mesh(dp: int, tp: int) -> DeviceMesh:
        ranks = torch.arange(dp * tp, device="cpu").view(dp, tp)
        return DeviceMesh(device_type, ranks, mesh_dim_names=("dp", "tp"))

    def answer(message: Any) -> Any:
        match message:
            case ("echo", size):
                total, mine = torch.tensor([float(rank)]), torch.tensor([float(rank)])
                if size > 1:
                    dist.all_reduce(total, group=groups[size].process_group)
                    mine = collectives.all_reduce(mine, groups[size])
                return int(total.item()) if total == mine else None
            case ("import", name):
                importlib.import_module(name)
                return None
            case ("mesh", dp, tp):
                mesh(dp, tp)
                return None
            case (place, function, args):
                torch.manual_seed(0)
                functional.linear = linear  # for which DeepSpeed's ZeRO 3 puts its own, and leaves it
                torch.set_default_dtype(torch.float32)
                where = groups[place[1]] if place[0] == "group" else mesh(place[1], place[2])
                return tree_map(_to_plain, function(where, *args))
        raise AssertionError(message)

    while True:
        try:
            received = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # tearing down a process group waits for peers that may be gone
        try:
            reply = pickle.dumps(answer(pickle.loads(received)))
        except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is no Exception
            reply = pickle.dumps(_failure(error))
        pipe.send_bytes(reply)


def _to_plain(value: Any) -> Any:
    """A tensor as a copy that shares nothing (pickled by value, not by a file descriptor of shared memory)."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _failure(error: BaseException) -> Failure:
    trace = "".join(traceback.format_exception(error))
    try:
        exception = pickle.loads(pickle.dumps(error))
    except Exception:
        exception = None
    return Failure(type(error).__name__, str(error), trace, exception)
