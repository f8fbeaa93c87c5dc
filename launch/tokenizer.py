"""The tokenizer of a checkpoint's folder: its tokenizer.json, read by the package ``tokenizers``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"


def read_tokenizer(folder: Path) -> Tokenizer:
    """A ValueError if the folder has no tokenizer.json, or one that makes no sense."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{folder} has no {TOKENIZER}: give the --ids to continue in place of a text")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(f"cannot read {path}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, with the special tokens that the tokenizer adds. A ValueError if it cannot take the text."""
    try:
        return tokenizer.encode(text).ids
    except Exception as error:  # a tokenizer without a token for what it does not know, or no valid Unicode
        raise ValueError(f"the tokenizer cannot read {text[:40]!r}: {error}") from error


class TextStream:
    """Text of tokens as they come, held back while it ends within a character.

    A token's text may depend on the one before (a space between words, bytes of one character), so what is new is found by
    decoding a few tokens twice: with and without those since the last text.

    Args:
        tokenizer: whose special tokens are left out of the text.
        prompt: the ids before the first token, whose text is not repeated.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, list(prompt)
        self._context, self._told = 0, len(self._ids)

    def add(self, id_: int) -> str:
        """The text that this token completes."""
        self._ids.append(id_)
        text = self._new_text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._told = self._told, len(self._ids)
        return text

    def rest(self) -> str:
        """What was held back, when no more tokens come."""
        return self._new_text()

    def _new_text(self) -> str:
        before, now = (
            self._tokenizer.decode(ids) for ids in (self._ids[self._context : self._told], self._ids[self._context :])
        )
        return now[len(before) :]
