"""The console command ``tpblock``: one subcommand for each program of this folder."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple


class Command(NamedTuple):
    module: str
    summary: str


COMMANDS = {
    "generate": Command("launch.generate", "continue texts with a pretrained model"),
    "train": Command(
        "launch.train", "train a small model, or go on training a pretrained one, and compare with the single device"
    ),
    "shard": Command("launch.shard", "cut a checkpoint for tensor-parallel ranks, one file a rank"),
    "reshard": Command("launch.reshard", "cut a sharded checkpoint for another number of ranks"),
    "merge": Command("launch.merge", "make a Hugging Face folder of a sharded checkpoint or of Meta's files"),
    "inspect": Command("launch.inspect", "show what is in a checkpoint and how it is cut, and check it"),
    "verify": Command("launch.verify", "run a model on several ranks and compare every number with the single device"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tpblock COMMAND [OPTIONS]",
            "       torchrun --nproc-per-node 2 --no-python tpblock COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "tpblock COMMAND --help shows a command's options; python -m launch.COMMAND is the same program.",
        ]
    )


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        name = arguments[0]
        # Imported here, so that one command does not pay for what the others import.
        importlib.import_module(COMMANDS[name].module).main(arguments[1:], program=f"tpblock {name}")
    elif arguments and arguments[0] in ("-h", "--help"):
        print(usage())
    else:
        problem = f"unknown command {arguments[0]!r}" if arguments else "which command?"
        sys.exit(f"error: {problem}\n\n{usage()}")


if __name__ == "__main__":
    main()
