"""OpenVINO GenAI on the job from stdin: it reads the GGUF itself."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.script import find, read_job, report, timed


def main() -> None:
    """Time to first token, decode rate, and a batch."""
    find("openvino_genai")
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    job = read_job()
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.cache_size = 1
    pipe = genai.LLMPipeline(
        job["gguf"], "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=job["threads"]
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        return pipe.generate(ov.Tensor(np.array(prompts, dtype=np.int64)), config)

    def one_round(prompts: dict[str, Any]) -> dict[str, float]:
        first = timed(lambda: generate([prompts["prompt"]], 1))
        whole = generate([prompts["prompt_again"]], job["decode"] + 1).perf_metrics
        return {
            "ttft": first,
            "ttft_long": timed(lambda: generate([prompts["long_prompt"]], 1)),
            "decode": 1000 / whole.get_tpot().mean,
            "batch": timed(lambda: generate(prompts["batch"], job["batch_new"])),
        }

    report([one_round(prompts) for prompts in job["rounds"]])


if __name__ == "__main__":
    main()
