"""What torchrun gives a program: its rank, device and process groups; and how mistakes and failures end all ranks.

    options = parse(TrainConfig, sys.argv[1:], "-m launch.train")
    launch(program, options, "-m launch.train")              # calls program(environment) on every rank, then exits

Three kinds of ends, all with a bounded wait (``--timeout``):

* success: exit code 0;
* :class:`UserError`, raised on every rank or on none: one line from rank 0, exit code 2 (1 if it is about a result);
* any other exception: its traceback and ``rank 1: ValueError: ...`` from that rank, exit code 1, and torchrun ends the others.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar

import torch
import torch.distributed as dist
import tyro
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

from parallel.group import TPGroup, single_device

T = TypeVar("T", bound="Options")

LONGEST_TIMEOUT = 1e6
"""Seconds; torch counts milliseconds in 32 bits."""


class UserError(Exception):
    """What whoever started the program is told in one line: a mistake (code 2), or a result that is not as it should be (1).

    Raise it on every rank or on none.
    """

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Options:
    """How a program is spread over ranks."""

    tp: int | None = None
    """Tensor-parallel ranks that share one copy of the model; if not given, all that torchrun started. 1 needs no torchrun."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the ranks compute. auto: one GPU a rank (NCCL) if this host has enough of them, else CPU (gloo)."""
    timeout: float = 60.0
    """Seconds that a rank waits for another before it gives up."""


class Environment:
    """This process among the ranks.

    Attributes:
        rank, world: its number among all ranks, and how many there are.
        local_rank, local_world: the same on this host.
        device: where its tensors live.
        group: its tensor-parallel group.
        mesh: all ranks, with dimensions ("dp", "tp"); None on the single device.
    """

    def __init__(self, options: Options, *, torchrun: bool) -> None:
        def number(variable: str, default: int) -> int:
            return int(os.environ[variable]) if torchrun else default

        self.rank, self.world = number("RANK", 0), number("WORLD_SIZE", 1)
        self.local_rank, self.local_world = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
        self.device = torch.device("cpu")
        self.group: TPGroup = single_device()
        self.mesh: DeviceMesh | None = None
        if not 0 < options.timeout <= LONGEST_TIMEOUT:
            raise UserError(f"--timeout must be positive and at most {LONGEST_TIMEOUT:g} s, got {options.timeout:g}")
        self._timeout = timedelta(seconds=options.timeout)
        self._store: Store | None = None
        self._exchanges = 0
        if self.world > 1:
            self._store, _, _ = next(rendezvous("env://", timeout=self._timeout))
        # Settled before anything depends on it: ranks that disagree about what follows would wait for each other.
        self.agree("settings", asdict(options))
        with self.together("devices"):
            tp = self.world if options.tp is None else options.tp
            if tp < 1 or self.world % tp:
                raise UserError(f"--tp {tp} does not divide the {self.world} ranks that were started")
            self.device = choose_device(options.device, self.local_rank, self.local_world)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            self._connect(tp)

    @property
    def is_main(self) -> bool:
        """Whether this rank does what is done once: it talks to the terminal and writes files."""
        return self.rank == 0

    @property
    def everyone(self) -> TPGroup:
        """All ranks, replicas of the model and tensor-parallel ranks alike."""
        return single_device() if dist.group.WORLD is None else TPGroup.from_process_group(dist.group.WORLD)

    def exchange(self, what: str, value: str) -> list[str]:
        """Every rank's value, in rank order. Needs no process group, and names the ranks that did not arrive in time."""
        if self._store is None:
            return [value]
        self._exchanges += 1
        keys = [f"{self._exchanges}/{rank}" for rank in range(self.world)]
        self._store.set(keys[self.rank], value)
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            seconds = self._timeout.total_seconds()
            raise RuntimeError(
                f"gave up after {seconds:g} s waiting for rank {', '.join(map(str, missing))} to tell its {what}"
            ) from error
        return [text.decode() for text in self._store.multi_get(keys)]

    def agree(self, what: str, facts: Mapping[str, object]) -> None:
        """Checks that all ranks hold the same facts.

        Raises:
            UserError: on every rank, naming the ranks that differ from rank 0 and in which fields.
        """
        mine = json.dumps({key: str(value) for key, value in facts.items()})
        theirs = [json.loads(text) for text in self.exchange(what, mine)]
        differences = []
        for rank, other in enumerate(theirs):
            fields = [key for key in {**theirs[0], **other} if theirs[0].get(key) != other.get(key)]
            if fields:
                told = "; ".join(f"{key} is {other.get(key)}, on rank 0 it is {theirs[0].get(key)}" for key in fields)
                differences.append(f"rank {rank}: {told}")
        if differences:
            raise UserError(f"the ranks differ in their {what}. " + ". ".join(differences[:8]))

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Makes a ValueError or UserError of some ranks in the block a UserError of all, so that none waits in vain."""
        problem = ""
        try:
            yield
        except (ValueError, UserError) as error:
            problem = str(error) or type(error).__name__
        try:
            problems = self.exchange(what, problem)
        except RuntimeError as error:  # the others may wait in vain for what this rank did not do
            raise RuntimeError(f"{problem} ({error})") if problem else error from None
        failed = {rank: text for rank, text in enumerate(problems) if text}
        if len(failed) == self.world and len(set(problems)) == 1:
            raise UserError(problems[0])
        if failed:
            raise UserError("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))

    def close(self) -> None:
        """Leaves the process groups. The group and mesh cannot be used any more."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = None

    def _connect(self, tp: int) -> None:
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.world,
            timeout=self._timeout,
            device_id=self.device if self.device.type == "cuda" else None,
        )
        # Groups of our own for the mesh: those that DeviceMesh makes wait 30 minutes, whatever the timeout here.
        ranks = torch.arange(self.world).view(-1, tp)
        across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=self._timeout)
        within, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=self._timeout)
        self.mesh = DeviceMesh.from_group([across, within], self.device.type, mesh=ranks, mesh_dim_names=("dp", "tp"))
        self.group = TPGroup.from_mesh(self.mesh["tp"])


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int, local_world: int) -> torch.device:
    """This rank's device. A ValueError if GPUs are wanted and the host has fewer than ranks."""
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < local_world:
        raise ValueError(f"--device cuda needs a GPU for each of the {local_world} ranks of this host, it has {gpus}")
    if wanted == "cuda" or (wanted == "auto" and gpus >= local_world):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def make_deterministic(device: torch.device) -> None:
    """Has CUDA give the same bits each time, which invariant mode asks for. On the CPU that is so anyway."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)


def parse(
    kind: type[T],
    arguments: Sequence[str] | None,
    program: str,
    defaults: Callable[[Sequence[str]], T | None] = lambda _: None,
) -> T:
    """The options of a program from its command line. Of several ranks only the first shows help and mistakes.

    ``defaults`` is given the command line and may know other options than ``kind()`` has, for it to override; it may raise a
    UserError.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    rank = int(os.environ.get("RANK", "0"))
    with ExitStack() as stack:
        if rank > 0:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        try:
            known = defaults(arguments)
            given: dict[str, Any] = {} if known is None else {"default": known}
            return tyro.cli(kind, args=arguments, prog=program.replace("-m", "python -m"), **given)
        except (SystemExit, UserError) as stop:
            if isinstance(stop, UserError):
                _say(f"error: {_one_line(stop)}")
            if rank > 0 and stop.code:
                _linger(10)
            raise SystemExit(stop.code) from None


