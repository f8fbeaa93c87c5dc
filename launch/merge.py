"""Makes the Hugging Face folder again that a sharded checkpoint came from, or one of Meta's consolidated files.

python -m launch.merge Llama-2-7b-tp4 Llama-2-7b-hf
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launch.convert import ConvertConfig, convert, parse_size, run
from tpblock.formats.convert import merging, open_checkpoint


@dataclass(frozen=True, kw_only=True)
class MergeConfig(ConvertConfig):
    """Make a Hugging Face folder of what launch.shard wrote, or of Meta's consolidated files.

    Names, dtypes and files are those of the folder that it came from. Tensors that several ranks hold have to agree: if they
    differ, nothing is written.
    """

    max_shard_size: str | None = None
    """Bytes in a file at most, as 5GB; if not given, the files are divided as they were (Meta's: 5GB)."""


def merge(config: MergeConfig) -> None:
    limit = parse_size(config.max_shard_size) if config.max_shard_size else None
    convert(merging(open_checkpoint(config.source, config.meta), limit), config)


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.merge") -> None:
    run(merge, MergeConfig, arguments, program)


if __name__ == "__main__":
    main()
