"""launch.shard, reshard, merge and inspect as their users start them."""

from __future__ import annotations

import filecmp
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.convert import llama, peak_memory, write_folder
from launch import cli, convert
from tests.programs import ROOT, python
from tests.test_meta import llama as tiny_llama
from tests.test_meta import write_meta

SMALL = llama(2, dim=512, vocab_size=999)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "hf"
    write_folder(folder, SMALL, 4_000_000)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_there_and_back(hf: Path, tmp_path: Path) -> None:
    ended = python("-m", "launch.shard", str(hf), "tp3", "--tp", "3", "--dry-run", cwd=tmp_path)
    assert (ended.code, ended.errors) == (0, "")
    assert "Hugging Face folder" in ended.output and "free on its disk" in ended.output
    assert ended.output.count("-of-00003.safetensors") == 3
    assert not list(tmp_path.iterdir())
    for program in (["shard", str(hf), "tp3", "--tp", "3"], ["reshard", "tp3", "tp2", "--tp", "2"], ["merge", "tp2", "out"]):
        ended = python("-m", f"launch.{program[0]}", *program[1:], "--verify", "--check-finite", cwd=tmp_path)
        assert (ended.code, ended.errors) == (0, ""), ended
        assert ended.output.endswith(f"{program[2]} is complete and equal to its source in every bit\n")
        assert "writing" in ended.output and "/s" in ended.output
    assert files(tmp_path / "out") == files(hf)
    assert {path.name for path in tmp_path.iterdir()} == {"tp3", "tp2", "out"}
    ended = python("-m", "launch.merge", "tp3", "small", "--max-shard-size", "2MB", cwd=tmp_path)
    assert ended.code == 0 and len(list((tmp_path / "small").glob("*.safetensors"))) == 9

    ended = python("-m", "launch.inspect", "tp3", "--verify", "--check-finite", cwd=tmp_path)
    assert (ended.code, ended.errors) == (0, "")
    for told in (
        "sharded for 3 ranks",
        "LlamaForCausalLM",
        "vocab_size 999, dim 512, layers 2",
        "bfloat16",
        "3 of (333, 512)",
        "dim 0: gate 470+469+469, up 470+469+469",
        "checksums agree, and so do the copies that several ranks hold",
        "all values are finite numbers",
    ):
        assert told in ended.output, told
    path = tmp_path / "tp3" / "rank-00001-of-00003.safetensors"
    tensors = load_file(path)
    tensors["head.weight"][0, 0] = torch.nan
    save_file(tensors, path, {"file": path.name})
    ended = python("-m", "launch.inspect", "tp3", "--check-finite", cwd=tmp_path)
    assert ended.code == 2
    assert ended.errors == "error: tp3 has values that are not finite numbers in rank-00001-of-00003.safetensors/head.weight\n"
    ended = python("-m", "launch.merge", "tp3", "out2", "--verify", cwd=tmp_path)
    assert ended.code == 2 and ended.errors.startswith(f"error: tp3/{path.name} has CRC-32")
    assert not (tmp_path / "out2").exists()


def test_metas_files(tmp_path: Path) -> None:
    write_meta(tmp_path / "meta", tiny_llama(), 2, 1)
    ended = python("-m", "launch.cli", "merge", "meta", "hf", cwd=tmp_path)
    assert ended.code == 2 and ended.errors.startswith("error: ") and "--max-seq-len" in ended.errors
    ended = python("-m", "launch.cli", "merge", "meta", "hf", "--max-seq-len", "128", "--verify", cwd=tmp_path)
    assert (ended.code, ended.errors) == (0, "")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 128
    ended = python("-m", "launch.cli", "inspect", "meta", "--max-seq-len", "128", cwd=tmp_path)
    assert ended.code == 0 and "Meta's consolidated files, 2 of them" in ended.output


@pytest.mark.parametrize("program", ["shard", "reshard", "merge", "inspect"])
def test_help_and_wrong_arguments(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"launch.{program}").main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"python -m launch.{program}" in told and "--max-seq-len" in told
    assert ("FOLDER" in told) if program == "inspect" else ("SOURCE" in told and "OUT" in told and "--dry-run" in told)
    for wrong in ([], ["a", "b", "--tp", "two"], ["a", "b", "--unknown"]):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
    assert cli.COMMANDS[program].module == f"launch.{program}"


def failure(capsys: pytest.CaptureFixture[str], program: str, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"launch.{program}").main(arguments)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    return errors


def test_mistakes_are_told_in_one_line(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    assert "nowhere is not a folder" in failure(capsys, "shard", "nowhere", out, "--tp", "2")
    assert "cannot be dealt over 99" in failure(capsys, "shard", str(hf), out, "--tp", "99")
    assert "is not sharded (Hugging Face folder): launch.shard cuts it" in failure(
        capsys, "reshard", str(hf), out, "--tp", "2"
    )
    assert "'5XB' is no size" in failure(capsys, "merge", str(hf), out, "--max-shard-size", "5XB")
    assert "is there already and not empty" in failure(capsys, "merge", str(hf), str(hf))
    assert "config.json" in failure(capsys, "inspect", str(tmp_path))
    usage = type("usage", (), {"free": 1_000_000})
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    assert "needs 13.9 MB, its disk has 1.0 MB free" in failure(capsys, "shard", str(hf), out, "--tp", "2", "--dry-run")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("text", "count"), [("5GB", 5 * 10**9), ("300 mb", 3 * 10**8), ("1.5k", 1500), ("12", 12)])
def test_sizes(text: str, count: int) -> None:
    assert convert.parse_size(text) == count


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """300 MB in two files, and its largest tensor."""
    folder = tmp_path_factory.mktemp("convert") / "large"
    return folder, write_folder(folder, llama(11, dim=1024, vocab_size=20_000), 200_000_000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_below_twice_the_largest_tensor_and_300_mb(large: tuple[Path, int], tmp_path: Path) -> None:
    folder, largest = large
    assert sum(path.stat().st_size for path in folder.iterdir()) > 3e8 > 5 * largest
    tp4, tp3, out = (str(tmp_path / name) for name in ("tp4", "tp3", "out"))
    for program in (["shard", str(folder), tp4, "--tp", "4"], ["reshard", tp4, tp3, "--tp", "3"], ["merge", tp3, out]):
        assert peak_memory(*program, "--verify", "--check-finite") < 2 * largest + 300_000_000
    assert filecmp.cmpfiles(folder, tmp_path / "out", files_of(folder), shallow=False)[1:] == ([], [])


def files_of(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def heeds_ctrl_c() -> None:
    """Also where the tests themselves were started in the background, where a shell has them ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_under_the_final_name(large: tuple[Path, int], tmp_path: Path, sent: int) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "launch.shard", str(large[0]), str(out), "--tp", "4", "--verify"]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, preexec_fn=heeds_ctrl_c
    )
    while not list(tmp_path.glob(".out.*.partial/rank-00001-of-00004.safetensors")) and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(sent)
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[signal.Signals(sent)]
    assert not out.exists()
    assert len(list(tmp_path.glob(".out.*.partial"))) == (sent == signal.SIGKILL)  # nobody can clear up after that
