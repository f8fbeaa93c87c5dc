"""Reading fields of a config.json, where a missing one is an error rather than a default of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def take(hf: Mapping[str, Any], field: str) -> Any:
    """The field, or a ValueError if config.json lacks it."""
    if field not in hf:
        raise ValueError(f"config.json lacks {field}")
    return hf[field]


def rope_theta(hf: Mapping[str, Any]) -> float:
    """The base of the rotary angles, from ``rope_parameters`` or, in older files, ``rope_theta``. Scaled forms are refused."""
    rope = hf.get("rope_parameters") or {"rope_theta": take(hf, "rope_theta"), **(hf.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope type {kind!r} is not supported, only 'default'")
    return float(take(rope, "rope_theta"))
