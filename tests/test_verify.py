"""launch.verify: equal models pass, one that is a little off does not, and the numbers say by how much."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import torchrun
from tests.test_pretrained import write_llama

SMALL = ["-m", "launch.verify", "--device", "cpu", "--seq-len", "8", "--steps", "2"]

FAULTY = """
import os, sys, torch
from unittest import mock
from parallel import tree
import launch.verify

def off(leaves, group):
    total = plain(leaves, group)
    if group.rank == 1:
        total.view(-1)[0] = torch.nextafter(total.view(-1)[0], torch.tensor(9e9))  # one element by one unit in the last place
    return total

plain = tree.all_reduce
if os.environ["WORLD_SIZE"] == "2":
    tree.all_reduce = off
launch.verify.main()
"""


def test_invariant_mode_is_equal_by_bytes(tmp_path: Path) -> None:
    ended = torchrun(2, *SMALL, "--virtual-shards", "4", "--dropout", "0.1", "--sequence-parallel", cwd=tmp_path)
    assert ended.code == 0, ended.errors
    assert ended.output.count("same bytes") == 6 and "DIFFER" not in ended.output
    assert re.search(r"collectives of 2 forward and backward passes: .*\d+ all_to_all", " ".join(ended.output.split()))


def test_one_unit_in_the_last_place_is_found(tmp_path: Path) -> None:
    (tmp_path / "off.py").write_text(FAULTY)
    ended = torchrun(2, "off.py", *SMALL[2:], "--virtual-shards", "4", cwd=tmp_path)
    assert ended.code == 1
    assert "DIFFER" in ended.output and "error: 2 ranks differ from the single device" in ended.errors


def test_a_llama_folder_in_the_default_mode(tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    ended = torchrun(2, *SMALL, "--model", "llama", "--dtype", "float64", cwd=tmp_path)
    assert ended.code == 0, ended.errors
    assert "1e-10" in ended.output and "2 ranks equal the single device" in ended.output


def test_gradients_of_nothing_but_rounding_are_no_difference(tmp_path: Path) -> None:
    """A bias of the keys changes no loss: softmax does not see what is added to all scores."""
    (tmp_path / "biased.py").write_text(
        "import launch.verify\nfrom tpblock import ModelConfig, Norm\n"
        "launch.verify.SMALL = ModelConfig(vocab_size=509, dim=256, layers=1, heads=4, d_ff=512, norm=Norm.LAYERNORM, bias=True)\n"
        "launch.verify.main()\n"
    )
    ended = torchrun(2, "biased.py", *SMALL[2:], "--dtype", "bfloat16", cwd=tmp_path)
    assert ended.code == 0, ended.output + ended.errors
    assert "2 ranks equal the single device" in ended.output


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    ended = torchrun(2, *SMALL, "--model", "lama", cwd=tmp_path)
    assert ended.code != 0
    assert "error: unknown preset 'lama'; there are stack-100m, llama-2-7b" in ended.errors
    ended = torchrun(2, *SMALL, "--virtual-shards", "12", cwd=tmp_path)
    assert ended.code != 0 and "9 query heads cannot be dealt over 12" in ended.errors
