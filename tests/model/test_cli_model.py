"""The command line with the real SmolLM2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from octavo.cli import main
from octavo.config import Environment
from octavo.errors import ModelNotFound
from octavo.model.pull import pull

pytestmark = pytest.mark.model
SMALL = ["--kv-cache-memory", "128MiB", "--temperature", "0"]


@pytest.fixture(scope="module", autouse=True)
def _smollm2() -> None:
    try:
        pull("smollm2", Environment.read().home)
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


def octavo(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo.cli", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )


def test_the_capital_of_france() -> None:
    done = octavo("run", "smollm2", "What is the capital of France?", *SMALL)
    assert done.stdout == "The capital of France is Paris.\n"
    assert "prompt_tokens: 37\ncompletion_tokens: 8\n" in done.stderr
    assert "finish_reason: stop" in done.stderr


def test_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm2", "What is the capital of France?", "--json", *SMALL]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("The capital of France is Paris.", "stop")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (37, 8)
    assert answer["octavo"]["exact"] is True


def test_the_second_turn_knows_the_first_and_reuses_it() -> None:
    typed = "What is the capital of France?\nOf which country did I just ask the capital?\n/receipt\n"
    done = octavo("chat", "smollm2", "--max-tokens", "40", *SMALL, typed=typed)
    first, second = done.stdout.splitlines()[:2]
    assert first == "The capital of France is Paris."
    assert "France" in second
    receipt = dict(line.split(": ", 1) for line in done.stderr.splitlines() if ": " in line)
    assert int(receipt["reused_tokens"]) >= 32
    assert int(receipt["reused_tokens"]) + int(receipt["computed_tokens"]) == int(receipt["prompt_tokens"])


def test_pull_prints_the_file() -> None:
    done = octavo("pull", "smollm2")
    assert done.stdout.endswith("SmolLM2-135M-Instruct.Q4_1.gguf\n")
    assert done.stderr == ""
