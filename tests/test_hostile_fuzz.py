"""Folders with any one thing changed: they are read, or refused with a CheckpointError, in little time and memory."""

from __future__ import annotations

import copy
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from parallel.group import single_device
from tests.hostile import CONFIG, FIRST, INDEX, MANIFEST, RANK_1, SECOND, SINGLE, split_file, write_originals
from tpblock import CheckpointError, load_pretrained
from tpblock.formats.checkpoint import model_layouts, parse_config
from tpblock.formats.hf import hf_names

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 11,
    "n_embd": 8,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": None,
    "n_positions": 16,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
QWEN2 = CONFIG | {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 1,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
}
NEOX = CONFIG | {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "use_parallel_residual": True,
    "rotary_pct": 0.5,
    "rotary_emb_base": 10000,
    "hidden_size": 16,
}

PROFILE = settings(
    max_examples=100,
    deadline=None,  # each example has its own, below
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


def write_any(folder: Path, hf: dict[str, Any]) -> None:
    """A folder of one file of the family that ``hf`` names."""
    folder.mkdir()
    model, family = parse_config(hf)
    shapes = {name: stored.shape for name, stored in hf_names(model, family, model_layouts(model), [family.prefix]).items()}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(hf))


class Folder:
    """A whole folder, whose files are changed one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.whole = {file.name: file.read_bytes() for file in path.iterdir()}
        load_pretrained(path, group=single_device())

    def check(self, file: str, content: bytes) -> None:
        """Reads it with one file changed."""
        start, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            (self.path / file).write_bytes(content)
            load_pretrained(self.path, group=single_device())
        except CheckpointError as error:
            assert len(str(error)) < 20_000
        finally:
            (self.path / file).write_bytes(self.whole[file])
        assert time.monotonic() - start < 10
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000  # kilobytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    base = tmp_path_factory.mktemp("folders")
    paths = write_originals(base)
    for name, hf in {"gpt2": GPT2, "qwen2": QWEN2, "neox": NEOX}.items():
        write_any(base / name, hf)
        paths[name] = base / name
    return {name: Folder(path) for name, path in paths.items()}


NUMBERS = [0, 1, 2, 3, 4, 5, 8, 9, 11, 16, 31, 32, 64, 10**5, 10**9, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 64, 10**400]
VALUES = st.one_of(
    st.sampled_from([None, True, False, "", "x", "..", "/", 1e30, 1e-30, 1e308, 0.5, 2.0]),
    st.sampled_from(["[]", "{}", "[[]]", "[null]", '{"a": 1}']).map(json.loads),  # new ones, which may be changed
    st.sampled_from([*NUMBERS, *(-number for number in NUMBERS)]),
    st.sampled_from([FIRST, SECOND, SINGLE, INDEX, RANK_1, "config.json", "linear", "llama3", "longrope", "default", "yarn"]),
    st.sampled_from(["F32", "F64", "I32", "U8", "C64", "gelu", "silu", "full_attention", "model.norm.weight"]),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.binary(min_size=30, max_size=40).map(lambda data: data.hex()),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all that a JSON value holds."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, child in items for place in places(child, (*path, key))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def changed_json(draw: Callable[[st.SearchStrategy[Any]], Any], value: Any) -> Any:
    """A JSON value with a few things in it replaced, removed, added or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        all_places = places(value)
        if not all_places:
            break
        *path, key = draw(st.sampled_from(all_places))
        holder = at(value, tuple(path))
        match draw(st.sampled_from(["replace", "replace", "remove", "add", "exchange", "scale"])):
            case "replace":
                holder[key] = draw(VALUES)
            case "remove":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(st.text(max_size=4) | st.sampled_from(["rope_scaling", "rope_parameters", "layer_types"]))] = draw(
                    VALUES | st.fixed_dictionaries({"rope_type": VALUES, "factor": VALUES}) | st.lists(VALUES, max_size=3)
                )
            case "add":
                holder.insert(key, draw(VALUES))
            case "exchange":
                other = at(value, draw(st.sampled_from(all_places)))
                holder[key] = copy.deepcopy(other)
            case _ if isinstance(holder[key], int):
                holder[key] = holder[key] * draw(st.sampled_from([-1, 2, 3, 10**6])) + draw(st.integers(-1, 1))
    return value


@st.composite
def changed_bytes(draw: Callable[[st.SearchStrategy[Any]], Any], data: bytes) -> bytes:
    """Bytes of which a few are replaced, removed, added or doubled, or the end is cut off."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(changed)))
        stop = min(len(changed), first + draw(st.integers(0, 12)))
        match draw(st.sampled_from(["replace", "remove", "add", "double", "cut"])):
            case "replace":
                changed[first:stop] = draw(st.binary(min_size=stop - first, max_size=stop - first))
            case "remove":
                del changed[first:stop]
            case "add":
                tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"9", b"-", b"\xff", b"\0", b"e9", b"\\ud800", b"NaN"]
                changed[first:first] = draw(st.sampled_from(tokens) | st.binary(max_size=8))
            case "double":
                changed[first:first] = changed[first:stop]
            case "cut":
                del changed[max(first, len(changed) // 2) :]
    return bytes(changed)


JSON_FILES = [
    ("llama", "config.json"),
    ("gpt2", "config.json"),
    ("qwen2", "config.json"),
    ("neox", "config.json"),
    ("llama", INDEX),
    ("sharded", MANIFEST),
]
WEIGHTS = [("llama", SECOND), ("single", SINGLE), ("gpt2", SINGLE), ("sharded", RANK_1)]


@pytest.mark.parametrize(("kind", "file"), JSON_FILES)
@PROFILE
@given(data=st.data())
def test_changed_json(folders: dict[str, Folder], kind: str, file: str, data: st.DataObject) -> None:
    folder = folders[kind]
    content = json.dumps(data.draw(changed_json(json.loads(folder.whole[file]))))
    folder.check(file, content.encode())


@pytest.mark.parametrize(("kind", "file"), WEIGHTS)
@PROFILE
@given(data=st.data())
def test_changed_headers(folders: dict[str, Folder], kind: str, file: str, data: st.DataObject) -> None:
    folder = folders[kind]
    header, rest = split_file(folder.path / file)
    raw = json.dumps(data.draw(changed_json(header))).encode()
    folder.check(file, len(raw).to_bytes(8, "little") + raw + rest)


@pytest.mark.parametrize(("kind", "file"), [*JSON_FILES, *WEIGHTS])
@PROFILE
@given(data=st.data())
def test_changed_bytes(folders: dict[str, Folder], kind: str, file: str, data: st.DataObject) -> None:
    """Of safetensors files the length and the header."""
    folder = folders[kind]
    whole = folder.whole[file]
    end = 8 + int.from_bytes(whole[:8], "little") if file.endswith(".safetensors") else len(whole)
    folder.check(file, data.draw(changed_bytes(whole[:end])) + whole[end:])
