"""The programs as their users start them: what a run leaves behind, and how it ends when something is wrong.

Every failure must end all processes in a bounded time, with an exit code other than zero and a message that names the rank.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import environment
from launch.environment import Environment, UserError, parse
from launch.train import TrainConfig, train
from launch.train_config import from_file
from parallel.checkpoint import load_checkpoint
from parallel.group import single_device
from tests.programs import ROOT, Ended, python, torchrun
from tests.tiny_llama import write_folder
from tpblock import Decoder
from tpblock.formats.checkpoint import read_config

TINY = shlex.split("--dim 32 --layers 1 --heads 2 --kv-heads 1 --batch 2 --seq-len 16 --validation-batches 1 --device cpu")

FAULTY = """
import os, signal, sys, time
from pathlib import Path
import launch.train

rank = os.environ["RANK"]
Path(f"pid{rank}").write_text(str(os.getpid()))
plain = launch.train.Trainer.step

def step(self, number):
    if rank == "1" and number == 5:
        FAULT
    return plain(self, number)

def fail(*_):
    raise ValueError("planted in forward")

launch.train.Trainer.step = step
launch.train.main()
"""


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run; fails if one is no JSON."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(folder) if "loss" in line}


def weights(checkpoint: Path, config: TrainConfig) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, loaded on a single device, with its optimizer."""
    model = Decoder(config.model(), group=single_device(), seed=None)
    extra = load_checkpoint(checkpoint, model, single_device(), torch.optim.AdamW(model.parameters()))
    assert checkpoint.name == f"step-{extra['steps']}"
    return model.state_dict()


def faulty(fault: str, cwd: Path, timeout: int = 60) -> Ended:
    """A run of two ranks that goes wrong on rank 1 at its sixth step."""
    (cwd / "faulty.py").write_text(FAULTY.replace("FAULT", fault))
    options = ["--steps", "1000", "--checkpoint-every", "2", "--timeout", str(timeout), "--out", "run"]
    ended = torchrun(2, "faulty.py", *TINY, *options, cwd=cwd)
    assert (cwd / "run").exists(), ended.errors
    assert ended.code != 0
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((cwd / f"pid{rank}").read_text()), 0)
    # Metrics and the last checkpoint are whole.
    assert list(losses(cwd / "run")) == [1, 2, 3, 4, 5]
    config = TrainConfig(dim=32, layers=1, heads=2, kv_heads=1, seq_len=16)
    assert sorted(path.name for path in (cwd / "run" / "checkpoints").iterdir()) == ["step-2", "step-4"]
    assert all(weight.isfinite().all() for weight in weights(cwd / "run" / "checkpoints" / "step-4", config).values())
    return ended


def test_c86_a_rank_that_raises_takes_the_others_down(tmp_path: Path) -> None:
    ended = faulty("self.model.stack.register_forward_pre_hook(fail)", tmp_path)
    assert "\nrank 1: ValueError: planted in forward\n" in ended.errors
    assert "Traceback" in ended.errors.split("rank 1: ValueError")[0]
    root_cause = ended.errors.split("Root Cause")[1]
    assert "rank      : 1" in root_cause and "planted in forward" in root_cause
    assert ended.seconds < 90


