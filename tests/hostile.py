"""Tiny folders of weights, and changes that break them. A change is a function of the folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tpblock.formats import convert
from tpblock.formats.convert import open_checkpoint

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SINGLE, INDEX, MANIFEST = "model.safetensors", "model.safetensors.index.json", "manifest.json"
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
RANK_0, RANK_1 = (f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 1))


def llama_tensors(seed: int = 0, *, heads: int = 4, kv_heads: int = 2) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (11, 8), NORM: (8,), HEAD: (11, 8)}
    for i in range(2):
        block = f"model.layers.{i}."
        shapes |= {block + "input_layernorm.weight": (8,), block + "post_attention_layernorm.weight": (8,)}
        shapes |= {f"{block}self_attn.{name}_proj.weight": (8 // heads * kv_heads, 8) for name in "kv"}
        shapes |= {f"{block}self_attn.{name}_proj.weight": (8, 8) for name in "qo"}
        shapes |= {f"{block}mlp.{name}_proj.weight": (6, 8) for name in ("gate", "up")}
        shapes[block + "mlp.down_proj.weight"] = (8, 6)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_folder(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """A Llama folder of two files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    names = sorted(tensors)
    files = {FIRST: names[:8], SECOND: names[8:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, held in files.items() for name in held}}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def write_originals(base: Path) -> dict[str, Path]:
    """A folder of each kind."""
    llama = write_folder(base / "llama", llama_tensors())
    single = base / "single"
    single.mkdir()
    shutil.copyfile(llama / "config.json", single / "config.json")
    save_file(llama_tensors(), single / SINGLE, {"format": "pt"})
    convert.shard(open_checkpoint(llama), base / "sharded", 2)
    return {"llama": llama, "single": single, "sharded": base / "sharded"}


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder, with the bytes of the files that are not very large."""
    small = {path: path.is_file() and path.stat().st_size < 1 << 20 for path in sorted(folder.rglob("*"))}
    return {str(path.relative_to(folder)): path.read_bytes() if read else None for path, read in small.items()}


def held() -> tuple[int, int, int]:
    """How many threads, open files and mapped checkpoints this process has."""
    maps = Path("/proc/self/maps").read_text()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps.count(".safetensors")


Change = Callable[[Path], object]


def edit_json(file: str, change: Callable[[Any], object]) -> Change:
    """Changes what a JSON file holds, in place or to what ``change`` returns if that is not None."""

    def apply(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        changed = change(value)
        (folder / file).write_text(json.dumps(value if changed is None else changed))

    return apply


def config(**changes: Any) -> Change:
    return edit_json("config.json", lambda value: value.update(changes))


def weight_map(**changes: Any) -> Change:
    return edit_json(INDEX, lambda value: value["weight_map"].update({k.replace("__", "."): v for k, v in changes.items()}))


def manifest(*path: Any, value: Any) -> Change:
    def change(whole: Any) -> None:
        for key in path[:-1]:
            whole = whole[key]
        whole[path[-1]] = value

    return edit_json(MANIFEST, change)


def text(file: str, content: str | bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def gone(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def split_file(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join_file(path: Path, header: bytes | str | object, data: bytes, length: int | None = None) -> None:
    if not isinstance(header, bytes | str):
        header = json.dumps(header)
    raw = header if isinstance(header, bytes) else header.encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)


def header(change: Callable[[Any], Any], file: str = SECOND, length: Callable[[int], int] | None = None) -> Change:
    """Changes the header of a file, the data staying as they are. ``change`` may return another header, also as text or bytes."""

    def apply(folder: Path) -> None:
        value, data = split_file(folder / file)
        changed = change(value)
        changed = json.dumps(value if changed is None else changed) if not isinstance(changed, bytes | str) else changed
        raw = changed if isinstance(changed, bytes) else changed.encode()
        join_file(folder / file, raw, data, None if length is None else length(len(raw)))

    return apply


def field(name: str, key: str, value: Any, file: str = SECOND) -> Change:
    """Changes a field of a tensor in a header."""
    return header(lambda tensors: tensors[name].update({key: value}), file)


def tensors(file: str = SECOND, **changes: Tensor | None) -> Change:
    """Writes a file again, with other tensors or (None) without. ``__`` stands for a dot."""

    def apply(folder: Path) -> None:
        found = load_file(folder / file)
        for name, value in changes.items():
            found.pop(name.replace("__", "."), None)
            if value is not None:
                found[name.replace("__", ".")] = value
        save_file(found, folder / file, {"format": "pt"})

    return apply


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def cut(file: str, size: Callable[[int, int], int]) -> Change:
    """Cuts a file: ``size`` is told its size and that of its header."""

    def apply(folder: Path) -> None:
        path = folder / file
        os.truncate(path, size(path.stat().st_size, int.from_bytes(path.read_bytes()[:8], "little")))

    return apply


def fifo(file: str) -> Change:
    """Puts a pipe in place of a file, which nobody will write to."""
    return both(gone(file), lambda folder: os.mkfifo(folder / file))


class Payload:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)
