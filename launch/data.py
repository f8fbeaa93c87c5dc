"""Text that every machine has: the source files of Python's standard library, as bytes (256 token ids) or tokens."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from tokenizers import Tokenizer
from torch import Tensor

VOCABULARY = 256
HELD_OUT = 20
"""Of so many files one is held out for validation."""

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Files joined by zero bytes, as arrays of bytes: those to train on, and those held out.

    With a tokenizer, sequences still begin at a byte, and only what they hold is cut into tokens: nothing has to be done before
    the first step, and a batch does not depend on how many there are to be.
    """

    train: np.ndarray[tuple[int], np.dtype[np.uint8]]
    validation: np.ndarray[tuple[int], np.dtype[np.uint8]]
    tokenizer: Tokenizer | None = None

    @classmethod
    def standard_library(cls, folder: Path | None = None, tokenizer: Tokenizer | None = None) -> Corpus:
        """Reads every .py file below ``folder`` (Python's own by default) in the order of their names, without the tests.

        Raises:
            ValueError: if there are too few files to hold one out.
        """
        root = folder or Path(sysconfig.get_path("stdlib"))
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
        names = [name for name in names if not _LEFT_OUT.intersection(name.split("/"))]
        if len(names) < HELD_OUT:
            raise ValueError(f"{root} holds {len(names)} Python source files to train on, {HELD_OUT} are needed")
        texts = [(root / name).read_bytes() for name in names]

        def join(chosen: list[bytes]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
            return np.frombuffer(b"\0".join(chosen), dtype=np.uint8)

        held_out = [i % HELD_OUT == HELD_OUT // 2 for i in range(len(texts))]
        return cls(
            join([text for text, out in zip(texts, held_out, strict=True) if not out]),
            join([text for text, out in zip(texts, held_out, strict=True) if out]),
            tokenizer,
        )

    @property
    def unit(self) -> str:
        """What a token id stands for."""
        return "byte" if self.tokenizer is None else "token"

    def fingerprint(self) -> dict[str, str]:
        """What ranks compare to be sure that they read the same text."""
        digest = hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()[:16]
        tokenizer = "none" if self.tokenizer is None else hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()[:16]
        return {"bytes": f"{self.train.size:,} + {self.validation.size:,}", "sha256": digest, "tokenizer": tokenizer}

    def batch(
        self, seq_len: int, batch: int, *, seed: int, step: int, dp_rank: int = 0, dp_size: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Token ids and labels [batch / dp_size, seq_len] of a data-parallel replica: its rows of the step's global batch.

        A function of its arguments alone, so that the ranks of a tensor-parallel group get the same without asking each other.
        """
        if batch % dp_size:
            raise ValueError(f"a batch of {batch} sequences cannot be dealt evenly over {dp_size} data-parallel replicas")
        draw = np.random.Generator(np.random.Philox(key=[seed, step]))
        starts = draw.integers(0, self.train.size - seq_len, size=batch)
        rows = batch // dp_size
        return self._windows(self.train, starts[dp_rank * rows : (dp_rank + 1) * rows], seq_len)

    def validation_batches(self, seq_len: int, batch: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """``count`` fixed batches, spread evenly over the held-out text."""
        starts = np.linspace(0, self.validation.size - seq_len - 1, num=batch * count).astype(np.int64)
        return [self._windows(self.validation, part, seq_len) for part in starts.reshape(count, batch)]

    def check(self, seq_len: int, vocab_size: int = VOCABULARY) -> None:
        """A ValueError if the sequences are longer than the text, or the model does not know its tokens."""
        shortest = min(self.train.size, self.validation.size)
        if seq_len >= shortest:
            raise ValueError(f"sequences of {seq_len} bytes do not fit into a text of {shortest:,}")
        tokens = VOCABULARY if self.tokenizer is None else 1 + max(self.tokenizer.get_vocab().values())
        if tokens > vocab_size:
            raise ValueError(f"a text of {tokens} different {self.unit}s is more than the model's vocabulary of {vocab_size}")

    def _windows(
        self, text: np.ndarray[tuple[int], np.dtype[np.uint8]], starts: np.ndarray[tuple[int], np.dtype[np.int64]], length: int
    ) -> tuple[Tensor, Tensor]:
        """[len(starts), length] token ids, and as labels the one after each."""
        if self.tokenizer is None:
            windows: Sequence[ArrayLike] = [text[start : start + length + 1] for start in starts]
        else:
            windows = [_tokens(self.tokenizer, text, int(start), length + 1) for start in starts]
        rows = torch.from_numpy(np.stack(windows).astype(np.int64))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _tokens(tokenizer: Tokenizer, text: np.ndarray[tuple[int], np.dtype[np.uint8]], start: int, count: int) -> list[int]:
    """The first ``count`` tokens of the text from byte ``start`` on; after the end it begins again."""
    size = 4 * count
    while True:
        window = text.take(np.arange(start, start + size), mode="wrap").tobytes().decode(errors="ignore")
        ids = tokenizer.encode(window, add_special_tokens=False).ids
        if len(ids) > count:  # the last one may go on beyond the window
            return ids[:count]
        if size > 2 * text.size:
            raise ValueError(f"the tokenizer makes {len(ids)} tokens of all the text, {count + 1} are needed")
        size *= 2
