"""Tiny random models and tokenizers, saved as model directories. Nothing here needs a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 264
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SMALL = {"vocab_size": VOCAB_SIZE, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
LLAMA = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def byte_tokenizer(*, prepend_bos: bool = True, chat_template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE without merges: ids 0..255 are the bytes, 256 `<s>`, 257 `</s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if prepend_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def save_model(config: Any, directory: Path, *, tokenizer: bool = True) -> Path:
    """A random model of `config` with the byte tokenizer, in `directory`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    if tokenizer:
        byte_tokenizer().save_pretrained(directory)
    return directory
