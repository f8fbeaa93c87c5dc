"""A tiny random Llama as transformers writes it, with a tokenizer of its own, for the programs that start from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = 0, 1


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE of 300 tokens, whose post-processor puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def write_folder(folder: Path, *, tokenizer: bool = True, **changes: Any) -> Any:
    """Writes the folder. Returns the model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 6}
    options = {"num_key_value_heads": 3, "initializer_range": 0.2, "max_position_embeddings": 64, "eos_token_id": EOS}
    model = LlamaForCausalLM(LlamaConfig(**{"vocab_size": 300, **sizes, **options, **changes})).eval()
    model.save_pretrained(folder, max_shard_size="100KB")
    if tokenizer:
        make_tokenizer().save(str(folder / "tokenizer.json"))
    return model
