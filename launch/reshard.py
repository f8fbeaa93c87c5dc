"""Cuts a sharded checkpoint for another number of tensor-parallel ranks.

python -m launch.reshard Llama-2-7b-tp4 Llama-2-7b-tp2 --tp 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.convert import ConvertConfig, convert, run
from tpblock.formats.convert import open_checkpoint, sharding
from tpblock.formats.files import CheckpointError


@dataclass(frozen=True, kw_only=True)
class ReshardConfig(ConvertConfig):
    """Cut what launch.shard wrote for another number of tensor-parallel ranks.

    Tensors that several ranks hold have to agree: if they differ, nothing is written.
    """

    tp: int
    """Tensor-parallel ranks to cut it for."""


def reshard(config: ReshardConfig) -> None:
    checkpoint = open_checkpoint(config.source, config.meta)
    if not checkpoint.checksums:
        raise CheckpointError(f"{config.source} is not sharded ({checkpoint.kind}): launch.shard cuts it")
    convert(sharding(checkpoint, config.tp), config)


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.reshard") -> None:
    run(reshard, ReshardConfig, arguments, program)


if __name__ == "__main__":
    main()