def launch(program: Callable[[Environment], None], options: Options, name: str) -> NoReturn:
    """Runs ``program`` on this rank and exits with its code. ``name``: "-m launch.train", or "tpblock train"."""
    handler = get_error_handler()  # torchrun reads the error of a failed rank from a file and shows it in its summary
    handler.initialize()
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank = int(os.environ.get("RANK", "0"))
    try:
        if torchrun and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
            raise UserError("RANK is set, LOCAL_RANK or LOCAL_WORLD_SIZE is not: start it with torchrun, which sets them all")
        if not torchrun and options.tp != 1:
            command = name if name.startswith("-m") else f"--no-python {name}"
            arguments = shlex.join(sys.argv[len(command.split()) - 1 :])
            start = f"torchrun --nproc-per-node {options.tp or 2} {command} {arguments}".rstrip()
            raise UserError(f"not started by torchrun. Start it as: {start} (or on a single device: --tp 1)")
        environment = Environment(options, torchrun=torchrun)
        program(environment)
        environment.close()
        if environment.world > 1:
            _exit(0)  # a thread of gloo that still holds a tensor would abort while Python takes itself down
    except UserError as error:
        if rank == 0:
            error.__traceback__ = error.__context__ = error.__cause__ = None  # one line in torchrun's summary, too
            handler.record_exception(error)
            _say(f"error: {_one_line(error)}")
        else:
            _linger(10)
        _exit(error.code)
    except KeyboardInterrupt:
        _exit(130)
    except SystemExit:
        raise
    except BaseException as error:  # torch.distributed.checkpoint's CheckpointException is no Exception
        if _is_about_peers(error):
            _say(f"rank {rank}: lost touch with another rank: {_one_line(error)}")
            _linger(5)
        else:
            _say(traceback.format_exc() + f"rank {rank}: {type(error).__name__}: {_one_line(error)}")
        handler.record_exception(error)
        _exit(1)
    sys.exit(0)


def _linger(seconds: float) -> None:
    """Waits for torchrun to end this rank, so that the rank that knows best is the one whose exit torchrun reports."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(seconds)


def _is_about_peers(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in ("gloo", "nccl", "waiting for rank"))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _say(text: str) -> None:
    # One write, so that what several ranks say does not mix.
    sys.stderr.write(text + "\n")


def _exit(code: int) -> NoReturn:
    """Exits without waiting for process groups whose other ranks may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
