"""Errors on every rank or on none: what one rank finds wrong, all raise, so that none waits for another in vain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from parallel.group import TPGroup


def exchange(text: str, group: TPGroup) -> list[str]:
    """Every rank's text, in rank order."""
    if group.size == 1:
        return [text]
    texts: list[str] = [""] * group.size
    dist.all_gather_object(texts, text, group=group.connected)
    return texts


@contextmanager
def together(group: TPGroup, kind: type[Exception]) -> Iterator[None]:
    """Makes an error that some ranks raise in the block one that all ranks raise.

    It is of ``kind`` and names the ranks that failed; a rank whose own error is of another kind raises that one as it is.
    All ranks of the group must enter the block, and leave it in the same order of collectives.
    """
    problem: Exception | None = None
    text = ""
    try:
        yield
    except Exception as error:  # whatever it is, the others are not to wait for this rank
        problem, text = error, str(error) or type(error).__name__
        if not isinstance(error, kind):
            text = f"{type(error).__name__}: {text}"
    problems = exchange(text, group)
    failed = {rank: each for rank, each in enumerate(problems) if each}
    if not failed:
        return
    if problem is not None and (not isinstance(problem, kind) or len(set(problems)) == 1):
        raise problem
    raise kind("; ".join(f"rank {rank}: {each}" for rank, each in failed.items())) from problem
