"""How many numbers a model's weights are, derived from its configuration layer by layer, and what they take."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from octavo.plan.families import FAMILIES, Family
from octavo.plan.fields import EXPERTS, ModelConfig, wrong

WEIGHT_FORMATS = ("bf16", "f32", "fp8", "int4", "mxfp4")
"""`int4` has a bf16 scale and a 4-bit zero point per 128 numbers (GPTQ, AWQ), `fp8` a float32 scale per tile of
128 x 128 (DeepSeek-V3), `mxfp4` an 8-bit scale per 32 numbers of the experts (gpt-oss). Embedding, head, norms and
biases stay bf16 in them."""

_BITS = {
    "bf16": Fraction(16),
    "f32": Fraction(32),
    "fp8": 8 + Fraction(32, 128 * 128),
    "int4": 4 + Fraction(16 + 4, 128),
    "mxfp4": 4 + Fraction(8, 32),
}


@dataclass(frozen=True)
class Weights:
    """Numbers of a model, by what is done with them.

    `body` are the matrices that every token is multiplied with, `experts` those of all routed experts, of which a token
    meets `experts_per_token` of `num_experts`. `head` is 0 where it is the `embedding` itself.
    """

    embedding: int
    head: int
    body: int
    experts: int
    other: int
    num_experts: int = 1
    experts_per_token: int = 1

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self.body + self.experts + self.other

    @property
    def active(self) -> int:
        """Those that one token meets, its row of the embedding counted as the whole table."""
        return self.total - self.experts + self.active_experts

    @property
    def active_experts(self) -> int:
        """Numbers of the experts that one token meets."""
        return self.experts * self.experts_per_token // self.num_experts

    @property
    def head_matrix(self) -> int:
        """Numbers of the matrix that gives the logits."""
        return self.head or self.embedding

    def experts_met(self, tokens: int) -> float:
        """Numbers of the experts that some of `tokens` tokens meet, on average, if each draws its own at random."""
        if not self.experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.experts * (1 - missed)

    def nbytes(self, format: str) -> int:
        """Bytes of all weights in one of `WEIGHT_FORMATS`, scales included."""
        body, experts = (bits(format, part) for part in ("body", "experts"))
        rest = (self.total - self.body - self.experts) * bits(format, "rest")
        return int(-(-(rest + self.body * body + self.experts * experts) // 8))


def bits(format: str, part: str) -> Fraction:
    """Bits per number of `part` (`body`, `experts` or `rest`) in one of `WEIGHT_FORMATS`."""
    if format == "f32" or part == "experts" or (part == "body" and format != "mxfp4"):
        return _BITS[format]
    return _BITS["bf16"]


def count(config: ModelConfig) -> Weights:
    """The weights of a model of one of `FAMILIES`."""
    family = FAMILIES[config.model_type]
    hidden, layers = config.hidden_size, config.num_hidden_layers
    table = config.vocab_size * hidden
    matrices, vectors = _attention(config, family)
    body, other, experts = layers * matrices, layers * (vectors + family.norms * hidden) + hidden, 0
    for layer in range(layers):
        if family.is_sparse(config, layer):
            router, routed = _experts(config, family)
            body += router
            experts += routed
            other += config.get(family.experts[0]) if family.expert_biases else 0
        else:
            body += 3 * hidden * config.intermediate_size
            other += 2 * config.intermediate_size + hidden if config.get("mlp_bias") else 0
    tied = config.get("tie_word_embeddings", False)
    shares = (config.get(family.experts[0], 1), config.get("num_experts_per_tok", 1)) if experts else (1, 1)
    return Weights(table, 0 if tied else table, body, experts, other, *shares)


def _attention(config: ModelConfig, family: Family) -> tuple[int, int]:
    """Numbers in the matrices and in the vectors of one layer's attention."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.get("kv_lora_rank"):
        return _latent_attention(config)
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    qkv_bias, output_bias = family.biases(config)
    vectors = (queries + 2 * keys) * qkv_bias + hidden * output_bias
    vectors += 2 * head_dim * family.head_norms + heads * family.sinks
    return hidden * (queries + 2 * keys) + queries * hidden, vectors


def _latent_attention(config: ModelConfig) -> tuple[int, int]:
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    if squeeze := config.get("q_lora_rank"):
        matrices, vectors = squeeze * (hidden + queries), squeeze
    else:
        matrices, vectors = hidden * queries, 0
    matrices += hidden * (rank + config.qk_rope_head_dim)
    matrices += rank * (heads * config.qk_nope_head_dim + values) + values * hidden
    return matrices, vectors + rank


def _experts(config: ModelConfig, family: Family) -> tuple[int, int]:
    """Numbers that every token of one sparse layer meets, and those of its routed experts."""
    hidden, (experts, inner) = config.hidden_size, (config.get(name) for name in family.experts)
    one = 3 * hidden * inner + (2 * inner + hidden if family.expert_biases else 0)
    return experts * hidden + config.get("n_shared_experts", 0) * 3 * hidden * inner, experts * one


def count_by_transformers(config: Any) -> Weights:
    """The same from the model that transformers would make of its `config`, without memory for it."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    sums = dict.fromkeys(("embedding", "head", "body", "experts", "other"), 0)
    for name, parameter in model.named_parameters():
        sums[_part(name, parameter, tables, head)] += parameter.numel()
    text = config.get_text_config()
    shares = (1, 1)
    if sums["experts"]:
        experts = next((found for name in EXPERTS if (found := getattr(text, name, None))), None)
        if experts is None:
            raise wrong(f"none of {', '.join(EXPERTS)} says how many experts there are", EXPERTS[0])
        shares = (experts, getattr(text, "num_experts_per_tok", None) or 1)
    return Weights(**sums, num_experts=shares[0], experts_per_token=shares[1])


def _part(name: str, parameter: Any, tables: set[int], head: Any) -> str:
    if id(parameter) in tables:
        return "embedding"
    if parameter is head:
        return "head"
    if ".experts." in name:
        return "experts"
    return "body" if parameter.dim() > 1 else "other"