def test_a_killed_rank_takes_the_others_down(tmp_path: Path) -> None:
    ended = faulty("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    root_cause = ended.errors.split("Root Cause")[1]
    assert "rank      : 1" in root_cause and "SIGKILL" in root_cause
    assert ended.seconds < 90


def test_a_rank_that_hangs_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    ended = faulty("time.sleep(600)", tmp_path, timeout=8)
    assert re.search(
        r"^rank 0: lost touch with another rank: waited 8 s for rank 1 in all_\w+, which did not come",
        ended.errors,
        re.MULTILINE,
    )
    assert ended.seconds < 90


def test_a_rank_that_never_arrives_is_named(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    time.sleep(600)\nimport launch.train\nlaunch.train.main()\n"
    )
    ended = torchrun(2, "late.py", *TINY, "--timeout", "4", cwd=tmp_path)
    assert ended.code != 0
    assert "rank 0: lost touch with another rank: gave up after 4 s waiting for rank 1 to tell its settings" in ended.errors


def test_ranks_with_other_settings_are_named(tmp_path: Path) -> None:
    (tmp_path / "differ.py").write_text(
        "import os, sys\nif os.environ['RANK'] == '1':\n    sys.argv += ['--lr', '0.5', '--layers', '2']\n"
        "import launch.train\nlaunch.train.main()\n"
    )
    ended = torchrun(2, "differ.py", *TINY, "--out", "run", cwd=tmp_path)
    assert ended.code != 0
    message = (
        "error: the ranks differ in their settings. rank 1: layers is 2, on rank 0 it is 1; lr is 0.5, on rank 0 it is 0.001"
    )
    assert ended.errors.splitlines()[0] == message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "--tp 3 does not divide the 2 ranks that were started"),
        (["--timeout", "nan"], "--timeout must be positive and at most 1e+06 s, got nan"),
        (
            ["--tp", "1", "--batch", "6", "--accumulation", "2"],
            "--batch 6 does not divide into 2 micro-batches on each of 2 data-parallel replicas (2 ranks, --tp 1)",
        ),
        (["--heads", "1", "--kv-heads", "1"], "1 query heads cannot be dealt over 2 tensor-parallel shards"),
    ],
)
def test_wrong_sizes_are_one_line_from_one_rank(options: list[str], message: str, tmp_path: Path) -> None:
    ended = torchrun(2, "-m", "launch.train", *TINY, *options, cwd=tmp_path)
    assert ended.code != 0
    assert ended.output == ""
    assert ended.errors.splitlines()[0].startswith(f"error: {message}")
    assert ended.errors.count("error: ") == 1
    assert "launch/train.py" not in ended.errors.replace("-m launch.train", "")  # no traceback of ours
    assert not (tmp_path / "runs").exists()


def test_without_torchrun_the_command_is_told(tmp_path: Path) -> None:
    ended = python("-m", "launch.train", "--steps", "3", "--out", "a b", cwd=tmp_path)
    assert (ended.code, ended.output) == (2, "")
    command = "torchrun --nproc-per-node 2 -m launch.train --steps 3 --out 'a b'"
    assert ended.errors == f"error: not started by torchrun. Start it as: {command} (or on a single device: --tp 1)\n"
    ended = python("-m", "launch.cli", "train", "--tp", "4", cwd=tmp_path)
    assert "torchrun --nproc-per-node 4 --no-python tpblock train --tp 4 (or" in ended.errors


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert environment.choose_device("auto", 1, 2) == torch.device("cuda", 1)
    assert environment.choose_device("auto", 1, 3) == torch.device("cpu")
    assert environment.choose_device("cpu", 1, 2) == torch.device("cpu")
    with pytest.raises(ValueError, match="a GPU for each of the 3 ranks of this host, it has 2"):
        environment.choose_device("cuda", 1, 3)


def test_c12_two_ranks_equal_one_device_and_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    options = [*TINY, "--steps", "4", "--checkpoint-every", "2", "--validate-every", "2", "--dropout", "0.3"]
    first = torchrun(2, "-m", "launch.train", *options, cwd=tmp_path)
    assert first.code == 0, first.errors
    assert "2 ranks against a single device" in first.output and "loss, steps 1-4 " in first.output
    assert first.output.count(" equal\n") == 5 and "DIFFERS" not in first.output
    run = tmp_path / "runs" / "1"
    lines = metrics(run)
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 2, 4]
    assert [line["step"] for line in lines if "grad_norm" in line] == [1, 2, 3, 4]
    assert all(d["equal"] and d["relative"] < 1e-4 for d in lines[-1]["comparison"])
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert tomllib.loads((run / "config.toml").read_text())["dropout"] == 0.3

    resumed = torchrun(2, "-m", "launch.train", *options, "--resume", "runs/1/checkpoints/step-2", cwd=tmp_path)
    assert resumed.code == 0, resumed.errors
    assert "loss, steps 3-4 " in resumed.output and "DIFFERS" not in resumed.output
    uninterrupted = losses(run)
    assert losses(tmp_path / "runs" / "2") == {step: uninterrupted[step] for step in (3, 4)}
    config = TrainConfig(dim=32, layers=1, heads=2, kv_heads=1, seq_len=16)
    once, twice = (weights(tmp_path / "runs" / number / "checkpoints" / "step-4", config) for number in "12")
    assert all(torch.equal(once[name], twice[name]) for name in once)

    other = torchrun(2, "-m", "launch.train", *options, "--seed", "1", "--resume", "runs/1/checkpoints/step-2", cwd=tmp_path)
    assert other.code != 0 and "was saved by a run with seed 0, this one has seed 1" in other.errors


