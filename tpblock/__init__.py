"""Tensor-parallel transformer blocks."""

from parallel.group import TPGroup, single_device
from tpblock.block import Block
from tpblock.config import Activation, ModelConfig, Norm, Parallelism, Placement, Position, default_d_ff
from tpblock.context import Context
from tpblock.init import initialise
from tpblock.model import Decoder
from tpblock.presets import PRESETS, preset
from tpblock.pretrained import load_pretrained
from tpblock.stack import Stack

__all__ = [
    "PRESETS",
    "Activation",
    "Block",
    "Context",
    "Decoder",
    "ModelConfig",
    "Norm",
    "Parallelism",
    "Placement",
    "Position",
    "Stack",
    "TPGroup",
    "default_d_ff",
    "initialise",
    "load_pretrained",
    "preset",
    "single_device",
]
