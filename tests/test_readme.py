"""The README's script runs as it stands there, and the names it gives exist."""

from __future__ import annotations

import re
from pathlib import Path

from launch.cli import COMMANDS
from tests.programs import ROOT, torchrun
from tpblock import PRESETS

README = (ROOT / "README.md").read_text()


def test_the_script_trains_on_two_ranks(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(# mine\.py.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(script)
    ended = torchrun(2, "mine.py", cwd=tmp_path)
    assert ended.code == 0, ended.errors
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+),", ended.output)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


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
