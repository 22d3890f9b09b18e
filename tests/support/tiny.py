"""Tiny random models of every kind that Octavo runs, each with the byte tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from unit.model_builders import SMALL, VOCAB_SIZE, byte_tokenizer

__all__ = ["FUSED", "KINDS", "UNFUSED", "VOCAB_SIZE", "WINDOW", "save_tiny"]

WINDOW = 24
BASE: dict[str, Any] = {
    **SMALL,
    "eos_token_id": None,  # random models end where they are told to
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FUSED: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**BASE),
    "llama, tied": lambda: LlamaConfig(**BASE, tie_word_embeddings=True),
    "llama, llama3 rope": lambda: LlamaConfig(**BASE, rope_parameters=LLAMA3_ROPE),
    "llama, biases": lambda: LlamaConfig(**BASE, attention_bias=True, mlp_bias=True),
    "mistral, window": lambda: MistralConfig(**BASE, sliding_window=WINDOW),
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen2, mixed windows": lambda: Qwen2Config(
        **{**BASE, "num_hidden_layers": 4},
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
    ),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=32),
    "12 over 4 heads of 80": lambda: LlamaConfig(
        **{**BASE, "hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 4}, head_dim=80
    ),
    "multi-query": lambda: LlamaConfig(**{**BASE, "num_key_value_heads": 1}),
}
UNFUSED: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=1024,
        bos_token_id=256,
        eos_token_id=None,
    ),
    "gpt-neox": lambda: GPTNeoXConfig(
        **{k: v for k, v in BASE.items() if k != "num_key_value_heads"}, rotary_pct=0.25
    ),
    "mixtral": lambda: MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": lambda: Gemma2Config(
        **BASE, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW, attn_logit_softcapping=20.0
    ),
}
KINDS = {**FUSED, **UNFUSED}


def save_tiny(kind: str, directory: Path) -> Path:
    """The model `kind`, with weights large enough that every part of it shows in the logits."""
    torch.manual_seed(0)
    config = KINDS[kind]()
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    byte_tokenizer(prepend_bos=False).save_pretrained(directory)
    return directory
