"""Folders that are broken or hostile: each a CheckpointError that names what is at fault, with nothing left behind."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import pickle
import pkgutil
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from parallel.checkpoint import load_checkpoint, save_checkpoint
from parallel.group import TPGroup, single_device
from tests.hostile import (
    DOWN,
    FIRST,
    HEAD,
    INDEX,
    MANIFEST,
    NORM,
    RANK_0,
    RANK_1,
    SECOND,
    SINGLE,
    Change,
    Payload,
    both,
    config,
    cut,
    edit_json,
    field,
    fifo,
    gone,
    header,
    held,
    llama_tensors,
    manifest,
    tensors,
    text,
    tree,
    weight_map,
    write_folder,
    write_originals,
)
from tests.pool import Pool
from tpblock import CheckpointError, Decoder, ModelConfig, load_pretrained, save_pretrained
from tpblock.formats import convert
from tpblock.formats.checkpoint import read_config
from tpblock.formats.convert import open_checkpoint


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_originals(tmp_path_factory.mktemp("originals"))


def check_refused(folder: Path, fault: str, **options: Any) -> None:
    before = tree(folder.parent), held()
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=fault) as caught:
        load_pretrained(folder, group=single_device(), **options)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert len(message) < 2000
    del caught
    assert (tree(folder.parent), held()) == before


NEST = "[" * 50_000 + "]" * 50_000

FILES: dict[str, tuple[Change, str]] = {
    "empty": (cut(SECOND, lambda size, head: 0), f"cannot read .*{SECOND}"),
    "half a length": (cut(SECOND, lambda size, head: 4), f"cannot read .*{SECOND}"),
    "no header": (cut(SECOND, lambda size, head: 8), f"cannot read .*{SECOND}"),
    "half a header": (cut(SECOND, lambda size, head: 8 + head // 2), f"cannot read .*{SECOND}"),
    "no data": (cut(SECOND, lambda size, head: 8 + head), f"cannot read .*{SECOND}"),
    "half the data": (cut(SECOND, lambda size, head: size // 2), f"cannot read .*{SECOND}"),
    "a byte short": (cut(SECOND, lambda size, head: size - 1), f"cannot read .*{SECOND}"),
    "a byte long": (cut(SECOND, lambda size, head: size + 1), f"cannot read .*{SECOND}"),
    "length past the end": (header(lambda h: None, length=lambda n: n + (1 << 20)), f"cannot read .*{SECOND}"),
    "length of a gigabyte": (header(lambda h: None, length=lambda n: 1 << 30), f"cannot read .*{SECOND}"),
    "length with the sign bit": (header(lambda h: None, length=lambda n: (1 << 64) - n), f"cannot read .*{SECOND}"),
    "length 0": (header(lambda h: None, length=lambda n: 0), f"cannot read .*{SECOND}"),
    "length too small": (header(lambda h: None, length=lambda n: n // 2), f"cannot read .*{SECOND}"),
    "not JSON": (header(lambda h: "x" * 64), f"cannot read .*{SECOND}"),
    "not UTF-8": (header(lambda h: json.dumps(h).encode().replace(b"norm", b"n\xff\xfem")), f"cannot read .*{SECOND}"),
    "a list": (header(lambda h: "[]"), f"cannot read .*{SECOND}"),
    "a number": (header(lambda h: "1"), f"cannot read .*{SECOND}"),
    "no tensors": (header(lambda h: "{}"), f"cannot read .*{SECOND}"),
    "nested": (header(lambda h: '{"a":' + NEST + "}"), f"cannot read .*{SECOND}"),
    "a name twice": (header(lambda h: json.dumps(h)[:-1] + f', "{NORM}": {json.dumps(h[NORM])}}}'), "cannot read .*twice"),
    "a field twice": (
        header(lambda h: json.dumps(h).replace('"shape": [8]', '"shape": [8], "shape": [8]', 1)),
        f"cannot read .*{SECOND}",
    ),
    "a tensor that is a list": (header(lambda h: h | {NORM: []}), f"cannot read .*{SECOND}"),
    "no offsets": (header(lambda h: h[NORM].pop("data_offsets") and None), f"cannot read .*{SECOND}"),
    "offsets that overlap": (field(NORM, "data_offsets", [0, 32]), f"cannot read .*{SECOND}"),
    "offsets out of the file": (field(NORM, "data_offsets", [1 << 20, (1 << 20) + 32]), f"cannot read .*{SECOND}"),
    "offsets backwards": (field(NORM, "data_offsets", [32, 0]), f"cannot read .*{SECOND}"),
    "negative offsets": (field(NORM, "data_offsets", [-32, 0]), f"cannot read .*{SECOND}"),
    "huge offsets": (field(NORM, "data_offsets", [1 << 63, (1 << 63) + 32]), f"cannot read .*{SECOND}"),
    "fractional offsets": (field(NORM, "data_offsets", [0.5, 32.5]), f"cannot read .*{SECOND}"),
    "unknown dtype": (field(NORM, "dtype", "F12"), f"cannot read .*{SECOND}"),
    "dtype of another size": (field(NORM, "dtype", "F64"), f"cannot read .*{SECOND}"),
    "dtype that is a number": (field(NORM, "dtype", 32), f"cannot read .*{SECOND}"),
    "dtype that torch lacks": (header(lambda h: h[NORM].update(dtype="C64", shape=[4]) or None), f"{NORM} is of type C64"),
    "shape of another size": (field(NORM, "shape", [9]), f"cannot read .*{SECOND}"),
    "negative shape": (field(NORM, "shape", [-8]), f"cannot read .*{SECOND}"),
    "shape past 64 bits": (field(NORM, "shape", [1 << 70]), f"cannot read .*{SECOND}"),
    "shape whose product wraps": (field(NORM, "shape", [1 << 33, 1 << 33, 8]), f"cannot read .*{SECOND}"),
    "shape null": (field(NORM, "shape", None), f"cannot read .*{SECOND}"),
    "metadata with numbers": (header(lambda h: h | {"__metadata__": {"format": 1}}), f"cannot read .*{SECOND}"),
    "metadata that is a list": (header(lambda h: h | {"__metadata__": []}), f"cannot read .*{SECOND}"),
    "missing": (gone(SECOND), f"cannot read .*{SECOND}: .*No such file"),
    "a folder": (both(gone(SECOND), lambda folder: (folder / SECOND).mkdir()), f"cannot read .*{SECOND}: .*no regular file"),
    "a pipe": (fifo(SECOND), f"cannot read .*{SECOND}: .*no regular file"),
    "a link to nothing": (
        both(gone(SECOND), lambda folder: (folder / SECOND).symlink_to("nowhere")),
        f"cannot read .*{SECOND}: .*No such file",
    ),
    "a link to itself": (both(gone(SECOND), lambda folder: (folder / SECOND).symlink_to(SECOND)), f"cannot read .*{SECOND}"),
}

INDEXES: dict[str, tuple[Change, str]] = {
    "out of the folder": (weight_map(lm_head__weight="../x.safetensors"), r"outside the folder: '\.\./x\.safetensors'"),
    "absolute": (weight_map(lm_head__weight="/x.safetensors"), "outside the folder: '/x.safetensors'"),
    "a subfolder": (weight_map(lm_head__weight="sub/x.safetensors"), "outside the folder: 'sub/x.safetensors'"),
    "empty": (weight_map(lm_head__weight=""), f"{INDEX} names ''"),
    "dots": (weight_map(lm_head__weight=".."), "names.* '..'"),
    "nul": (weight_map(lm_head__weight="a\0.safetensors"), r"names 'a\\x00\.safetensors'"),
    "a very long name": (weight_map(lm_head__weight="a" * 500 + ".safetensors"), "cannot read .*aaa.safetensors"),
    "a pickle": (weight_map(lm_head__weight="pytorch_model.bin"), "'pytorch_model.bin': only safetensors files are read"),
    "a number": (weight_map(lm_head__weight=1), f"{INDEX} has no weight_map"),
    "null": (weight_map(lm_head__weight=None), f"{INDEX} has no weight_map"),
    "a list of files": (weight_map(lm_head__weight=[SECOND]), f"{INDEX} has no weight_map"),
    "another file": (weight_map(lm_head__weight=SECOND), f"{FIRST} has {HEAD}, the index has it in {SECOND}"),
    "a file that is not there": (weight_map(lm_head__weight="x.safetensors"), ".*x.safetensors"),
    "a tensor that no file has": (weight_map(x=SECOND), f"the index has x in {SECOND}, that file lacks it"),
    "a tensor that it lacks": (
        edit_json(INDEX, lambda index: index["weight_map"].pop(NORM) and None),
        f"{SECOND} has {NORM}, the index has it in None",
    ),
    "a tensor in two files": (tensors(lm_head__weight=torch.ones(11, 8)), f"{SECOND} has {HEAD}, the index has it in {FIRST}"),
    "no weight_map": (edit_json(INDEX, lambda index: {"metadata": {}}), f"{INDEX} has no weight_map"),
    "an empty weight_map": (edit_json(INDEX, lambda index: {"weight_map": {}}), f"{INDEX} has no weight_map"),
    "a weight_map that is a list": (edit_json(INDEX, lambda index: {"weight_map": [HEAD]}), f"{INDEX} has no weight_map"),
    "a list as a whole": (text(INDEX, "[]"), f"cannot read .*{INDEX}: it holds no JSON object"),
    "not JSON": (text(INDEX, "{"), f"cannot read .*{INDEX}"),
    "no bytes": (text(INDEX, ""), f"cannot read .*{INDEX}"),
    "not UTF-8": (text(INDEX, b'{"weight_map": {"\xff": "x"}}'), f"cannot read .*{INDEX}: .*utf-8"),
    "a name twice": (text(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'), f"cannot read .*{INDEX}: a name occurs twice"),
    "nested": (text(INDEX, '{"weight_map": ' + NEST + "}"), f"cannot read .*{INDEX}"),
    "a pipe": (fifo(INDEX), f"cannot read .*{INDEX}: it is no regular file"),
    "gone": (gone(INDEX), f"cannot read .*{SINGLE}: .*No such file"),
    "beside a single file": (
        lambda folder: shutil.copyfile(folder / FIRST, folder / SINGLE),
        f"has {SINGLE}, and {INDEX} that names other files",
    ),
}

TENSORS: dict[str, tuple[Change, str]] = {
    "missing": (
        both(tensors(model__norm__weight=None), edit_json(INDEX, lambda index: index["weight_map"].pop(NORM) and None)),
        f"the tensor {NORM} is missing",
    ),
    "unknown": (
        both(tensors(model__extra__weight=torch.ones(8)), weight_map(model__extra__weight=SECOND)),
        "tensors that the model lacks: model.extra.weight",
    ),
    "a third layer": (
        both(
            tensors(model__layers__2__input_layernorm__weight=torch.ones(8)),
            weight_map(model__layers__2__input_layernorm__weight=SECOND),
        ),
        "tensors that the model lacks: model.layers.2.input_layernorm.weight",
    ),
    "of another shape": (tensors(model__norm__weight=torch.ones(9)), rf"{NORM} has shape \(9,\), config.json makes it \(8,\)"),
    "transposed": (
        tensors(model__layers__1__mlp__down_proj__weight=torch.ones(6, 8)),
        rf"{DOWN} has shape \(6, 8\), config.json makes it \(8, 6\)",
    ),
    "of no dimensions": (tensors(model__norm__weight=torch.ones(())), rf"{NORM} has shape \(\)"),
    "of no elements": (tensors(model__norm__weight=torch.ones(0, 8)), rf"{NORM} has shape \(0, 8\)"),
    "of whole numbers": (tensors(model__norm__weight=torch.ones(8, dtype=torch.int32)), f"{NORM} is of torch.int32"),
    "of booleans": (tensors(model__norm__weight=torch.ones(8, dtype=torch.bool)), f"{NORM} is of torch.bool"),
    "of another dtype": (
        tensors(model__norm__weight=torch.ones(8).half()),
        rf"several dtypes, .*torch.float16 \({NORM}\)",
    ),
    "a tied head of another shape": (
        both(config(tie_word_embeddings=True), tensors(FIRST, lm_head__weight=torch.ones(12, 8))),
        rf"{HEAD} has shape \(12, 8\), config.json makes it \(11, 8\)",
    ),
    "a tied head of no dimensions": (
        both(config(tie_word_embeddings=True), tensors(FIRST, lm_head__weight=torch.ones(()))),
        rf"{HEAD} has shape \(\)",
    ),
    "a tied head of whole numbers": (
        both(config(tie_word_embeddings=True), tensors(FIRST, lm_head__weight=torch.ones(11, 8, dtype=torch.int32))),
        f"{HEAD} is of torch.int32",
    ),
    "a tied head of other values": (config(tie_word_embeddings=True), "the embedding is tied to the head"),
}

CONFIGS: dict[str, tuple[Change, str]] = {
    "missing": (gone("config.json"), "cannot read .*config.json: .*No such file"),
    "not JSON": (text("config.json", "{"), "cannot read .*config.json"),
    "a list": (text("config.json", "[1]"), "cannot read .*config.json: it holds no JSON object"),
    "null": (text("config.json", "null"), "cannot read .*config.json: it holds no JSON object"),
    "a name twice": (
        text("config.json", '{"vocab_size": 1, "vocab_size": 2}'),
        "cannot read .*config.json: a name occurs twice",
    ),
    "nested": (text("config.json", '{"a": ' + NEST + "}"), "cannot read .*config.json"),
    "not UTF-8": (text("config.json", b"\xff\xfe{}"), "cannot read .*config.json"),
    "a number of many digits": (text("config.json", '{"vocab_size": ' + "9" * 5000 + "}"), "cannot read .*config.json"),
    "NaN": (text("config.json", '{"rms_norm_eps": NaN}'), "cannot read .*config.json: NaN is no number"),
    "half a surrogate pair": (text("config.json", '{"name": "\\ud800"}'), "cannot read .*config.json: .*surrogates"),
    "a folder": (
        both(gone("config.json"), lambda folder: (folder / "config.json").mkdir()),
        "cannot read .*config.json: it is no regular file",
    ),
    "a pipe": (fifo("config.json"), "cannot read .*config.json: it is no regular file"),
    "larger than any": (
        lambda folder: os.truncate(folder / "config.json", 1 << 40),
        "it has 1,099,511,627,776 bytes, at most",
    ),
    "no architectures": (
        edit_json("config.json", lambda c: c.pop("architectures") and None),
        "architecture None is not supported",
    ),
    "empty architectures": (config(architectures=[]), "architecture None is not supported"),
    "architectures a text": (config(architectures="LlamaForCausalLM"), "architecture .* is not supported"),
    "architectures of lists": (config(architectures=[["LlamaForCausalLM"]]), "config.json makes no model|is not supported"),
    "architectures of numbers": (config(architectures=[1]), "architecture 1 is not supported"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "quantization_config: quantised weights are not"),
    "layers past all": (config(num_hidden_layers=10**9), "num_hidden_layers = 1000000000, the number of layers is 1 to 10000"),
    "layers past the tensors": (config(num_hidden_layers=9999), "a model of 9999 layers, the files hold 21 tensors"),
    "a layer more": (config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight is missing"),
    "a layer less": (config(num_hidden_layers=1), "tensors that the model lacks: model.layers.1"),
    "hidden size past all": (config(hidden_size=10**12, head_dim=2), r"a model of .* parameters, the files hold"),
    "hidden size of 4000 digits": (config(hidden_size=10**4000, head_dim=2), "a model of more than 2.63 parameters"),
    "vocabulary past all": (config(vocab_size=1 << 62), r"a model of .* parameters, the files hold"),
    "vocabulary past 64 bits": (config(vocab_size=1 << 100), r"a model of more than 2.63 parameters, the files hold"),
    "feed-forward past all": (config(intermediate_size=10**15), r"a model of .* parameters, the files hold"),
    "heads past all": (config(num_attention_heads=2 * 10**9, head_dim=2), r"a model of .* parameters, the files hold"),
    "heads that do not divide": (config(num_attention_heads=3), "dim 8 is not a multiple of heads 3"),
    "KV heads that do not divide": (config(num_key_value_heads=3), "heads 4 is not a multiple of kv_heads 3"),
    "unknown activation": (config(hidden_act="tanh"), "hidden_act = 'tanh' is not supported"),
    "rope_parameters a list": (config(rope_parameters=[1]), r"rope_parameters must be an object or null, got \[1\]"),
    "rope type a list": (
        config(rope_scaling={"rope_type": ["linear"], "factor": 2.0}),
        r"rope type \['linear'\] is not supported",
    ),
    "rope type an empty list": (config(rope_scaling={"rope_type": []}), r"rope type \[\] is not supported"),
    "rope_theta a text": (config(rope_theta="10000"), "rope_theta must be a finite number, got '10000'"),
    "rope_theta true": (config(rope_theta=True), "rope_theta must be a finite number, got True"),
    "rope_theta past all": (config(rope_theta=10**400), "rope_theta must be a finite number, got 10"),
    "rms_norm_eps past all": (config(rms_norm_eps=10**400), "norm_eps must be a finite number, got 10"),
    "activation a list": (config(hidden_act=[]), r"hidden_act = \[\] is not supported"),
    "biases a text": (config(attention_bias="false"), "attention_bias must be true or false, got 'false'"),
}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 16} | {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
CONFIGS |= {
    f"rope {name} = {value!r:.20}": (
        config(rope_scaling=LLAMA3 | {name: value}),
        "config.json: (factor|low_freq_factor|original_max_seq_len) .*(positive|below)|config.json: .* is null|makes no model",
    )
    for name, values in {
        "factor": ("8", None, [8.0], True, 0, -1.0, 10**400),
        "low_freq_factor": ("1", 0, 4.0, 5.0),
        "original_max_position_embeddings": ("16", 0, [16]),
    }.items()
    for value in values
}
CONFIGS |= {
    f"{name} = {value!r:.20}": (config(**{name: value}), f"{ours}|config.json makes no model|config.json: {name}")
    for name, ours in {
        "vocab_size": "vocab_size",
        "hidden_size": "dim",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "max_position_embeddings": "max_seq_len",
    }.items()
    for value in ("8", 8.0, None, [8], {}, True, 0, -1, 1e30)
}
CONFIGS |= {
    f"{name} = {value!r:.20}": (config(**{name: value}), f"{name}|norm_eps|tied_embeddings|config.json makes no model")
    for name in ("rms_norm_eps", "rope_theta", "tie_word_embeddings")
    for value in ("x", None, [], {}, -1, 10**400)
}

SHARDED: dict[str, tuple[Change, str]] = {
    "not JSON": (text(MANIFEST, "{"), f"cannot read .*{MANIFEST}"),
    "a list": (text(MANIFEST, "[]"), f"cannot read .*{MANIFEST}: it holds no JSON object"),
    "nothing": (text(MANIFEST, "{}"), f"{MANIFEST}: ranks: Field required"),
    "a folder": (both(gone(MANIFEST), lambda folder: (folder / MANIFEST).mkdir()), f"cannot read .*{MANIFEST}"),
    "format": (manifest("format", value="other"), f"{MANIFEST}: format: "),
    "version": (manifest("version", value=2), f"{MANIFEST}: version: Input should be 1"),
    "version a text": (manifest("version", value="1"), f"{MANIFEST}: version: Input should be 1"),
    "a field more": (manifest("more", value=1), f"{MANIFEST}: more: Extra inputs"),
    "ranks 0": (manifest("ranks", value=0), f"{MANIFEST}: it is for 0 ranks and names 2 files"),
    "ranks -1": (manifest("ranks", value=-1), f"{MANIFEST}: it is for -1 ranks and names 2 files"),
    "ranks 0 without files": (both(manifest("ranks", value=0), manifest("files", value=[])), "for 0 ranks and names 0 files"),
    "ranks 10^9": (manifest("ranks", value=10**9), f"{MANIFEST}: it is for 1000000000 ranks and names 2 files"),
    "ranks 1": (manifest("ranks", value=1), f"{MANIFEST}: it is for 1 ranks and names 2 files"),
    "ranks a text": (manifest("ranks", value="2"), f"{MANIFEST}: ranks: Input should be a valid integer"),
    "ranks a float": (manifest("ranks", value=2.0), f"{MANIFEST}: ranks: Input should be a valid integer"),
    "ranks true": (manifest("ranks", value=True), f"{MANIFEST}: ranks: Input should be a valid integer"),
    "no files": (manifest("files", value=[]), f"{MANIFEST}: it is for 2 ranks and names 0 files"),
    "files a dict": (manifest("files", value={}), f"{MANIFEST}: files: Input should be a valid list"),
    "a file out of the folder": (manifest("files", 1, "name", value="../x"), r"the file of rank 1 is '\.\./x'"),
    "an absolute file": (manifest("files", 1, "name", value="/x"), "the file of rank 1 is '/x'"),
    "the other rank's file": (manifest("files", 1, "name", value=RANK_0), f"the file of rank 1 is '{RANK_0}'"),
    "a file's size": (manifest("files", 1, "size", value=10), rf"{RANK_1} has \d+ bytes, the manifest says 10"),
    "a file's size null": (manifest("files", 1, "size", value=None), f"{MANIFEST}: files.1.size: "),
    "a file's checksum": (manifest("files", 1, "crc32", value="x"), f"{MANIFEST}: files.1.crc32: "),
    "a tensor's shape": (manifest("tensors", "head.weight", "shape", value=[12, 8]), "head.weight is cut in another way"),
    "a tensor's dtype": (
        manifest("tensors", "head.weight", "dtype", value="F16"),
        r"head.weight is torch.float32 .*makes it F16",
    ),
    "an unknown dtype": (manifest("tensors", "head.weight", "dtype", value="F12"), "head.weight is of F12"),
    "a tensor of whole numbers": (manifest("tensors", "head.weight", "dtype", value="I32"), "head.weight is of I32"),
    "a tensor's dim": (manifest("tensors", "head.weight", "dim", value=1), "head.weight is cut in another way"),
    "runs that overlap": (
        manifest("tensors", "head.weight", "parts", 0, "runs", value=[[0, 7], [6, 11]]),
        "head.weight is cut in another way",
    ),
    "runs of the other rank": (
        manifest("tensors", "head.weight", "parts", 0, "runs", value=[[0, 5], [5, 11]]),
        "head.weight is cut in another way",
    ),
    "runs of text": (manifest("tensors", "head.weight", "parts", 0, "runs", value=[["0", "6"]]), "parts.0.runs.0.0: "),
    "a part's name": (manifest("tensors", "head.weight", "parts", 0, "name", value="x"), "head.weight is cut in another way"),
    "a tensor missing": (edit_json(MANIFEST, lambda m: m["tensors"].pop("head.weight") and None), "head.weight is missing"),
    "a tensor more": (
        edit_json(MANIFEST, lambda m: m["tensors"].update({"x": m["tensors"]["head.weight"]})),
        f"{MANIFEST} has tensors that the model lacks: x",
    ),
    "a Hugging Face file elsewhere": (
        manifest("hf_files", NORM, value="../../x.safetensors"),
        f"{NORM} was in '../../x.safet",
    ),
    "a Hugging Face file absolute": (manifest("hf_files", NORM, value="/x.safetensors"), f"{NORM} was in '/x.safetensors'"),
    "a Hugging Face file of another kind": (manifest("hf_files", NORM, value="config.json"), f"{NORM} was in 'config.json'"),
    "hf_files a list": (manifest("hf_files", value=[]), f"{MANIFEST}: hf_files: "),
    "hf_metadata of numbers": (manifest("hf_metadata", value={"format": 1}), f"{MANIFEST}: hf_metadata.format: "),
    "no hf_config": (manifest("hf_config", value={}), "architecture None is not supported"),
    "hf_config null": (manifest("hf_config", value=None), f"{MANIFEST}: hf_config: "),
    "another config": (manifest("hf_config", "num_hidden_layers", value=1), "tensors that the model lacks: stack.blocks.1"),
    "layers past all": (manifest("hf_config", "num_hidden_layers", value=10**9), "is 1 to 10000"),
    "fewer heads than ranks": (
        both(manifest("hf_config", "num_attention_heads", value=1), manifest("hf_config", "num_key_value_heads", value=1)),
        rf"{MANIFEST}: 1 query heads cannot be dealt over 2",
    ),
    "a rank's file missing": (gone(RANK_1), f"cannot read .*{RANK_1}: .*No such file"),
    "a rank's file truncated": (cut(RANK_1, lambda size, head: size - 1), f"cannot read .*{RANK_1}"),
    "a rank's file empty": (cut(RANK_1, lambda size, head: 0), f"cannot read .*{RANK_1}"),
    "a rank's file swapped": (
        lambda folder: shutil.copyfile(folder / RANK_0, folder / RANK_1),
        f"{RANK_1} was written as {RANK_0}: the files were renamed",
    ),
    "a rank's file of another size": (
        lambda folder: save_file(load_file(folder / RANK_1), folder / RANK_1, {"file": RANK_1, "x": "y"}),
        rf"{RANK_1} has \d+ bytes, the manifest says \d+",
    ),
    "a rank's file swapped, with its size": (
        both(
            lambda folder: save_file(load_file(folder / RANK_0), folder / RANK_1, {"file": RANK_1}),
            edit_json(MANIFEST, lambda m: m["files"][1].update(size=m["files"][0]["size"])),
        ),
        rf"{RANK_1}: .* of shape .*, the manifest makes it .* of shape",
    ),
    "a rank's file without a tensor": (
        both(
            tensors(RANK_1, head__weight=None),
            lambda folder: manifest("files", 1, "size", value=(folder / RANK_1).stat().st_size)(folder),
        ),
        f"{RANK_1} and the config differ in the tensors head.weight",
    ),
    "a rank's file with a tensor more": (
        both(
            tensors(RANK_1, x=torch.ones(1)),
            lambda folder: manifest("files", 1, "size", value=(folder / RANK_1).stat().st_size)(folder),
        ),
        f"{RANK_1} and the config differ in the tensors x",
    ),
    "a rank's file a pipe": (fifo(RANK_1), f"cannot read .*{RANK_1}: it is no regular file"),
}

CASES = [
    pytest.param(kind, change, fault, id=f"{group}-{name}")
    for group, kind, cases in [
        ("file", "llama", FILES),
        ("index", "llama", INDEXES),
        ("tensor", "llama", TENSORS),
        ("config", "llama", CONFIGS),
        ("sharded", "sharded", SHARDED),
    ]
    for name, (change, fault) in cases.items()
]


@pytest.mark.parametrize(("kind", "change", "fault"), CASES)
def test_refused(originals: dict[str, Path], tmp_path: Path, kind: str, change: Change, fault: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(originals[kind], folder)
    change(folder)
    check_refused(folder, fault)


def test_the_originals_are_read(originals: dict[str, Path]) -> None:
    """What the tests above break is whole before."""
    expected = None
    for folder in originals.values():
        with torch.no_grad():
            logits = load_pretrained(folder, group=single_device(), finite=True)(torch.arange(5).view(1, 5))
        expected = logits if expected is None else expected
        assert torch.equal(logits, expected)


def test_links_are_followed(originals: dict[str, Path], tmp_path: Path) -> None:
    """Caches of downloads hold links to files elsewhere."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in originals["llama"].iterdir():
        (folder / path.name).symlink_to(path)
    load_pretrained(folder, group=single_device())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_not_run(originals: dict[str, Path], tmp_path: Path, name: str) -> None:
    folder, marker = tmp_path / "folder", tmp_path / "marker"
    shutil.copytree(originals["single"], folder)
    (folder / SINGLE).unlink()
    torch.save(Payload(marker), folder / name)
    meta = "is refused: its pickle asks for more than tensors"
    check_refused(folder, f"{name} {meta}" if "consolidated" in name else f"{name}, but no {SINGLE}: only safetensors files")
    (folder / name).rename(folder / SINGLE)
    check_refused(folder, f"cannot read .*{SINGLE}")
    (folder / SINGLE).write_bytes(pickle.dumps(Payload(marker)))
    check_refused(folder, f"cannot read .*{SINGLE}")
    assert not marker.exists()
    pickle.loads((folder / SINGLE).read_bytes())
    assert marker.exists(), "the payload does nothing"


