"""How families of Hugging Face models store their configs and weights: one small table a family (docs/families.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tpblock.config import ModelConfig
from tpblock.families import gpt2, gpt_neox, llama, mistral, phi3, qwen2, qwen3
from tpblock.families.fields import check_unquantised
from tpblock.formats.files import CheckpointError
from tpblock.formats.stored import Stored


@dataclass(frozen=True)
class Family:
    """One architecture of transformers.

    Attributes:
        config: reads the fields of a config.json.
        tensors: for each of our parameters, ``{i}`` standing for the block's number, how it is stored.
        prefix: what the names begin with, unless the folder was saved from the model without its head.
        not_weights: how the names of tensors end that some files hold although they follow from the config (masks,
            frequencies).
    """

    config: Callable[[Mapping[str, Any]], ModelConfig]
    tensors: Mapping[str, tuple[Stored, ...]]
    prefix: str = "model."
    not_weights: tuple[str, ...] = ("rotary_emb.inv_freq",)


FAMILIES = {
    "GPT2LMHeadModel": Family(gpt2.config, gpt2.TENSORS, gpt2.PREFIX, gpt2.NOT_WEIGHTS),
    "GPTNeoXForCausalLM": Family(gpt_neox.config, gpt_neox.TENSORS, gpt_neox.PREFIX, gpt_neox.NOT_WEIGHTS),
    "LlamaForCausalLM": Family(llama.config, llama.TENSORS),
    "MistralForCausalLM": Family(mistral.config, mistral.TENSORS),
    "Phi3ForCausalLM": Family(phi3.config, phi3.TENSORS),
    "Qwen2ForCausalLM": Family(qwen2.config, qwen2.TENSORS),
    "Qwen3ForCausalLM": Family(qwen3.config, qwen3.TENSORS),
}
"""By the name that config.json has in ``architectures``. A family of your own is one more entry."""


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family that a config.json names in ``architectures``.

    Raises:
        CheckpointError: listing those that are supported.
    """
    architectures = hf_config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else None
    if name not in FAMILIES:
        raise CheckpointError(f"architecture {name} is not supported; there are {', '.join(FAMILIES)}")
    check_unquantised(hf_config)
    return FAMILIES[name]
