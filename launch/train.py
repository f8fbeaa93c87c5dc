"""Trains a model with tensor parallelism, and compares the run with the same steps on a single device.

    torchrun --nproc-per-node 2 -m launch.train --steps 100
    torchrun --nproc-per-node 4 -m launch.train --tp 2 --engine deepspeed --zero-stage 2
    torchrun --nproc-per-node 2 -m launch.train --init FOLDER --steps 100

The model is a small Llama-shaped one, or with --init a pretrained one. Each run has a folder of its own: config.toml,
metrics.jsonl (one line a logged step), loss.png, checkpoints/step-N, and with --init the trained model as a Hugging Face folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from launch.environment import Environment, UserError, launch, make_deterministic, parse
from launch.report import Reporter, compare
from launch.train_config import TrainConfig, from_file
from launch.trainer import Trainer
from parallel.state import gather_state
from tpblock import save_pretrained


def train(config: TrainConfig, env: Environment) -> None:
    """The program: what every rank runs."""
    if config.virtual_shards is not None:
        make_deterministic(env.device)
    with env.together("settings"):
        config = replace(config, tp=env.group.size).completed()
        config.check(env)
        corpus = config.corpus()
    env.agree("training text", corpus.fingerprint())
    with env.together("model"):
        trainer = Trainer(config, env.group, env.mesh, env.device, corpus)
    if config.resume:
        with env.together("checkpoint"):
            trainer.resume(config.resume)
    folder = _run_folder(config, env)
    tokens = config.batch * config.seq_len
    with Reporter(folder, config.steps, tokens, enabled=env.is_main, device=env.device, unit=corpus.unit) as reporter:
        reporter.start(asdict(config), trainer.model.config.parameters(), env.group.size, trainer.replicas)
        run(trainer, folder, reporter, env)
        if config.init is not None:
            with env.together("trained model"):
                save_pretrained(trainer.model, folder / "model", tensors=trainer.engine.global_tensors(), ranks=env.everyone)
        weights: dict[str, Tensor] = {}
        for name, tensor in trainer.engine.global_tensors() if config.compare else ():
            if env.is_main:
                weights[name] = tensor.clone()
        env.close()  # the comparison is the business of rank 0 alone, nobody waits for it
        if not env.is_main:
            return
        if config.compare:
            single = Trainer.single(config, env.device, corpus, trainer.replicas)
            if config.resume:
                single.resume(config.resume)
            for step in reporter.steps("one device", single.first_step):
                single.step(step)
            single_weights = gather_state(single.model, single.group)
            comparison = compare(trainer.trace, weights, single.trace, single_weights, config.allowed(), trainer.first_step)
            reporter.comparison(comparison, env.world)
        reporter.finish(*([] if config.init is None else ["model"]))
    if config.compare and not comparison.equal:
        hint = ". If only later steps do, training may have amplified rounding (a lower --lr, or --dtype float64, would tell)"
        raise UserError(
            f"the run on {env.world} ranks differs from the single device by more than allowed"
            + (hint if config.virtual_shards is None else ""),
            code=1,
        )


def run(trainer: Trainer, folder: Path, reporter: Reporter, env: Environment) -> None:
    """Trains to the last step, with all that happens on the way."""
    config = trainer.config
    reporter.validation(trainer.first_step, trainer.validate())
    for step in reporter.steps("training", trainer.first_step):
        loss, norm = trainer.step(step)
        done = step + 1
        if done % config.log_every == 0 or done == config.steps:
            if not math.isfinite(loss):  # replicated, so that all ranks see it
                raise UserError(f"the loss is {float(loss)} at step {done}: try a lower --lr than {config.lr:g}")
            reporter.step(done, loss, norm, config.learning_rate(step))
        if done % config.validate_every == 0 or done == config.steps:
            with reporter.paused():
                reporter.validation(done, trainer.validate())
        if done % config.checkpoint_every == 0 or done == config.steps:
            with reporter.paused(), env.together("checkpoint"):
                trainer.save(folder, done)


def _run_folder(config: TrainConfig, env: Environment) -> Path:
    """The run's folder, made by rank 0 and seen by all, for each may write its part of a checkpoint."""
    name = ""
    with env.together("folder"):
        if env.is_main:
            number = 1
            while config.out is None and Path("runs", str(number)).exists():
                number += 1
            folder = config.out or Path("runs", str(number))
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"--out {folder} is there already and not empty: a run needs a folder of its own")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"cannot make the folder {folder}: {error.strerror}") from error
            (folder / "config.toml").write_text(config.toml())
            name = str(folder)
    folder = Path(env.exchange("folder", name)[0])
    with env.together("folder"):
        if not (folder / "config.toml").exists():
            raise ValueError(f"rank 0 has made the folder {folder}, which is not on this host: all hosts must share it")
    return folder


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.train") -> None:
    config = parse(TrainConfig, arguments, program, from_file)
    launch(partial(train, config), config, program)


if __name__ == "__main__":
    main()
