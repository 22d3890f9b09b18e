"""`python -m octavo.plan.process`: prints the bytes that a process of Octavo holds before it has a model."""

from __future__ import annotations


def measure() -> int:
    """Import what an engine imports, run the smallest model once, and look."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import octavo.engine
    from octavo.model.heap import give_back
    from octavo.ram import resident_bytes

    loaded = (octavo.engine, AutoConfig, AutoModelForCausalLM, AutoTokenizer)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1))
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    give_back()
    assert all(loaded)
    return resident_bytes()


if __name__ == "__main__":
    print(measure())
