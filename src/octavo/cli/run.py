"""`octavo run`: one prompt, one answer, one receipt."""

from __future__ import annotations

import json
import sys

from octavo.cli.generate import deltas, text_of
from octavo.cli.show import finish_reason, notice, show_receipt
from octavo.config import EngineConfig
from octavo.door import Prompt
from octavo.engine import Engine
from octavo.errors import InvalidRequest, show
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams


def run_prompt(
    config: EngineConfig, params: SamplingParams, prompt: str, *, raw: bool, as_json: bool
) -> None:
    """Answer `prompt` (`-` reads it from stdin) on stdout, as it is made, or as one JSON object."""
    text = text_of(sys.stdin.read() if prompt == "-" else prompt, "prompt")
    if (
        not raw and not text.strip()
    ):  # a chat template makes tokens of nothing; without one the door refuses it
        source = " from stdin" if prompt == "-" else ""
        raise InvalidRequest(
            f"prompt={show(text)}{source} asks nothing; give at least 1 character", param="prompt"
        )
    engine = Engine(config, notice=notice)
    tokenizer = engine.tokenizer
    templated = bool(tokenizer.chat_template) and not raw
    message = {"role": "user", "content": text}
    final_prompt: Prompt = tokenizer.apply_chat_template([message]) if templated else text
    live = engine.prepare("run", final_prompt, params)
    if as_json:
        for _ in deltas(engine, live):
            pass
        print(json.dumps(result(live.output()), ensure_ascii=False), flush=True)
        return
    for delta in deltas(engine, live):
        sys.stdout.write(delta)
        sys.stdout.flush()
    print(flush=True)
    show_receipt(live.output())


def result(output: RequestOutput) -> dict[str, object]:
    """What `--json` prints."""
    assert output.receipt is not None
    receipt = output.receipt
    return {
        "text": output.outputs[0].text,
        "finish_reason": finish_reason(output),
        "usage": {
            "prompt_tokens": receipt.prompt_tokens,
            "completion_tokens": receipt.completion_tokens,
            "total_tokens": receipt.prompt_tokens + receipt.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": receipt.reused_tokens},
        },
        "octavo": receipt.to_dict(),
    }
