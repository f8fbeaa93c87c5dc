"""Sharding, resharding and merging: every element in its place at every stage, and what is refused.

Elements are labelled with different numbers, so that none can be taken for another. What a rank must hold is worked out here from
the runs of the layout of the model built for that rank, not from the manifest.
"""

from __future__ import annotations

import filecmp
import json
import math
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.convert import llama, write_folder
from parallel.group import TPGroup, single_device
from parallel.layout import Layout
from parallel.state import named_layouts
from tests.pool import Pool
from tests.test_families import MODELS, llama_like
from tpblock import CheckpointError, Decoder, load_pretrained
from tpblock.families import FAMILIES
from tpblock.formats import files
from tpblock.formats.checkpoint import read_config
from tpblock.formats.convert import check_copies, check_finite, merge, merging, open_checkpoint, shard
from tpblock.formats.sharded import MANIFEST, rank_file

CASES = {**MODELS, "gqa-uneven": llama_like("Llama", num_attention_heads=8, num_key_value_heads=4, head_dim=4)}


@cache
def transformers_folder(name: str, base: Path) -> Path:
    import transformers

    kind = getattr(transformers, CASES[name].architecture)
    kind(kind.config_class(**CASES[name].fields)).save_pretrained(base / name, max_shard_size="8KB")
    return base / name


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def write(base: Path, folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A folder of that model. Every number in it is another one; in half precision, any bits, with nan and infinity among them."""
    shutil.copytree(transformers_folder(name, base), folder)
    first = 0
    generator = torch.Generator().manual_seed(0)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for key, value in sorted(tensors.items()):
            labels = torch.arange(first, first + value.numel()).view(value.shape)
            first += value.numel()
            if dtype.itemsize == 2:
                labels = torch.randint(-(2**15), 2**15, value.shape, generator=generator, dtype=torch.int16).view(dtype)
            tensors[key] = labels.to(dtype)
        save_file(tensors, path, {"format": "pt"})
    assert first < 2**24  # exact in float32
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = first * dtype.itemsize
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return folder


def expected_shard(value: Tensor, layout: Layout, rank: int) -> Tensor:
    """What a rank holds of a global tensor: of each part, one after the other, its run of rows."""
    if layout.dim is None:
        return value
    parts = value.split([part.size for part in layout.parts], layout.dim)
    runs = [part.runs[rank] for part in layout.parts]
    return torch.cat(
        [part.narrow(layout.dim, run.start, run.stop - run.start) for part, run in zip(parts, runs, strict=True)], layout.dim
    )


def check_ranks(folder: Path, ranks: int, truth: Mapping[str, Tensor], hf: Path) -> None:
    """Every element of every rank's file."""
    config = read_config(hf)[0]
    assert len(list(folder.glob("*.safetensors"))) == ranks
    for rank in range(ranks):
        found = load_file(folder / rank_file(rank, ranks))
        layouts = {
            name: layout
            for name, _, layout in named_layouts(Decoder(config, group=TPGroup(rank, ranks), device="meta", seed=None))
        }
        assert found.keys() == layouts.keys()
        for name, layout in layouts.items():
            assert same_bits(found[name], expected_shard(truth[name], layout, rank)), (name, rank)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))
    )


def check_same_files(a: Path, b: Path) -> None:
    names = {path.name for path in a.iterdir()}
    assert names == {path.name for path in b.iterdir()}
    assert filecmp.cmpfiles(a, b, names, shallow=False)[1:] == ([], [])


