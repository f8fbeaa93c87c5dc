"""The README's script runs as it stands there, and the names it gives exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launch.cli import COMMANDS
from tests.programs import ROOT, torchrun
from tpblock import PRESETS

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