def test_an_invariant_run_resumes_on_another_number_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    """Shards of odd sizes: local tensors end, for the optimizer's vectorised code, at other elements than the whole ones."""
    sizes = "--dim 30 --layers 2 --heads 3 --kv-heads 3 --d-ff 53 --batch 4 --seq-len 33 --validation-batches 1 --device cpu"
    options = shlex.split(f"{sizes} --virtual-shards 3 --steps 16 --warmup 2 --lr 3e-3 --checkpoint-every 8")
    for ranks, more in ((2, []), (3, ["--resume", "runs/1/checkpoints/step-8"])):
        ended = torchrun(ranks, "-m", "launch.train", *options, *more, cwd=tmp_path)
        assert ended.code == 0, ended.errors
        assert {d["relative"] for d in metrics(tmp_path / "runs" / str(1 + bool(more)))[-1]["comparison"]} == {0.0}
    uninterrupted = losses(tmp_path / "runs" / "1")
    assert losses(tmp_path / "runs" / "2") == {step: uninterrupted[step] for step in range(9, 17)}
    config = TrainConfig(dim=30, layers=2, heads=3, kv_heads=3, d_ff=53, seq_len=33)
    once, twice = (weights(tmp_path / "runs" / number / "checkpoints" / "step-16", config) for number in "12")
    assert all(torch.equal(once[name], twice[name]) for name in once)

    (tmp_path / "threads.py").write_text("import torch\ntorch.set_num_threads(2)\nimport launch.train\nlaunch.train.main()\n")
    other = python("threads.py", *options, "--tp", "1", "--resume", "runs/1/checkpoints/step-8", cwd=tmp_path)
    assert other.code == 2 and "saved by ranks of 1 threads, these have 2" in other.errors


def test_a_single_device_needs_no_torchrun_and_a_run_needs_a_folder(tmp_path: Path) -> None:
    options = [*TINY, "--tp", "1", "--steps", "2", "--out", "run", "--log-every", "2", "--sequence-parallel"]
    ended = python("-m", "launch.cli", "train", *options, cwd=tmp_path)
    assert ended.code == 0, ended.errors
    assert list(losses(tmp_path / "run")) == [2]
    assert {d["relative"] for d in metrics(tmp_path / "run")[-1]["comparison"]} == {0.0}
    again = python("-m", "launch.train", *options, cwd=tmp_path)
    assert again.code == 2
    assert again.errors == "error: --out run is there already and not empty: a run needs a folder of its own\n"


def test_a_pretrained_model_is_trained_on_compared_resumed_and_written(tmp_path: Path) -> None:
    """With a tokenizer, whose vocabulary of 300 makes the loss start near that of a random model."""
    from transformers import LlamaForCausalLM

    write_folder(tmp_path / "model")
    options = shlex.split(
        "--init model --batch 2 --seq-len 16 --steps 4 --checkpoint-every 2 --validation-batches 1 --dropout 0.1 --device cpu"
    )
    first = torchrun(2, "-m", "launch.train", *options, cwd=tmp_path)
    assert first.code == 0, first.errors
    assert "parameters in float32 on 2 tensor-parallel ranks" in first.output  # the folder's dtype
    assert "from model, the text as tokens of its tokenizer.json\n" in first.output
    assert first.output.count(" equal\n") == 5 and first.output.endswith("checkpoints/step-4, model\n")
    config = tomllib.loads((tmp_path / "runs" / "1" / "config.toml").read_text())
    assert (config["init"], config["dtype"], config["tp"]) == ("model", "float32", 2) and "dim" not in config

    trained = LlamaForCausalLM.from_pretrained(tmp_path / "runs" / "1" / "model")
    ours = weights(tmp_path / "runs" / "1" / "checkpoints" / "step-4", TrainConfig(init=tmp_path / "model"))
    assert torch.equal(trained.lm_head.weight, ours["head.weight"])
    assert not torch.equal(trained.lm_head.weight, LlamaForCausalLM.from_pretrained(tmp_path / "model").lm_head.weight)
    assert (tmp_path / "runs" / "1" / "model" / "tokenizer.json").is_file()

    resume = ["--resume", "runs/1/checkpoints/step-2", "--no-compare"]
    resumed = torchrun(2, "-m", "launch.train", *options, *resume, cwd=tmp_path)
    assert resumed.code == 0, resumed.errors
    uninterrupted = losses(tmp_path / "runs" / "1")
    assert losses(tmp_path / "runs" / "2") == {step: uninterrupted[step] for step in (3, 4)}
    names = [path.name for path in (tmp_path / "runs" / "1" / "model").iterdir()]
    for name in names:
        once, twice = ((tmp_path / "runs" / run / "model" / name).read_bytes() for run in "12")
        assert once == twice, name


