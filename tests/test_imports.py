"""The arrows between the folders: launch -> tpblock -> parallel, and what the core may import from outside."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "parallel": {"parallel", "torch", "numpy"},
    "tpblock": {"tpblock", "parallel", "torch", "numpy", "safetensors", "pydantic"},
    "launch": {"launch", "tpblock", "parallel", "torch", "numpy", "tyro", "rich", "matplotlib", "tokenizers", "deepspeed"},
}


def imported(source: str) -> Iterator[str]:
    """The top-level packages that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        found = set(imported(file.read_text())) - set(sys.stdlib_module_names)
        assert found <= ALLOWED[folder], f"{file.relative_to(ROOT)} imports {sorted(found - ALLOWED[folder])}"


def test_one_module_alone_needs_deepspeed() -> None:
    files = [path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in files if "deepspeed" in imported(path.read_text())] == ["deepspeed.py"]


def test_imports_are_found_wherever_they_are() -> None:
    assert set(imported("import a.b as c, d\ndef f():\n    from e.f import g\n")) == {"a", "d", "e"}


def test_the_library_does_not_import_launch_or_pull_in_its_packages() -> None:
    code = (
        "import sys, tpblock; print(*{name.split('.')[0] for name in sys.modules} & {'launch', 'tyro', 'rich', 'matplotlib'})"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
