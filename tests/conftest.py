"""Fixtures of the whole test suite. See pool.py for tests on several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool, device_type

# Single-process tests share the cores with the pool's workers.
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    if device_type() == "cuda" and not torch.cuda.is_available():
        pytest.exit("TPBLOCK_TEST_DEVICE=cuda, but torch sees no CUDA device", returncode=pytest.ExitCode.USAGE_ERROR)
    # Nothing in the tests may reach for the network.
    os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``-m gpu`` selects what can run on GPUs: every test on the pool, and those marked ``gpu``, which need one."""
    skip = pytest.mark.skip(reason="needs TPBLOCK_TEST_DEVICE=cuda (make test-gpu)")
    for item in items:
        if item.get_closest_marker("gpu"):
            if device_type() != "cuda":
                item.add_marker(skip)
        elif {"pool", "pools", "wide_pool"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks, started when a test first runs something on them."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device of single-process tests (and of rank 0)."""
    return Pool.device(0)


@pytest.fixture(scope="session")
def wide_pool() -> Iterator[Pool]:
    """Eight ranks, for the few tests that need more than four."""
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pools(pool: Pool) -> Iterator[dict[int, Pool]]:
    """By number of ranks, for what concerns the whole world: DeepSpeed's meshes, FSDP2's checkpoints."""
    pair = Pool(2)
    yield {2: pair, 4: pool}
    pair.close()