def here(**options: Any) -> None:
    config = TrainConfig(tp=1, **options)
    train(config, Environment(config, torchrun=False))


def test_without_a_tokenizer_bytes_are_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model", tokenizer=False, vocab_size=256)
    here(init=Path("model"), batch=2, seq_len=16, steps=2, validation_batches=1, dtype="float64", out=Path("run"))
    told = capsys.readouterr().out
    assert "from model, the text as bytes, for it has no tokenizer.json" in told
    assert {d["relative"] for d in metrics(tmp_path / "run")[-1]["comparison"]} == {0.0}
    assert read_config(tmp_path / "run" / "model")[0] == read_config(tmp_path / "model")[0]


def test_what_cannot_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "model").half().save_pretrained(tmp_path / "half")
    write_folder(tmp_path / "small", tokenizer=False, vocab_size=255)
    write_folder(tmp_path / "fewer", vocab_size=299)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"init": "model", "dim": 36, "d_ff": 50}, "--dim 36, --d-ff 50 cannot go with --init: the sizes are those of model"),
        ({"init": "model", "seq_len": 65}, "--seq-len 65 is longer than the max_seq_len 64 of model"),
        ({"init": "small"}, "a text of 256 different bytes is more than the model's vocabulary of 255"),
        ({"init": "fewer"}, "a text of 300 different tokens is more than the model's vocabulary of 299"),
        ({"init": "half"}, "half holds float16, which is not trained in: give --dtype, one of float64, float32, bfloat16"),
        ({"init": "nowhere"}, "nowhere is not a folder"),
    ]
    for options, message in faults:
        with pytest.raises(UserError, match=message):
            here(**{"seq_len": 16, **options, "init": Path(options["init"])})
    assert not (tmp_path / "runs").exists()


# --- several replicas


def train_replicas(cwd: Path, *options: str, ranks: int = 4) -> Ended:
    """A model of the folder ``cwd / "model"`` on pairs of ranks, with what a file says."""
    if not (cwd / "model").exists():
        write_folder(cwd / "model", tokenizer=False, vocab_size=256)
        (cwd / "settings.toml").write_text(
            'tp = 2\ndevice = "cpu"\ninit = "model"\nbatch = 8\naccumulation = 2\nseq-len = 9\nsteps = 40\ndropout = 0.1\n'
            "checkpoint_every = 2\nvalidation_batches = 1\n"
        )
    return torchrun(ranks, "-m", "launch.train", "--config", "settings.toml", "--steps", "4", *options, cwd=cwd)


def test_distributed_data_parallel_in_invariant_mode_has_the_bits_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = train_replicas(tmp_path, "--virtual-shards", "3", "--sequence-parallel")
    assert ended.code == 0, ended.errors
    assert "in float32 on 2 replicas (ddp) of 2 tensor-parallel ranks (cpu)" in " ".join(ended.output.split())
    assert {d["relative"] for d in metrics(tmp_path / "runs" / "1")[-1]["comparison"]} == {0.0}
    saved = tomllib.loads((tmp_path / "runs" / "1" / "config.toml").read_text())
    assert (saved["steps"], saved["batch"], saved["sequence_parallel"]) == (4, 8, True)

    monkeypatch.chdir(tmp_path)
    resumed = {"init": Path("model"), "batch": 8, "seq_len": 9, "steps": 4, "dropout": 0.1, "virtual_shards": 3}
    resumed["resume"] = Path("runs/1/checkpoints/step-2")
    told = r"of 4 micro-batches a step, this one has 2, .* \(2 x 1\) must be 4"
    with pytest.raises(UserError, match=told):
        here(**resumed, accumulation=2)
    here(**resumed, accumulation=4, validation_batches=1, compare=False, out=Path("resumed"))
    assert losses(tmp_path / "resumed") == {step: losses(tmp_path / "runs" / "1")[step] for step in (3, 4)}


