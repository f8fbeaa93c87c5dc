"""How families of Hugging Face models store their configs and weights: one small table a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpblock.config import ModelConfig
from tpblock.families import llama


@dataclass(frozen=True)
class Family:
    """``config`` reads a config.json. ``names`` maps our tensors, ``{i}`` standing for the block's number, to Hugging Face's; a
    part of a fused tensor is ``name:part``."""

    config: Callable[[Mapping[str, Any]], ModelConfig]
    names: Mapping[str, str]


FAMILIES = {"LlamaForCausalLM": Family(llama.config, llama.NAMES)}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a config.json names in ``architectures``. A ValueError lists those that are supported."""
    architectures = hf_config.get("architectures") or ["none"]
    if architectures[0] not in FAMILIES:
        raise ValueError(f"architecture {architectures[0]} is not supported; there are {', '.join(FAMILIES)}")
    return FAMILIES[architectures[0]]
