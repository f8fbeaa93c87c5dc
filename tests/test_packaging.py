"""The wheel: what is in it, and its console command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from launch.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGES = ("parallel", "tpblock", "launch")


def test_the_wheel_installs_with_one_command(tmp_path: Path) -> None:
    source, built, site = tmp_path / "a source", tmp_path / "wheel", tmp_path / "site"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", built, source], check=True)
    (wheel,) = built.iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            assert file.relative_to(ROOT).as_posix() in names
    assert {name.split("/")[0].split("-")[0] for name in names} == set(PACKAGES)

    subprocess.run([*pip, "install", *offline, "--target", site, wheel], check=True)
    env = {**os.environ, "PYTHONPATH": str(site)}
    scripts = [path.name for path in (site / "bin").iterdir()]
    assert scripts == ["tpblock"]
    told = subprocess.run(
        [site / "bin" / "tpblock", "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert all(f"\n  {name} " in told.stdout for name in COMMANDS)
    where = [sys.executable, "-c", "import tpblock; print(tpblock.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(site))