def test_fsdp2_equals_one_device_and_one_device_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = train_replicas(tmp_path, "--engine", "fsdp2")
    assert ended.code == 0, ended.errors
    assert ended.output.count(" equal\n") == 5
    ours = weights(tmp_path / "runs" / "1" / "checkpoints" / "step-4", TrainConfig(init=tmp_path / "model"))
    check_written(tmp_path / "runs" / "1", ours["head.weight"])

    monkeypatch.chdir(tmp_path)
    config = parse(TrainConfig, ["--config", "runs/1/config.toml", "--engine", "ddp", "--tp", "1"], "train", from_file)
    assert (config.engine, config.tp, config.accumulation, config.out) == ("ddp", 1, 2, None)
    alone = replace(config, resume=Path("runs/1/checkpoints/step-2"), out=Path("resumed"), compare=False)
    train(alone, Environment(alone, torchrun=False))
    for step, loss in losses(tmp_path / "resumed").items():
        assert loss == pytest.approx(losses(tmp_path / "runs" / "1")[step], rel=1e-5)


def check_written(run: Path, head: torch.Tensor | None) -> None:
    from transformers import LlamaForCausalLM

    trained = LlamaForCausalLM.from_pretrained(run / "model").lm_head.weight
    assert head is None or torch.equal(trained, head)
    assert not torch.equal(trained, LlamaForCausalLM.from_pretrained(run.parents[1] / "model").lm_head.weight)


def test_deepspeed_equals_one_device_and_goes_on_at_the_same_sizes(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (make install says why)")
    options = ["--engine", "deepspeed", "--zero-stage", "3"]
    ended = train_replicas(tmp_path, *options)
    assert ended.code == 0, ended.errors
    assert "(deepspeed at ZeRO stage 3)" in " ".join(ended.output.split()) and ended.output.count(" equal\n") == 5
    check_written(tmp_path / "runs" / "1", None)

    resumed = train_replicas(tmp_path, *options, "--resume", "runs/1/checkpoints/step-2", "--no-compare")
    assert resumed.code == 0, resumed.errors
    assert losses(tmp_path / "runs" / "2") == {step: losses(tmp_path / "runs" / "1")[step] for step in (3, 4)}
    once, twice = ((tmp_path / "runs" / run / "model" / "model.safetensors.index.json").read_bytes() for run in "12")
    assert once == twice

    elsewhere = train_replicas(tmp_path, *options, "--resume", "runs/1/checkpoints/step-2", "--no-compare", ranks=2)
    line = elsewhere.errors.splitlines()[0]
    assert elsewhere.code != 0 and "was saved with data-parallel replicas 2, now 1" in line and line.startswith("error: ")
    other = python(
        *shlex.split("-m launch.train --config settings.toml --tp 1 --resume runs/1/checkpoints/step-2"), cwd=tmp_path
    )
    assert other.errors == ("error: runs/1/checkpoints/step-2 was saved by DeepSpeed: go on from it with --engine deepspeed\n")


def two_nodes(*folders: Path) -> list[Ended]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    agent = shlex.split(
        f"-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:{port} "
        "--local-addr localhost --rdzv-id test -m launch.train --steps 3 --out run"
    )
    with ThreadPoolExecutor() as agents:
        return list(agents.map(lambda folder: python(*agent, *TINY, cwd=folder), folders))


def test_two_nodes_with_a_rank_each(tmp_path: Path) -> None:
    ended = two_nodes(tmp_path, tmp_path)
    assert [each.code for each in ended] == [0, 0], "".join(each.errors for each in ended)
    told = [each.output for each in ended if each.output]
    assert len(told) == 1 and "on 2 tensor-parallel ranks (cpu)" in told[0] and "DIFFERS" not in told[0]


def test_nodes_that_do_not_share_the_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name / "run").mkdir(parents=True)
    ended = two_nodes(tmp_path / "a", tmp_path / "b")
    assert all(each.code != 0 for each in ended)
    assert "rank 0 has made the folder run, which is not on this host" in "".join(each.errors for each in ended)


