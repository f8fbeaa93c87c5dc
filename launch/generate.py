"""Generates text with a pretrained model on tensor-parallel ranks.

    torchrun --nproc-per-node 2 -m launch.generate FOLDER --prompt "Once upon a time"

Text goes to stdout as it comes, tokens per second to stderr.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
import tyro
from tokenizers import Tokenizer

from launch.environment import Environment, Options, launch, make_deterministic, parse
from launch.tokenizer import TextStream, encode, read_tokenizer
from parallel.rng import check_word
from tpblock import Decoder, load_pretrained
from tpblock.formats.checkpoint import Checkpoint
from tpblock.formats.convert import open_checkpoint
from tpblock.formats.files import read_json
from tpblock.generate import check_request, check_sampling, generate


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(Options):
    """Generate text with a pretrained model on tensor-parallel ranks."""

    folder: tyro.conf.Positional[Path]
    """The model: a Hugging Face folder, or one that launch.shard wrote for any number of ranks."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text to continue. Give it several times for several texts, one after another; without it, stdin is the text."""
    ids: tuple[int, ...] = ()
    """Token ids to continue in place of a text, for a folder without tokenizer.json; ids come out."""
    max_new_tokens: int = 128
    """Tokens to generate at most; fewer if the model ends the text."""
    temperature: float = 0.0
    """0 takes the most probable token each time; 1 draws from the model's distribution, less sharpens it, more flattens it."""
    top_k: int | None = None
    """Draw among so many most probable tokens."""
    top_p: float | None = None
    """Draw among the most probable tokens that have this probability together."""
    seed: int = 0
    """What is drawn is a function of it, whatever the number of ranks."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] | None = None
    """Number format of parameters and activations; that of the folder if not given."""
    virtual_shards: int | None = None
    """Invariant mode: cut the model into that many shards, and compute the same bytes on every number of ranks up to it."""


class Request(NamedTuple):
    """What to go on from, and which tokens end it."""

    prompts: list[list[int]]
    stop: list[int]


def read_request(config: GenerateConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> Request:
    """The prompts as token ids. Reads stdin if the options have none.

    Raises:
        ValueError: if there is none, or one cannot be continued.
    """
    prompts = [list(config.ids)]
    if tokenizer is not None:
        prompts = [encode(tokenizer, text) for text in config.prompt or [_stdin()]]
    for prompt in prompts:
        check_request(checkpoint.config, torch.tensor([prompt]), config.max_new_tokens)
    return Request(prompts, stop_ids(checkpoint))


def stop_ids(checkpoint: Checkpoint) -> list[int]:
    """``eos_token_id`` of generation_config.json, or else of config.json: one, several or none."""
    path = checkpoint.path / "generation_config.json"
    for fields in (read_json(path) if path.exists() else {}, checkpoint.hf.config):
        ids = fields.get("eos_token_id")
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            if not all(isinstance(id_, int) and abs(id_) < 1 << 31 for id_ in ids):
                raise ValueError(f"{checkpoint.path}: eos_token_id must be a token id or several, got {ids!r}")
            return ids
    return []


def _stdin() -> str:
    if sys.stdin.isatty():
        raise ValueError("there is nothing to continue: give a --prompt, or a text on stdin")
    return sys.stdin.buffer.read().decode().removesuffix("\n")


def continue_prompt(model: Decoder, config: GenerateConfig, prompt: list[int], stop: list[int]) -> Iterator[int]:
    steps = generate(
        model,
        torch.tensor([prompt]),
        config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=config.seed,
        stop=stop,
    )
    return map(int, steps)


def show(prompt: Sequence[int], tokens: Iterator[int], text: TextStream | None, say: Callable[[str], None]) -> str:
    """Goes through the tokens and says them as they come. Returns how fast they came."""
    times = [time.perf_counter()]
    for id_ in tokens:
        times.append(time.perf_counter())
        say((" " if len(times) > 2 else "") + str(id_) if text is None else text.add(id_))
    say(("" if text is None else text.rest()) + "\n")
    prefill, decode, count = times[1] - times[0], times[-1] - times[1], len(times) - 2
    told = f"prompt: {len(prompt):,} tokens, {len(prompt) / prefill:,.1f} tokens/s"
    return told + (f"; new: {count + 1:,} tokens, {count / decode:,.1f} tokens/s" if count else "; new: 1 token")


def run(config: GenerateConfig, env: Environment) -> None:
    """The program: what every rank runs."""
    with env.together("settings"):
        if env.world > env.group.size:
            raise ValueError(
                f"{env.world} ranks with --tp {env.group.size}: generate runs one replica, start {env.group.size} ranks"
            )
        if config.ids and config.prompt:
            raise ValueError(
                f"--prompt and --ids cannot go together, got {len(config.prompt)} texts and {len(config.ids)} ids"
            )
        check_sampling(config.temperature, config.top_k, config.top_p)
        check_word("seed", config.seed)
        checkpoint = open_checkpoint(config.folder)
        dtype = getattr(torch, config.dtype) if config.dtype else checkpoint.dtype()
        # Rank 0 alone reads stdin and talks, so that it alone needs the tokenizer.
        tokenizer = read_tokenizer(config.folder) if env.is_main and not config.ids else None
        request = json.dumps(read_request(config, checkpoint, tokenizer)) if env.is_main else ""
    prompts, stop = json.loads(env.exchange("prompts", request)[0])
    if config.virtual_shards is not None:
        make_deterministic(env.device)
    with env.together("model"):
        model = load_pretrained(
            config.folder,
            group=env.group,
            dtype=dtype,
            device=env.device,
            reduce_dtype=torch.float32 if dtype.itemsize < 4 else None,
            virtual_shards=config.virtual_shards,
        ).eval()

    def say(text: str) -> None:
        if env.is_main:
            sys.stdout.write(text)
            sys.stdout.flush()

    for prompt in prompts:
        text = None if tokenizer is None else TextStream(tokenizer, prompt)
        speed = show(prompt, continue_prompt(model, config, prompt, stop), text, say)
        if env.is_main:
            print(speed, file=sys.stderr)


def main(arguments: Sequence[str] | None = None, program: str = "-m launch.generate") -> None:
    config = parse(GenerateConfig, arguments, program)
    launch(partial(run, config), config, program)


if __name__ == "__main__":
    main()
