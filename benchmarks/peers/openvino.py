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
    options = {"INFERENCE_NUM_THREADS": job["threads"]}

    def pipeline(prefix_caching: bool) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = prefix_caching
        scheduler.cache_size = 1
        return genai.ContinuousBatchingPipeline(job["gguf"], scheduler, "CPU", options)

    apart = pipeline(False)
    sharing = pipeline(True) if "shared" in job["rounds"][0] else None
    config = genai.GenerationConfig()
    config.ignore_eos = True
    config.do_sample = False

    def generate(prompts: list[list[int]], new_tokens: int, pipe: Any = apart) -> float:
        config.max_new_tokens = new_tokens
        tensors = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        return timed(lambda: pipe.generate(tensors, [config] * len(tensors)))

    def one_round(prompts: dict[str, Any]) -> dict[str, float]:
        if sharing is not None:
            return {"shared": generate(prompts["shared"], job["batch_new"], sharing)}
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