def test_a_replica_that_cannot_save_stops_all(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(
        "import errno, launch.engines, launch.train\n"
        "def full(*_):\n    raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "launch.engines.save_checkpoint = full\nlaunch.train.main()\n"
    )
    ended = torchrun(2, "full.py", *TINY, "--tp", "1", "--steps", "9", "--checkpoint-every", "2", "--out", "run", cwd=tmp_path)
    assert ended.code != 0 and list(losses(tmp_path / "run")) == [1, 2]
    assert ended.errors.splitlines()[0] == "error: rank 0: [Errno 28] No space left on device"
    assert "launch/" not in ended.errors  # no traceback of ours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("baths = 3", "there is no option baths; there are accumulation, batch, "),
        ("batch = 'many'", "batch must be int, got 'many'"),
        ("batch = 2.5", "batch must be int, got 2.5"),
        ("batch = true", "batch must be int, got True"),
        ("sequence-parallel = 1", "sequence-parallel must be bool, got 1"),
        ("zero_stage = 4", "zero_stage must be one of 0, 1, 2, 3, got 4"),
        ("engine = 'fsdp'", "engine must be one of 'ddp', 'fsdp2', 'deepspeed', got 'fsdp'"),
        ("out = 3", "out must be str, got 3"),
        ("batch = ", "Invalid value"),
    ],
)
def test_files_of_settings_that_are_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    (tmp_path / "settings.toml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        parse(TrainConfig, ["--config", str(tmp_path / "settings.toml")], "train", from_file)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1 and message in told


def test_files_of_settings_are_overridden_and_come_back(tmp_path: Path) -> None:
    settings = 'lr = 1\nclip = inf\nwarmup = 7\nsequence-parallel = true\nout = "späte \U0001f600 \\" runs"\nzero_stage = 2'
    (tmp_path / "settings.toml").write_text(settings)
    arguments = [f"--config={tmp_path / 'settings.toml'}", "--warmup", "5", "--no-sequence-parallel"]
    config = parse(TrainConfig, arguments, "train", from_file)
    assert (config.lr, config.clip, config.warmup, config.sequence_parallel) == (1, float("inf"), 5, False)
    assert (config.out, config.zero_stage, config.batch) == (Path('späte \U0001f600 " runs'), 2, TrainConfig.batch)
    (tmp_path / "saved.toml").write_text(config.toml())
    again = from_file(["--config", str(tmp_path / "saved.toml")])
    assert again == replace(config, config=None, out=None)
    missing = str(tmp_path / "missing.toml")
    with pytest.raises(UserError, match="cannot read .*missing.toml"):
        from_file(["--config", missing])


def test_a_run_that_differs_from_the_single_device_fails(tmp_path: Path) -> None:
    (tmp_path / "differ.py").write_text(
        "import launch.train\nplain, made = launch.train.Trainer.__post_init__, []\n"
        "def init(self):\n    plain(self)\n    made.append(self)\n"
        "    if len(made) == 2:\n        next(self.model.parameters()).data.mul_(1.01)\n"
        "launch.train.Trainer.__post_init__ = init\nlaunch.train.main()\n"
    )
    ended = python("differ.py", *TINY, "--tp", "1", "--steps", "2", "--out", "run", cwd=tmp_path)
    assert ended.code == 1
    assert ended.output.count("DIFFERS") == 3
    assert ended.errors.startswith("error: the run on 1 ranks differs from the single device")
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir() and (tmp_path / "run" / "loss.png").is_file()


def test_help() -> None:
    listed = python("-m", "launch.cli", "--help", cwd=ROOT)
    assert listed.code == 0 and re.search(r"^  train +train a small model", listed.output, re.MULTILINE)
    unknown = python("-m", "launch.cli", "trian", cwd=ROOT)
    assert unknown.code != 0 and "unknown command 'trian'" in unknown.errors
    options = python("-m", "launch.cli", "train", "--help", cwd=ROOT)
    assert options.code == 0
    for text in ("usage: tpblock train", "--seq-len INT", "Bytes a sequence, or tokens", "--timeout FLOAT", "--tp {None}|INT"):
        assert text in options.output