def test_every_family_is_here() -> None:
    assert {model.architecture for model in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_c50_labels_stay_in_place_at_every_stage(base: Path, tmp_path: Path, name: str) -> None:
    hf = write(base, tmp_path / "hf", name)
    truth = load_pretrained(hf, group=single_device()).state_dict()
    assert len(torch.cat([value.flatten() for value in truth.values()]).unique()) == sum(
        value.numel() for value in truth.values()
    )
    before = hf
    for stage, ranks in enumerate((1, 2, 4, 3, 1)):
        now = tmp_path / f"{stage}"
        shard(open_checkpoint(before), now, ranks, verify=True)
        check_ranks(now, ranks, truth, hf)
        merge(open_checkpoint(now), tmp_path / f"hf{stage}", verify=True)
        check_same_files(hf, tmp_path / f"hf{stage}")
        before = now


def test_c49_fused_weights_of_llama_are_what_they_are_said_to_be(base: Path, tmp_path: Path) -> None:
    """The labels of the test above by hand: q, k and v of a rank's heads, gate and up of its features."""
    hf = write(base, tmp_path / "hf", "gqa-uneven")
    theirs = {name: value for path in hf.glob("*.safetensors") for name, value in load_file(path).items()}
    shard(open_checkpoint(hf), tmp_path / "tp3", 3)
    q, k, v = (theirs[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = (theirs[f"model.layers.1.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    for rank, (kv, columns) in enumerate([((0, 2), (0, 9)), ((2, 3), (9, 17)), ((3, 4), (17, 25))]):  # 4 KV heads, 25 features
        found = load_file(tmp_path / "tp3" / rank_file(rank, 3))
        rows, heads = slice(4 * kv[0], 4 * kv[1]), slice(8 * kv[0], 8 * kv[1])
        assert torch.equal(found["stack.blocks.1.attention.qkv.weight"], torch.cat([q[heads], k[rows], v[rows]]))
        assert torch.equal(
            found["stack.blocks.1.attention.out.weight"], theirs["model.layers.1.self_attn.o_proj.weight"][:, heads]
        )
        assert torch.equal(
            found["stack.blocks.1.feedforward.up.weight"], torch.cat([gate[slice(*columns)], up[slice(*columns)]])
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gqa-uneven", "gpt2", "neox"])
def test_bits_of_other_dtypes(base: Path, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    hf = write(base, tmp_path / "hf", name, dtype)
    shard(open_checkpoint(hf), tmp_path / "tp4", 4, verify=True)
    shard(open_checkpoint(tmp_path / "tp4"), tmp_path / "tp3", 3, verify=True)
    merge(open_checkpoint(tmp_path / "tp3"), tmp_path / "out", verify=True)
    check_same_files(hf, tmp_path / "out")


def test_small_blocks(base: Path, tmp_path: Path) -> None:
    """Tensors that are put together from many blocks, and written in many pieces, neither of them whole heads."""
    with mock.patch("tpblock.formats.stored.BLOCK_BYTES", 300), mock.patch("tpblock.formats.files.WRITE_BYTES", 64):
        for name in ("gqa-uneven", "gpt2", "neox"):
            hf = write(base, tmp_path / name, name)
            truth = load_pretrained(hf, group=single_device()).state_dict()
            shard(open_checkpoint(hf), tmp_path / f"{name}-tp3", 3, verify=True)
            check_ranks(tmp_path / f"{name}-tp3", 3, truth, hf)
            merge(open_checkpoint(tmp_path / f"{name}-tp3"), tmp_path / f"{name}-out", verify=True)
            check_same_files(hf, tmp_path / f"{name}-out")


def logits(group: TPGroup, folder: Path, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return load_pretrained(folder, group=group, dtype=torch.float64)(ids)


@pytest.mark.parametrize("name", ["llama3", "gpt2", "neox"])
def test_sharded_folders_load_on_any_number_of_ranks(pool: Pool, base: Path, tmp_path: Path, name: str) -> None:
    hf = transformers_folder(name, base)
    ids = torch.randint(61, (2, 9))
    folders = [hf]
    for cut in (1, 3, 4):
        shard(open_checkpoint(hf), tmp_path / str(cut), cut)
        folders.append(tmp_path / str(cut))
    for ranks in (1, 2, 4):
        expected, *found = (pool.run(ranks, logits, folder, ids) for folder in folders)
        for each in found:
            assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))


def test_c52_c74_vocabulary_is_not_padded_and_a_file_has_its_share(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", llama(1, dim=512, vocab_size=50_257) | {"num_key_value_heads": 4}, 10**9)
    shard(open_checkpoint(tmp_path / "hf"), tmp_path / "2", 2)
    shard(open_checkpoint(tmp_path / "2"), tmp_path / "4", 4)
    whole = (tmp_path / "hf" / "model.safetensors").stat().st_size
    sizes = [path.stat().st_size for path in (tmp_path / "4").glob("*.safetensors")]
    assert max(sizes) < 0.2505 * whole
    rows = [load_file(path)["embedding.weight"].shape[0] for path in sorted((tmp_path / "4").glob("*.safetensors"))]
    assert rows == [12565, 12564, 12564, 12564]
    shard(open_checkpoint(tmp_path / "4"), tmp_path / "1", 1)
    assert load_file(tmp_path / "1" / rank_file(0, 1))["embedding.weight"].shape == (50_257, 512)
    merge(open_checkpoint(tmp_path / "1"), tmp_path / "out")
    check_same_files(tmp_path / "hf", tmp_path / "out")


def test_max_shard_size(base: Path, tmp_path: Path) -> None:
    hf = transformers_folder("llama", base)
    shard(open_checkpoint(hf), tmp_path / "tp2", 2)
    for limit, count in ((1 << 30, 1), (20_000, None)):
        out = tmp_path / f"{limit}"
        merging(open_checkpoint(tmp_path / "tp2"), limit).run(out, verify=True)
        found = list(out.glob("*.safetensors"))
        assert len(found) == (count or len(found)) and (count or len(found) > 2)
        assert all(math.prod(e.shape) * 4 <= limit for _, e in open_checkpoint(out).tensors.values())
        assert (out / "model.safetensors.index.json").exists() == (count is None)


# --- what is refused


@pytest.fixture
def tp3(base: Path, tmp_path: Path) -> Path:
    """Four KV heads on three ranks."""
    write(base, tmp_path / "hf", "gqa-uneven")
    shard(open_checkpoint(tmp_path / "hf"), tmp_path / "tp3", 3)
    return tmp_path / "tp3"


def flip(path: Path, name: str, at: int = 0, bit: int = 0) -> None:
    """Changes one bit of a tensor in its file."""
    entry = files.read_header(path)[0][name]
    with open(path, "r+b") as file:
        file.seek(entry.start + at)
        byte = file.read(1)[0]
        file.seek(entry.start + at)
        file.write(bytes([byte ^ (1 << bit)]))


def flipping(name: str) -> Any:
    """Has the Writer change one bit of a tensor."""
    plain = files.Writer.write

    def write(self: files.Writer, key: str, value: Tensor) -> None:
        if key == name:
            value = value.clone()
            value.view(-1).view(torch.uint8)[-1] ^= 1
        plain(self, key, value)

    return mock.patch.object(files.Writer, "write", write)


def test_verify_sees_one_bit_of_the_output(tp3: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with flipping(name):
        merge(open_checkpoint(tp3), tmp_path / "unseen")
        with pytest.raises(CheckpointError, match=rf"{name} differs from .*tp3 by up to \d"):
            merge(open_checkpoint(tp3), tmp_path / "out", verify=True)
    name = "stack.blocks.1.attention.out.weight"
    with flipping(name), pytest.raises(CheckpointError, match=rf"rank-00000-of-00002.safetensors/{name} differs from"):
        shard(open_checkpoint(tp3), tmp_path / "out", 2, verify=True)
    assert not list(tmp_path.glob("out*"))


def test_c20_replicas_that_differ_are_always_refused(tp3: Path, tmp_path: Path) -> None:
    path, name = tp3 / rank_file(2, 3), "stack.blocks.0.norm_1.weight"
    tensors = load_file(path)
    tensors[name][5] += 0.5
    save_file(tensors, path, {"file": path.name})
    with pytest.raises(
        CheckpointError, match=rf"rank-00002-of-00003.safetensors/{name} differs from the first copy .* up to 0.5"
    ):
        check_copies(open_checkpoint(tp3))
    for convert in (
        lambda: merge(open_checkpoint(tp3), tmp_path / "out"),
        lambda: shard(open_checkpoint(tp3), tmp_path / "out", 2),
    ):
        with pytest.raises(CheckpointError, match=f"{name} differs"):
            convert()
    assert not (tmp_path / "out").exists()


def test_c20_kv_heads_that_two_ranks_hold(base: Path, tmp_path: Path) -> None:
    shard(open_checkpoint(transformers_folder("llama3", base)), tmp_path / "tp4", 4)  # 2 KV heads
    name = "stack.blocks.1.attention.qkv.weight"
    flip(
        tmp_path / "tp4" / rank_file(1, 4),
        name,
        at=-1 + 4 * math.prod(load_file(tmp_path / "tp4" / rank_file(1, 4))[name].shape),
    )
    with pytest.raises(CheckpointError, match=rf"rank-00001-of-00004.safetensors/{name} differs"):
        merge(open_checkpoint(tmp_path / "tp4"), tmp_path / "out")


def test_a_tied_head_that_is_another_tensor(base: Path, tmp_path: Path) -> None:
    hf = write(base, tmp_path / "hf", "llama3")
    tensors = {name: value for path in hf.glob("*.safetensors") for name, value in load_file(path).items()}
    for path in hf.glob("model*"):
        path.unlink()
    head = tensors["model.embed_tokens.weight"].clone()
    for name, change in (("same", 0), ("other", 2)):
        save_file(tensors | {"lm_head.weight": head + change}, hf / "model.safetensors")
        if change:
            with pytest.raises(
                CheckpointError, match="lm_head.weight differs from the first copy of embedding.weight by up to 2"
            ):
                shard(open_checkpoint(hf), tmp_path / name, 2)
        else:
            shard(open_checkpoint(hf), tmp_path / name, 2)


def test_checksums(tp3: Path, tmp_path: Path) -> None:
    flip(tp3 / rank_file(1, 3), "stack.blocks.0.feedforward.down.weight", at=9)
    merge(open_checkpoint(tp3), tmp_path / "unseen")
    for convert in (
        lambda: merge(open_checkpoint(tp3), tmp_path / "out", verify=True),
        lambda: shard(open_checkpoint(tp3), tmp_path / "out", 2, verify=True),
    ):
        with pytest.raises(
            CheckpointError, match=r"rank-00001-of-00003.safetensors has CRC-32 [0-9a-f]{8}, manifest.json says [0-9a-f]{8}"
        ):
            convert()
    assert not (tmp_path / "out").exists()
    flip(tp3 / rank_file(1, 3), "stack.blocks.0.feedforward.down.weight", at=9)
    merge(open_checkpoint(tp3), tmp_path / "out", verify=True)


def edit_manifest(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda m: m["files"][0].update(crc32=1), "has CRC-32 .* says 00000001"),
        (lambda m: m["files"][0].update(size=1), r"rank-00000-of-00003.safetensors has \d+ bytes, the manifest says 1"),
        (lambda m: m["tensors"]["head.weight"]["parts"][0]["runs"][0].__setitem__(1, 20), "head.weight is cut in another way"),
        (lambda m: m["tensors"]["stack.blocks.1.attention.qkv.weight"]["parts"].reverse(), "qkv.weight is cut in another way"),
        (lambda m: m["tensors"]["stack.blocks.1.norm_1.weight"].update(dim=0), "norm_1.weight is cut in another way"),
        (lambda m: m["tensors"]["head.weight"].update(dtype="BF16"), "the manifest makes it BF16"),
        (lambda m: m["tensors"].pop("head.weight"), "head.weight is missing"),
        (lambda m: m["tensors"].update(step=m["tensors"]["head.weight"]), "tensors that the model lacks: step"),
        (lambda m: m["hf_config"].update(num_key_value_heads=2), "is cut in another way"),
        (lambda m: m.update(layout="interleaved"), "layout: Extra inputs are not permitted"),
    ],
)
def test_c45_the_manifest_states_the_layout(tp3: Path, tmp_path: Path, change: Any, fault: str) -> None:
    edit_manifest(tp3, change)
    with pytest.raises(CheckpointError, match=fault):
        merge(open_checkpoint(tp3), tmp_path / "out", verify=True)


def test_c76_unknown_tensors(tp3: Path) -> None:
    path = tp3 / rank_file(1, 3)
    save_file(load_file(path) | {"rng_state": torch.ones(4)}, path, {"file": path.name})
    edit_manifest(tp3, lambda m: m["files"][1].update(size=path.stat().st_size))
    with pytest.raises(
        CheckpointError, match="rank-00001-of-00003.safetensors and the config differ in the tensors rng_state"
    ):
        open_checkpoint(tp3)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda plan: plan.pop(next(iter(plan))), "the tensor .* is missing"),
        (lambda plan: next(iter(plan.values())).popitem(), "the tensor .* is missing"),
    ],
)
def test_c72_what_was_merged_is_held_against_the_config(tp3: Path, tmp_path: Path, change: Any, fault: str) -> None:
    conversion = merging(open_checkpoint(tp3))
    change(conversion.plan)
    with pytest.raises(CheckpointError, match=fault):
        conversion.run(tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_c72_shapes_of_what_was_merged(tp3: Path, tmp_path: Path) -> None:
    conversion = merging(open_checkpoint(tp3))
    ((file, name),) = [
        (file, name) for file, tensors in conversion.plan.items() for name in tensors if name == "lm_head.weight"
    ]
    stored, dtype = conversion.plan[file][name]
    conversion.plan[file][name] = (stored.cut(0, 0, 40), dtype)  # type: ignore[index]
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \(40, 24\), config.json makes it \(61, 24\)"):
        conversion.run(tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_values_that_are_no_numbers(tp3: Path, tmp_path: Path) -> None:
    check_finite(open_checkpoint(tp3))
    for rank, value in ((0, math.nan), (2, -math.inf)):
        path = tp3 / rank_file(rank, 3)
        tensors = load_file(path)
        tensors["head.weight"][-1, 3] = value
        save_file(tensors, path, {"file": path.name})
    told = "rank-00000-of-00003.safetensors/head.weight, rank-00002-of-00003.safetensors/head.weight$"
    with pytest.raises(CheckpointError, match=f"values that are not finite numbers in {told}"):
        merge(open_checkpoint(tp3), tmp_path / "out", finite=True)
    merge(open_checkpoint(tp3), tmp_path / "out")


def test_ranks_that_the_model_cannot_be_cut_over(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="6 query heads cannot be dealt over 7"):
        shard(open_checkpoint(transformers_folder("llama3", base)), tmp_path / "out", 7)
    with pytest.raises(CheckpointError):
        shard(open_checkpoint(transformers_folder("llama3", base)), tmp_path / "out", 0)
