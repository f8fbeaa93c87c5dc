"""Cuts a checkpoint for tensor-parallel ranks: one safetensors file a rank, and manifest.json.

python -m launch.shard Llama-2-7b-hf Llama-2-7b-tp4 --tp 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.convert import ConvertConfig, convert, run
from tpblock.formats.convert import open_checkpoint, sharding


@dataclass(frozen=True, kw_only=True)
class ShardConfig(ConvertConfig):
    """Cut a Hugging Face folder, or Meta's consolidated files, for tensor-parallel ranks.

    The output has one safetensors file a rank, and manifest.json, which says how each tensor is cut. load_pretrained reads it on
    any number of ranks; launch.reshard cuts it for another number, launch.merge makes the Hugging Face folder again.
    """

    tp: int
    """Tensor-parallel ranks to cut it for."""


def shard(config: ShardConfig) -> None:
    convert(sharding(open_checkpoint(config.source, config.meta), config.tp), config)


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.shard") -> None:
    run(shard, ShardConfig, arguments, program)


if __name__ == "__main__":
    main()
