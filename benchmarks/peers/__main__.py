"""One rank of a contender: ``python -m benchmarks.peers NAME CLOCK``, with torchrun's variables, commands on standard input."""

from __future__ import annotations

import sys

from benchmarks.peers.common import serve

if __name__ == "__main__":
    serve(*sys.argv[1:])