@pytest.mark.parametrize("what", ["nothing", "a file", "an empty folder"])
def test_no_folder(tmp_path: Path, what: str) -> None:
    path = tmp_path / "folder"
    if what == "a file":
        path.write_text("x")
    elif what == "an empty folder":
        path.mkdir()
    check_refused(path, "cannot read .*config.json: .*No such file" if path.is_dir() else "folder is not a folder")


@pytest.mark.parametrize("kind", ["llama", "sharded"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(originals: dict[str, Path], tmp_path: Path, kind: str, value: float) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(originals[kind], folder)
    _, entry = open_checkpoint(folder).tensors[HEAD if kind == "llama" else f"{RANK_1}/head.weight"]
    with open(entry.path, "r+b") as file:
        file.seek(entry.start + entry.size - 4)
        file.write(struct.pack("f", value))
    check_refused(folder, r"head.weight holds values that are not finite numbers of torch.float32", finite=True)
    load_pretrained(folder, group=single_device())


def test_finite_in_the_dtype_asked_for(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(originals["llama"], folder)
    tensors(FIRST, **{HEAD: torch.full((11, 8), 1e5)})(folder)
    load_pretrained(folder, group=single_device(), finite=True)
    check_refused(
        folder, "head.weight holds values that are not finite numbers of torch.float16", finite=True, dtype=torch.float16
    )


def test_float8_values_are_checked_too(tmp_path: Path) -> None:
    weights = {name: value.to(torch.float8_e4m3fn) for name, value in llama_tensors().items()}
    folder = write_folder(tmp_path / "folder", weights)
    load_pretrained(folder, group=single_device(), finite=True)
    tensors(SECOND, **{NORM: torch.full((8,), float("nan")).to(torch.float8_e4m3fn)})(folder)
    check_refused(folder, "stack.norm.weight holds values that are not finite", finite=True)


def test_weights_that_vanish_after_their_headers_were_read(originals: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(originals["single"], folder)
    checkpoint = open_checkpoint(folder)
    entry = checkpoint.tensors[HEAD][1]
    os.truncate(folder / SINGLE, entry.start)
    with pytest.raises(CheckpointError, match=f"cannot read .*{SINGLE}"):
        entry.rows(0, 11)
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"cannot read .*{SINGLE}: .*No such file"):
        entry.rows(0, 11)


def test_a_failed_load_leaves_no_model(originals: dict[str, Path], tmp_path: Path) -> None:
    """Also if it fails after the model was built and filled in part."""
    folder = tmp_path / "folder"
    shutil.copytree(originals["llama"], folder)
    config(tie_word_embeddings=True)(folder)
    gc.collect()
    models = sum(type(each) is Decoder for each in gc.get_objects())
    check_refused(folder, "the embedding is tied to the head")
    gc.collect()
    assert sum(type(each) is Decoder for each in gc.get_objects()) == models


# Writing. Each of these writes one checkpoint as a new folder.


def save(checkpoint: Path, out: Path) -> None:
    save_pretrained(load_pretrained(checkpoint, group=single_device()), out)


def shard(checkpoint: Path, out: Path) -> None:
    convert.shard(open_checkpoint(checkpoint), out, 2)


def merge(checkpoint: Path, out: Path) -> None:
    convert.merge(open_checkpoint(checkpoint), out)


WRITERS = pytest.mark.parametrize("write", [save, shard, merge])


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def after(calls: int, function: Any) -> Callable[..., Any]:
    """The function, which fails as on a full disk once it was called so often."""
    count = itertools.count()
    return lambda *args, **options: function(*args, **options) if next(count) < calls else full_disk()


def check_not_written(write: Callable[[Path, Path], None], folder: Path, out: Path, base: Path, fault: str) -> None:
    before = tree(base), held()
    with pytest.raises(CheckpointError, match=fault) as caught:
        write(folder, out)
    del caught
    gc.collect()  # what a thread raises refers to itself
    assert (tree(base), held()) == before


@WRITERS
@pytest.mark.parametrize(
    ("target", "calls"),
    [("os.posix_fallocate", 0), ("os.posix_fallocate", 1), ("os.pwrite", 0), ("os.pwrite", 5), ("pathlib.Path.write_text", 0)],
)
@pytest.mark.parametrize("there", [False, True])
def test_full_disk(
    originals: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[Path, Path], None],
    target: str,
    calls: int,
    there: bool,
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(target, after(calls, pkgutil.resolve_name(target.replace(".", ":", 1))))
        check_not_written(write, originals["llama"], out, tmp_path, f"cannot write {out}: No space left on device")
    write(originals["llama"], out)
    load_pretrained(out, group=single_device())


LIMITED = """
import os, resource, sys
from pathlib import Path
from tests import test_hostile
from tpblock import CheckpointError

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for write in (test_hostile.save, test_hostile.shard, test_hostile.merge):
    try:
        write(folder, out)
    except CheckpointError as error:
        print(error)
    assert not os.listdir(out.parent)
"""


def test_limited_file_size(originals: dict[str, Path], tmp_path: Path) -> None:
    """What the system itself says when a file cannot grow."""
    out = tmp_path / "out"
    command = [sys.executable, "-B", "-c", LIMITED, str(originals["llama"]), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent)
    assert done.stdout == f"cannot write {out}: File too large\n" * 3, done.stderr


@WRITERS
def test_output_that_is_taken(originals: dict[str, Path], tmp_path: Path, write: Callable[[Path, Path], None]) -> None:
    """Neither it nor anything beside it is touched, whatever it is called."""
    out, beside = tmp_path / "out", tmp_path / "out.partial"
    out.mkdir()
    (out / "precious").write_text("x")
    beside.mkdir()
    (beside / "precious").write_text("x")
    check_not_written(write, originals["llama"], out, tmp_path, f"{out} is there already and not empty")
    check_not_written(write, originals["llama"], out / "precious", tmp_path, "precious is there already")
    check_not_written(write, originals["llama"], out / "precious" / "out", tmp_path, "cannot write .*Not a directory")
    write(originals["llama"], tmp_path / "free")
    assert (beside / "precious").read_text() == (out / "precious").read_text() == "x"
    shutil.copytree(originals["llama"], tmp_path / "new.partial")
    write(tmp_path / "new.partial", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["free", "new", "new.partial", "out", "out.partial"]


@WRITERS
def test_output_that_cannot_be_made(originals: dict[str, Path], tmp_path: Path, write: Callable[[Path, Path], None]) -> None:
    check_not_written(write, originals["llama"], Path("/proc/nowhere/out"), tmp_path, "cannot write /proc/nowhere/out")
    check_not_written(write, originals["llama"], tmp_path / ("a" * 300), tmp_path, "cannot write .*File name too long")


@WRITERS
def test_parents_of_the_output(
    originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Path], None]
) -> None:
    """They are made, and go again if the output fails."""
    out = tmp_path / "a" / "b" / "out"
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full_disk)
        check_not_written(write, originals["llama"], out, tmp_path, "No space left")
    write(originals["llama"], out)
    load_pretrained(out, group=single_device())


def test_output_in_the_working_folder(originals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    save(originals["llama"], Path("."))
    load_pretrained(out, group=single_device())


def test_only_what_was_loaded_is_saved(tmp_path: Path) -> None:
    model = Decoder(ModelConfig(vocab_size=11, dim=8, layers=1, heads=4), group=single_device())
    with pytest.raises(CheckpointError, match="only a model that load_pretrained made"):
        save_pretrained(model, tmp_path / "out")
    assert not tree(tmp_path)


# Several ranks. What a rank raises is returned, so that each can be looked at.


def load_each(group: TPGroup, folders: list[Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        load_pretrained(folders[group.rank], group=group)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", time.monotonic() - start


def check_each_refuses(pool: Pool, folders: list[Any], fault: str, kinds: list[str] | None = None) -> None:
    results = pool.run(len(folders), load_each, folders, timeout=60)
    assert [kind for kind, _, _ in results] == (kinds or ["CheckpointError"] * len(folders)), results
    for kind, message, seconds in results:
        assert kind != "CheckpointError" or re.search(fault, message), message
        assert seconds < 10


@pytest.mark.parametrize("kind", ["missing", "unknown", "of another shape", "of another dtype"])
def test_c75_a_wrong_tensor_is_named_and_makes_no_model(originals: dict[str, Path], tmp_path: Path, kind: str) -> None:
    change, fault = TENSORS[kind]
    folder = tmp_path / "folder"
    shutil.copytree(originals["llama"], folder)
    change(folder)
    check_refused(folder, fault)


def test_more_ranks_than_heads(pool: Pool, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "few", llama_tensors(heads=2, kv_heads=1), num_attention_heads=2, num_key_value_heads=1)
    results = pool.run(4, load_each, [folder] * 4)
    assert {(kind, message) for kind, message, _ in results} == {
        ("ValueError", "2 query heads cannot be dealt over 4 tensor-parallel shards (KV heads: 1)")
    }


def load_with(group: TPGroup, folder: Path, options: list[dict[str, Any]]) -> str:
    try:
        load_pretrained(folder, group=group, **options[group.rank])
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_ranks_with_different_options(pool: Pool, originals: dict[str, Path]) -> None:
    changed = replace(read_config(originals["llama"])[0], norm_eps=0.1)
    for other in ({"config": changed}, {"virtual_shards": 2}, {"dtype": torch.float64}):
        results = pool.run(2, load_with, originals["llama"], [{}, other])
        assert all("rank 1 and rank 0 do not have the same config or options" in result for result in results), results


def test_a_config_that_the_folder_would_not_have(originals: dict[str, Path], tmp_path: Path) -> None:
    trained = replace(read_config(originals["llama"])[0], dropout=0.1)
    save_pretrained(load_pretrained(originals["llama"], group=single_device(), config=trained), tmp_path / "out")
    model = load_pretrained(originals["llama"], group=single_device(), config=replace(trained, norm_eps=0.1))
    with pytest.raises(CheckpointError, match="it has norm_eps .*, the model has 0.1"):
        save_pretrained(model, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_ranks_with_different_folders(pool: Pool, originals: dict[str, Path], tmp_path: Path) -> None:
    llama = originals["llama"]
    other_config = write_folder(tmp_path / "config", llama_tensors(), rope_theta=2e4)
    check_each_refuses(pool, [llama, llama, other_config], "rank 2 and rank 0 do not have the same folder")
    other_weights = write_folder(tmp_path / "weights", llama_tensors(seed=1))
    check_each_refuses(pool, [llama, other_weights], "rank 1 and rank 0 do not have the same folder")
    check_each_refuses(pool, [llama, originals["sharded"]], "rank 1 and rank 0 do not have the same folder")
    for part in ("k_proj", "v_proj", "up_proj", "down_proj", "embed_tokens", "model.norm"):
        changed = llama_tensors()
        for name, tensor in changed.items():
            if part in name:
                tensor[len(tensor) // 2 :] += 1
        folder = write_folder(tmp_path / part, changed)
        check_each_refuses(pool, [llama, folder], "rank 1 and rank 0 do not have the same (folder|replicated weights)")


def test_a_folder_that_one_rank_cannot_read(pool: Pool, originals: dict[str, Path], tmp_path: Path) -> None:
    llama = originals["llama"]
    check_each_refuses(pool, [llama, llama, tmp_path / "nowhere"], "^rank 2: .*nowhere is not a folder$")
    check_each_refuses(pool, [tmp_path / "nowhere", llama], "^rank 0: .*nowhere is not a folder$")
    broken = tmp_path / "broken"
    shutil.copytree(llama, broken)
    os.truncate(broken / SECOND, 100)
    check_each_refuses(pool, [llama, broken], f"^rank 1: cannot read .*{SECOND}")


def test_a_folder_that_one_rank_cannot_cut(pool: Pool, originals: dict[str, Path], tmp_path: Path) -> None:
    """A rank's own error of another kind stays what it is; the others are told."""
    one_head = write_folder(tmp_path / "one", llama_tensors(heads=1, kv_heads=1), num_attention_heads=1, num_key_value_heads=1)
    fault = "^rank 1: ValueError: 1 query heads cannot be dealt over 2"
    check_each_refuses(pool, [originals["llama"], one_head], fault, ["CheckpointError", "ValueError"])
    check_each_refuses(pool, [originals["llama"], None], "^rank 1: TypeError: ", ["CheckpointError", "TypeError"])


def save_on_a_full_disk(group: TPGroup, folder: Path, out: Path) -> str:
    model = load_pretrained(folder, group=group)
    with mock.patch("os.pwrite", after(3, os.pwrite)), pytest.raises(CheckpointError) as caught:
        save_pretrained(model, out)
    save_pretrained(model, out)
    return str(caught.value)


def test_full_disk_of_several_ranks(pool: Pool, originals: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    messages = pool.run(2, save_on_a_full_disk, originals["llama"], out)
    assert messages == [f"rank 0: cannot write {out}: No space left on device"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    load_pretrained(out, group=single_device())


# Checkpoints of training, whose index is a pickle.


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Decoder]:
    """A checkpoint, and a model with other weights."""
    sizes = ModelConfig(vocab_size=11, dim=8, layers=1, heads=4, d_ff=6)
    save_checkpoint(tmp_path / "checkpoint", Decoder(sizes, group=single_device()), single_device())
    return tmp_path / "checkpoint", Decoder(sizes, group=single_device(), seed=1)


def index_with(path: Path, change: Callable[[Any], object]) -> None:
    index = dcp.FileSystemReader(path).read_metadata()
    changed = change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index if changed is None else changed))


CHECKPOINTS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "an index that runs": (
        lambda path, marker: (path / ".metadata").write_bytes(pickle.dumps(Payload(marker))),
        r"its index names pathlib\.Path",
    ),
    "an index that runs within": (
        lambda path, marker: index_with(path, lambda index: setattr(index, "planner_data", Payload(marker))),
        r"its index names pathlib\.Path",
    ),
    "an index that calls": (
        lambda path, marker: (path / ".metadata").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()),
        r"its index names os\.system",
    ),
    "an index that reaches through torch": (
        lambda path, marker: (path / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c\x08Size.mro\x93."),
        r"its index names torch\.Size\.mro",
    ),
    "an index with objects": (
        lambda path, marker: index_with(
            path, lambda index: index.state_dict_metadata.update({"embedding.weight": BytesStorageMetadata()})
        ),
        r"its index names .*BytesStorageMetadata",
    ),
    "an index with half a tensor": (
        lambda path, marker: index_with(path, lambda index: delattr(index.state_dict_metadata["embedding.weight"], "size")),
        "its index has embedding.weight, which is no tensor",
    ),
    "an index that is something else": (
        lambda path, marker: (path / ".metadata").write_bytes(pickle.dumps({})),
        "its index is no .*Metadata",
    ),
    "an index cut short": (lambda path, marker: os.truncate(path / ".metadata", 100), "reading the checkpoint .* failed"),
    "no index": (lambda path, marker: (path / ".metadata").unlink(), "No such file"),
    "tensors that run": (
        lambda path, marker: torch.save(Payload(marker), next(path.glob("*.distcp"))),
        "reading the checkpoint .* failed",
    ),
    "tensors cut short": (
        lambda path, marker: os.truncate(next(path.glob("*.distcp")), 100),
        "reading the checkpoint .* failed",
    ),
    "extra that is not JSON": (lambda path, marker: (path / "extra.json").write_text("{"), "reading the checkpoint .* failed"),
}


@pytest.mark.parametrize(("change", "fault"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_checkpoints_refused(
    trained: tuple[Path, Decoder], tmp_path: Path, change: Callable[[Path, Path], object], fault: str
) -> None:
    """C93. The payload is not run and the model is unchanged (C75)."""
    path, model = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change(path, tmp_path / "marker")
    with pytest.raises(RuntimeError, match=fault):
        load_checkpoint(path, model, single_device())
    assert not (tmp_path / "marker").exists()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_source_reads_no_pickle() -> None:
    """C93: nothing but the index's own reader unpickles, and nothing asks for more than weights."""
    for folder in ("parallel", "tpblock", "launch"):
        for path in (Path(__file__).parent.parent / folder).rglob("*.py"):
            source = path.read_text()
            assert "weights_only=False" not in source, path
            assert "pickle.load" not in source, path
            assert source.count("torch.load(") == source.count("weights_only=True"), path
