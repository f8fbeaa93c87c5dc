"""DeepSpeed AutoTP on transformers' LlamaForCausalLM, with its vocabulary-parallel head (faster than gathered logits), and without
the bookkeeping of its engine."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed

from benchmarks.peers.common import Case, Contender, UnsupportedError
from benchmarks.peers.transformers_ import Llama, llama

PACKAGES: tuple[str, ...] = ("deepspeed", "transformers")

# Its shared-memory all-reduce, which training never uses, would be compiled when it starts, for minutes.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def build(case: Case, name: str) -> Contender:
    if case.sequence_parallel:
        raise UnsupportedError("AutoTP has no sequence parallelism of the Megatron kind")
    settings = {
        "train_micro_batch_size_per_gpu": case.batch,
        "tensor_parallel": {"autotp_size": int(os.environ["WORLD_SIZE"]), "vocab_parallel_lm_head": True},
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=llama(case), config=settings)
    return Llama(case, engine.module)
