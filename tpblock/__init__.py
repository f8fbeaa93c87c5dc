"""Tensor-parallel transformer blocks."""

from parallel.group import TPGroup, single_device
from tpblock.block import Block
from tpblock.cache import KVCache
from tpblock.config import Activation, Bias, ModelConfig, Norm, Parallelism, Placement, Position, QKNorm, default_d_ff
from tpblock.context import Context
from tpblock.formats.files import CheckpointError
from tpblock.formats.meta import MetaOptions
from tpblock.generate import generate
from tpblock.init import initialise
from tpblock.model import Decoder
from tpblock.presets import PRESETS, preset
from tpblock.pretrained import load_pretrained, save_pretrained
from tpblock.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling
from tpblock.stack import Stack

__all__ = [
    "PRESETS",
    "Activation",
    "Bias",
    "Block",
    "CheckpointError",
    "Context",
    "Decoder",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MetaOptions",
    "ModelConfig",
    "Norm",
    "Parallelism",
    "Placement",
    "Position",
    "QKNorm",
    "RopeScaling",
    "Stack",
    "TPGroup",
    "default_d_ff",
    "generate",
    "initialise",
    "load_pretrained",
    "preset",
    "save_pretrained",
    "single_device",
]
