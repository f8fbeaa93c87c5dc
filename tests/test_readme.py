"""The scripts of README.md and docs/data_parallel.md run as they stand there, and the names that README.md gives exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.cli import COMMANDS
from tests.programs import ROOT, torchrun
from tpblock import PRESETS

DATA_PARALLEL = (ROOT / "docs" / "data_parallel.md").read_text()
README = (ROOT / "README.md").read_text()


def numbers(text: str) -> list[float]:
    return [float(n) for line in re.findall(r"step \d: .*", text) for n in re.findall(r"\d+\.\d+", line)]


def test_the_script_prints_what_stands_below_it(tmp_path: Path) -> None:
    (script, printed) = re.findall(r"```python\n(# mine\.py.*?)```\n\n```\n(.*?)```", README, re.DOTALL)[0]
    (tmp_path / "mine.py").write_text(script)
    for ranks in (1, 2, 3):
        ended = torchrun(ranks, "mine.py", cwd=tmp_path)
        assert ended.code == 0, ended.errors
        assert len(numbers(ended.output)) == 10
        assert numbers(ended.output) == pytest.approx(numbers(printed), abs=2e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "deepspeed"])
def test_the_scripts_of_several_replicas_print_the_same(name: str, tmp_path: Path) -> None:
    if name == "deepspeed":
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")
    (script,) = re.findall(rf"```python\n(# mine_{name}\.py.*?)```", DATA_PARALLEL, re.DOTALL)
    assert script.count("\n") <= 40
    (tmp_path / "mine.py").write_text(script)
    ended = torchrun(4, "mine.py", cwd=tmp_path)
    assert ended.code == 0, ended.errors
    printed = re.findall(r"```\n(step 0.*?)```", README, re.DOTALL)[0]
    assert len(numbers(ended.output)) == 10 and numbers(ended.output) == pytest.approx(numbers(printed), abs=2e-3)
    assert (tmp_path / f"mine-{name}").is_dir()


def test_its_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for program in re.findall(r"-m launch\.([a-z]+)", README):
        assert program in COMMANDS
    for name in re.findall(r'preset\("([^"]+)"\)', README):
        assert name in PRESETS
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
