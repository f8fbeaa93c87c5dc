"""Reading fields of a config.json, where a missing one is an error rather than a default of ours."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tpblock.config import Activation
from tpblock.formats.files import CheckpointError
from tpblock.rope import LinearScaling, Llama3Scaling, LongRopeScaling, RopeScaling

_REQUIRED = object()

MOST_LAYERS = 10_000
"""Far more than any model has, and few enough to go through them before the files are looked at."""

ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}
"""Names of ungated activations in transformers."""

GATED_ACTIVATIONS = {"silu": Activation.SWIGLU, "swish": Activation.SWIGLU}


def take(hf: Mapping[str, Any], field: str, default: Any = _REQUIRED, *, null: bool = False) -> Any:
    """The field.

    Args:
        default: what it means that the file lacks it, for those alone that the family itself leaves out.
        null: that the file may have null here, which then means something.

    Raises:
        CheckpointError: if config.json lacks it, or has null.
    """
    if field not in hf:
        if default is _REQUIRED:
            raise CheckpointError(f"config.json lacks {field}")
        return default
    if hf[field] is None and default is _REQUIRED and not null:
        raise CheckpointError(f"config.json: {field} is null, it needs a value")
    return hf[field]


def only(hf: Mapping[str, Any], **values: Any) -> None:
    """A CheckpointError if a field is there with another value than the only one that is supported."""
    for field, value in values.items():
        if hf.get(field, value) != value:
            raise CheckpointError(f"config.json: {field} = {hf[field]!r} is not supported, only {value!r}")


def number(hf: Mapping[str, Any], field: str) -> float:
    """The field, or a CheckpointError unless it is a number."""
    value = take(hf, field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        raise CheckpointError(f"config.json: {field} must be a finite number, got {value!r}")
    return float(value)


def flag(hf: Mapping[str, Any], field: str, default: Any = _REQUIRED) -> bool:
    """The field, or a CheckpointError unless it is true or false."""
    value = take(hf, field, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json: {field} must be true or false, got {value!r}")
    return value


def layers(hf: Mapping[str, Any], field: str = "num_hidden_layers") -> int:
    """The number of layers, or a CheckpointError unless it is one that a model can have."""
    value = take(hf, field)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST_LAYERS:
        raise CheckpointError(f"config.json: {field} = {value!r}, the number of layers is 1 to {MOST_LAYERS}")
    return value


def choose(hf: Mapping[str, Any], field: str, choices: Mapping[str, Any]) -> Any:
    """What ``choices`` has for the field's value, or a CheckpointError that lists them."""
    name = take(hf, field)
    if not isinstance(name, str) or name not in choices:
        raise CheckpointError(f"config.json: {field} = {name!r} is not supported; there are {', '.join(choices)}")
    return choices[name]


def check_unquantised(hf: Mapping[str, Any]) -> None:
    if hf.get("quantization_config"):
        raise CheckpointError("config.json has a quantization_config: quantised weights are not supported")


def sizes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig that most families call by the same names."""
    return {
        "vocab_size": take(hf, "vocab_size"),
        "dim": take(hf, "hidden_size"),
        "layers": layers(hf),
        "heads": take(hf, "num_attention_heads"),
        "d_ff": take(hf, "intermediate_size"),
        "max_seq_len": take(hf, "max_position_embeddings"),
        "tied_embeddings": take(hf, "tie_word_embeddings"),
    }


def windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window of Qwen2 and Qwen3, and the layers that it leaves out: those that ``layer_types`` calls
    full_attention, or in older files the first ``max_window_layers``."""
    count = layers(hf)
    window = take(hf, "sliding_window", null=True) if flag(hf, "use_sliding_window") else None
    kinds = hf.get("layer_types")
    if kinds is None:
        first = count if window is None else number(hf, "max_window_layers")
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        told = f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(f"config.json: layer_types has {told} for num_hidden_layers = {count}")
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    if unknown := {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}:
        raise CheckpointError(
            f"config.json: layer_types has {', '.join(sorted(unknown))}, supported are full_attention, sliding_attention"
        )
    if len(full) == count:
        return {}
    if window is None:
        raise CheckpointError("config.json: layer_types has sliding_attention, but there is no sliding window to use")
    return {"sliding_window": window, "full_attention_layers": full}


def rope(hf: Mapping[str, Any], *, theta: str = "rope_theta", fraction: str | None = None) -> dict[str, Any]:
    """The rotary fields of a ModelConfig, from ``rope_parameters`` or, in older files, from fields of their own.

    Args:
        theta, fraction: what the family calls them in older files. Without the name of a fraction it rotates whole heads.
    """
    own = {"rope_theta": theta} | ({"partial_rotary_factor": fraction} if fraction else {})
    fields = {ours: hf[name] for ours, name in own.items() if name in hf}
    for name in ("rope_scaling", "rope_parameters"):
        if hf.get(name) is not None and not isinstance(hf[name], dict):
            raise CheckpointError(f"config.json: {name} must be an object or null, got {hf[name]!r}")
    fields |= hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = next((fields[name] for name in ("rope_type", "type") if fields.get(name) is not None), "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; there are {', '.join(SCALINGS)}")
    if fraction is None:
        only({**hf, **fields}, partial_rotary_factor=1.0)
    return {
        "rope_theta": number(fields, "rope_theta"),
        "rope_scaling": SCALINGS[kind](hf, fields),
        "rotary_fraction": 1.0 if fraction is None else number(fields, "partial_rotary_factor"),
    }


def _llama3(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> Llama3Scaling:
    return Llama3Scaling(
        factor=take(fields, "factor"),
        low_freq_factor=take(fields, "low_freq_factor"),
        high_freq_factor=take(fields, "high_freq_factor"),
        original_max_seq_len=take({**fields, **hf}, "original_max_position_embeddings"),
    )


def _longrope(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> LongRopeScaling:
    original = number({**fields, **hf}, "original_max_position_embeddings")
    factor = number(fields, "factor") if fields.get("factor") else number(hf, "max_position_embeddings") / original
    attention_factor = fields.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=tuple(take(fields, "short_factor")),
        long_factor=tuple(take(fields, "long_factor")),
        original_max_seq_len=take({**fields, **hf}, "original_max_position_embeddings"),
        attention_factor=attention_factor,
    )


SCALINGS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], RopeScaling | None]] = {
    "default": lambda hf, fields: None,
    "linear": lambda hf, fields: LinearScaling(factor=take(fields, "factor")),
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # what Phi-3's first files call it
}
"""The kinds of rotary scaling by the name that config.json gives them."""
