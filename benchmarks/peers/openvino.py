"""OpenVINO GenAI on the job from stdin: it reads the GGUF itself."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.script import read_job, report, require, search_also, timed


def main() -> None:
    """Time to first token, decode rate, and a batch."""
    search_also()
    require("openvino_genai")
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    job = read_job()
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    options = {"INFERENCE_NUM_THREADS": job["threads"]}
    pipe = genai.ContinuousBatchingPipeline(job["gguf"], scheduler, "CPU", options)
    config = genai.GenerationConfig()
    config.ignore_eos = True
    config.do_sample = False

    def generate(prompts: list[list[int]], new_tokens: int) -> float:
        config.max_new_tokens = new_tokens
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return timed(lambda: pipe.generate(tensors, [config] * len(tensors)))

    def one_round(prompts: dict[str, Any]) -> dict[str, float]:
        first = generate([prompts["prompt"]], 1)
        whole = generate([prompts["prompt_again"]], job["decode"] + 1)
        return {
            "ttft": first,
            "ttft_long": generate([prompts["long_prompt"]], 1),
            "decode": job["decode"] / (whole - first),
            "batch": generate(prompts["batch"], job["batch_new"]),
        }

    report([one_round(prompts) for prompts in job["rounds"]])


if __name__ == "__main__":
    main()
