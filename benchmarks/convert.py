"""Sharding, resharding and merging beside cp of the same bytes on the same disk, and the memory that the programs take.

    python -m benchmarks.convert --gigabytes 2

The four take turns in one run. Before each, what was written is removed, the disk's queue emptied, and as much memory touched as
will be written: a virtual machine's host takes back what is free, and giving it again may take longer than the work. Speed is
that of the work without the seconds in which Python starts and imports torch. Memory is that of the programs, started as their
users do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.program import add_out, without_out
from benchmarks.timing import ROOT, Spread, command, file_stem, header, save, table
from tpblock.formats.checkpoint import model_layouts, parse_config
from tpblock.formats.convert import merging, open_checkpoint, sharding, write_hf_index
from tpblock.formats.files import Writer
from tpblock.formats.hf import hf_names, shard_by_size

SPARE = 300_000_000
"""Bytes that a program may take beside twice the largest tensor."""


def llama(layers: int, dim: int = 2048, vocab_size: int = 64_000) -> dict[str, object]:
    """config.json of a Llama whose embedding is its largest tensor."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": dim,
        "intermediate_size": 11 * dim // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": dim // 128,
        "num_key_value_heads": dim // 512,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def write_folder(folder: Path, hf_config: dict[str, object], file_bytes: int) -> int:
    """A Hugging Face folder in bfloat16 with files of ``file_bytes`` at most. Returns the bytes of its largest tensor."""
    config, family = parse_config(hf_config)
    names = hf_names(config, family, model_layouts(config), {family.prefix: None})
    files = shard_by_size({name: (torch.bfloat16, stored.shape) for name, stored in names.items()}, file_bytes)
    values = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    plan = {
        file: {name: (stored, torch.bfloat16) for name, stored in names.items() if files[name] == file}
        for file in dict.fromkeys(files.values())
    }
    if len(plan) > 1:
        write_hf_index(plan, folder)
    largest = 0
    for file, tensors in plan.items():
        writer = Writer(folder / file, {name: (dtype, stored.shape) for name, (stored, dtype) in tensors.items()}, {})
        for name, (stored, _) in tensors.items():
            numbers = torch.Size(stored.shape).numel()
            largest = max(largest, 2 * numbers)
            for at in range(0, numbers, len(values)):
                writer.write(name, values[: numbers - at])
        writer.close()
    return largest


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and those that processors worked for it."""
    before, begin = os.times(), time.perf_counter()
    run()
    wall, after = time.perf_counter() - begin, os.times()
    return wall, sum(after[:4]) - sum(before[:4])


PEAK = """
import re, sys
from launch.{program} import main
main(sys.argv[1:])
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1], file=sys.stderr)
for name in ("transformers", "torch._dynamo", "torch.distributed.checkpoint"):
    assert name not in sys.modules, name
"""


def peak_memory(program: str, *arguments: str) -> int:
    """The resident memory of a program at its worst moment, in bytes. Linux only: what getrusage says includes its parent's."""
    command = [sys.executable, "-c", PEAK.format(program=program), *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stderr) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=str(__doc__).split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--rounds", type=int, default=7, help="how many rounds are kept")
    parser.add_argument("--folder", type=Path, help="where to write (default: the folder for temporary files)")
    add_out(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as in the programs
    given = without_out(sys.argv[1:], "--folder")
    about = header(command("benchmarks.convert", 1, given), torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        base = Path(name)
        layers = max(1, round((options.gigabytes * 1e9 - 5.2e8) / 9e7))
        largest = write_folder(base / "hf", llama(layers), 1_000_000_000)
        sharding(open_checkpoint(base / "hf"), 4).run(base / "tp4")
        total, out = open_checkpoint(base / "hf").bytes, base / "out"
        contenders: dict[str, Callable[[], object]] = {
            "cp -r": lambda: subprocess.run(["cp", "-r", base / "hf", out], check=True),
            "shard --tp 4": lambda: sharding(open_checkpoint(base / "hf"), 4).run(out),
            "reshard --tp 2": lambda: sharding(open_checkpoint(base / "tp4"), 2).run(out),
            "merge": lambda: merging(open_checkpoint(base / "tp4")).run(out),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
        for turn in range(1 + options.rounds):
            for contender in list(contenders) if turn % 2 == 0 else reversed(list(contenders)):
                shutil.rmtree(out, ignore_errors=True)
                os.sync()
                torch.ones(total, dtype=torch.uint8)
                found = timed(contenders[contender])
                if turn > 0:
                    seconds[contender].append(found)
        memory = {}
        for program in list(contenders)[1:]:
            shutil.rmtree(out, ignore_errors=True)
            what, *rest = program.split()
            memory[program] = peak_memory(what, str(base / ("hf" if what == "shard" else "tp4")), str(out), *rest)
    rows, limit = [], 2 * largest + SPARE
    for name, sample in seconds.items():
        wall, work = ([c[i] / s[i] for c, s in zip(seconds["cp -r"], sample, strict=True)] for i in range(2))
        rows.append(
            {
                "program": name,
                "GB/s": f"{Spread.of([total / 1e9 / wall for wall, _ in sample]):.2f}",
                "speed / cp": f"{Spread.of(wall):.2f}",
                "processor seconds, cp / its": f"{Spread.of(work):.2f}",
                "peak memory, MB": f"{memory[name] / 1e6:.0f}" if name in memory else "-",
                "of the limit": f"{memory[name] / limit:.2f}" if name in memory else "-",
            }
        )
    text = table(rows)
    print(text)
    facts = {
        "checkpoint": f"{total / 1e9:.2f} GB in bfloat16, largest tensor {largest / 1e6:.0f} MB",
        "limit of the memory": f"twice the largest tensor and {SPARE / 1e6:.0f} MB: {limit / 1e6:.0f} MB",
        "speed": "of the work, without the seconds in which Python starts",
        "rounds": str(options.rounds),
    }
    title = "Sharding, resharding and merging beside cp"
    stem = file_stem("convert", f"{options.gigabytes:g} GB", device=torch.device("cpu"))
    save(stem, title, text, about | facts, {"seconds": seconds, "memory": memory}, options.out)


if __name__ == "__main__":
    main()
