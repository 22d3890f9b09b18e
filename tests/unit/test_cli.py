"""The command line on a tiny random model, in processes of their own where signals and pipes matter."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import IO

import pytest
from transformers import LlamaConfig

from octavo import LLM, SamplingParams, __version__
from octavo.cli import main
from octavo.cli.chat import lines
from octavo.cli.options import ENGINE, SAMPLING
from octavo.cli.reference import reference
from octavo.config import EngineConfig
from unit.model_builders import LLAMA, save_model

OCTAVO = [sys.executable, "-m", "octavo.cli"]
SMALL = ["--kv-cache-memory", "8MiB", "--num-threads", "1", "--dtype", "float32"]
ENDLESS = ["--ignore-eos", "--temperature", "1", "--seed", "1"]
CONTEXT = 32_768


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(**{**LLAMA, "max_position_embeddings": CONTEXT})
    return str(save_model(config, tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(scope="module")
def llm(directory: str) -> Iterator[LLM]:
    with LLM(directory, kv_cache_memory="8MiB", num_threads=1, dtype="float32") as llm:
        yield llm


started: list[subprocess.Popen[bytes]] = []


@pytest.fixture(autouse=True)
def _leave_no_process() -> Iterator[None]:
    yield
    while started:
        started.pop().kill()


def start(*arguments: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([*OCTAVO, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)
    started.append(process)
    return process


def read_some(stream: IO[bytes] | None, count: int = 1) -> bytes:
    assert stream is not None
    return stream.read(count)


def finish(process: subprocess.Popen[bytes], typed: bytes = b"") -> tuple[int, str, str]:
    out, err = process.communicate(typed, timeout=120)
    return process.returncode, out.decode(), err.decode()


Run = Callable[[bytes, list[str]], tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process with what is piped into it: exit status, stdout, stderr."""

    def run(typed: bytes, arguments: list[str]) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), encoding="utf-8"))
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_help_and_version_load_no_torch() -> None:
    code = (
        "import sys; from octavo.cli import main; "
        "codes = [main([*words.split()]) for words in ('--help', 'run --help', '--version')]; "
        "print(codes, {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [f"octavo {__version__}", "[0, 0, 0] set()"]
    assert done.stderr == ""


def test_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    commands = {line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line[:3].strip()}
    assert commands >= {"run", "chat", "serve", "pull"}


def test_the_reference_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text() == reference(), "run: python -m octavo.cli.reference > docs/cli.md"


def test_flags_are_fields() -> None:
    assert {flag.name for flag in ENGINE} <= {field.name for field in fields(EngineConfig)}
    assert {flag.name for flag in SAMPLING} <= {field.name for field in fields(SamplingParams)}


def test_run_prints_the_answer_and_then_the_receipt(
    directory: str, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    (chatted,) = llm.chat([{"role": "user", "content": "hello"}], greedy)
    (completed,) = llm.generate("hello", greedy)
    for flags, expected in (([], chatted), (["--raw"], completed)):
        assert main(["run", directory, "hello", "--max-tokens", "9", *flags, *SMALL]) == 0
        out, err = capsys.readouterr()
        assert out == expected.outputs[0].text + "\n"
        assert f"prompt_tokens: {len(expected.prompt_token_ids)}\ncompletion_tokens: 9\n" in err
        assert "finish_reason: length\n" in err


def test_json_is_one_object_with_all_counts(
    directory: str, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=7, ignore_eos=True
    )
    flags = "--raw --json --max-tokens 9 --temperature 0.8 --top-p 0.9 --top-k 50 --min-p 0.01 --seed 7 --ignore-eos"
    (expected,) = llm.generate("hello", params)
    assert main(["run", directory, "hello", *flags.split(), *SMALL]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["text"], got["finish_reason"]) == (expected.outputs[0].text, "length")
    assert got["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 9,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (got["octavo"]["seed"], got["octavo"]["computed_tokens"]) == (7, 6)


def test_stop_strings_may_be_repeated(directory: str, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    (free,) = llm.generate("hello", SamplingParams(max_tokens=40, seed=3, ignore_eos=True))
    text = free.outputs[0].text
    first, second = text[10:12], text[20:22]
    flags = ["--raw", "--json", "--max-tokens", "40", "--temperature", "1", "--seed", "3", "--ignore-eos"]
    assert main(["run", directory, "hello", *flags, "--stop", second, "--stop", first, *SMALL]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["finish_reason"] == "stop"
    assert got["text"] == text[: min(text.index(first), text.index(second))]


@pytest.mark.parametrize(
    ("arguments", "status", "code", "words"),
    [
        (["run", "no-such-model", "x"], 1, "model_not_found", "no-such-model"),
        (["run", "m", "x", "--block-size", "17"], 1, "invalid_config", "block_size=17"),
        (["run", "m", "x", "--kv-cache-memory", "8MB"], 1, "invalid_config", "kv_cache_memory='8MB'"),
        (["run", "m", "x", "--top-p", "2"], 1, "invalid_request", "top_p=2.0"),
        (["run", "m", "x", "--max-tokens", "many"], 2, "invalid_request", "--max-tokens"),
        (["run", "m", "x", "--max-tokens", "many"], 2, "invalid_request", "(given: 'many'). See"),
        (["bench", "waste", "--requests", "0"], 2, "invalid_request", "equal to 1 (given: '0')"),
        (["run", "m"], 2, "invalid_request", "prompt"),
        (["run", "m", "x", "--no-such-flag"], 2, "invalid_request", "--no-such-flag"),
    ],
)
def test_an_error_is_one_line_or_one_object(
    arguments: list[str], status: int, code: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("octavo: error: ")
    assert err.count("\n") == 1
    assert words.lower() in err.lower()
    assert main([*arguments, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    body = json.loads(out)["error"]
    assert body["code"] == code
    assert words.lower() in body["message"].lower()
    assert set(body) == {"message", "type", "param", "code"}


def test_a_prompt_over_the_context_is_refused_with_the_numbers(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", directory, "x" * 200, "--raw", "--json", "--max-model-len", "100", *SMALL]
    assert main(command) == 1
    body = json.loads(capsys.readouterr().out)["error"]
    assert body["code"] == "context_length_exceeded"
    assert "maximum context length is 100 tokens" in body["message"]


def test_pull_of_an_unknown_alias(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("octavo: error: model='nothing' is not an alias")


def test_a_dash_reads_the_prompt_from_stdin(directory: str, llm: LLM) -> None:
    (expected,) = llm.generate("two\nlines", SamplingParams(max_tokens=5, temperature=0.0))
    process = start("run", directory, "-", "--raw", "--json", "--max-tokens", "5", *SMALL)
    status, out, _ = finish(process, b"two\nlines")
    assert (status, json.loads(out)["text"]) == (0, expected.outputs[0].text)
    process = start("run", "no-model", "-", "--json")
    status, out, _ = finish(process, b"two\xff")
    assert (status, json.loads(out)["error"]["message"]) == (
        1,
        "prompt is not UTF-8 at character 3; convert it",
    )


@pytest.mark.parametrize("typed", [b"", b" \n"])
def test_an_empty_prompt_is_refused(typed: bytes, directory: str, run: Run) -> None:
    status, out, err = run(typed, ["run", directory, "-", *SMALL])
    assert (status, out) == (1, "")
    assert (
        err
        == f"octavo: error: prompt={typed.decode()!r} from stdin asks nothing; give at least 1 character\n"
    )
    assert run(b"", ["run", directory, typed.decode(), *SMALL]) == (1, "", err.replace(" from stdin", ""))


def test_a_reader_that_leaves_ends_the_run_quietly(directory: str) -> None:
    process = start("run", directory, "x", *ENDLESS, *SMALL)
    read_some(process.stdout)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert process.returncode == 141
    assert err == b""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "llama-3-8b", "--hardware", "H100-80GB"],
        ["plan", "llama-3-8b", "--hardware", "H100-80GB", "--json"],
        ["plan", "llama-3-8b", "--hardware", "nothing", "--json"],
        ["bench", "waste"],
        ["--help"],
    ],
)
def test_a_reader_that_leaves_ends_every_command_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*OCTAVO, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_ends_the_run(directory: str) -> None:
    process = start("run", directory, "x", *ENDLESS, *SMALL)
    read_some(process.stdout)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert (status, err) == (130, "")


def test_a_piped_conversation(directory: str, llm: LLM, run: Run) -> None:
    flags = ["--system", "be", "--max-tokens", "4", "--temperature", "0", "--ignore-eos"]
    typed = b"one\n\n/receipt\ntwo\n/reset\none\n/exit\nnever\n"
    status, out, err = run(typed, ["chat", directory, *flags, *SMALL])
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)

    def answer(*said: str) -> str:
        roles = ["system", *["user", "assistant"] * len(said)]
        messages = [{"role": role, "content": text} for role, text in zip(roles, ["be", *said], strict=False)]
        return llm.chat(messages, params)[0].outputs[0].text

    first = answer("one")
    assert out == f"{first}\n{answer('one', first, 'two')}\n{first}\n"
    assert status == 0
    assert "\x1b" not in out + err
    assert err.count("completion_tokens: 4\n") == 1
    assert "The conversation starts over." in err


def test_what_begins_with_a_slash_is_a_command_or_refused(directory: str, llm: LLM, run: Run) -> None:
    flags = ["--max-tokens", "4", "--temperature", "0", "--ignore-eos"]
    status, out, err = run(b"/help\n/foo bar\n/reset now\n /foo\n", ["chat", directory, *flags, *SMALL])
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    (expected,) = llm.chat([{"role": "user", "content": "/foo"}], params)
    assert (status, out) == (0, expected.outputs[0].text + "\n")
    *told, cut = err.splitlines()
    assert cut.startswith("[cut")
    assert [line.partition(" is no command")[0] for line in told[1:]] == ["'/foo bar'", "'/reset now'"]
    for line in told:
        assert all(command in line for command in ("/receipt", "/reset", "/exit", "space before it"))


def test_a_conversation_that_outgrows_the_context_is_kept(directory: str, llm: LLM, run: Run) -> None:
    flags = ["--max-model-len", "60", "--max-tokens", "4", "--temperature", "0", "--ignore-eos"]
    status, out, err = run(b"one\n" + b"x" * 80 + b"\ntwo\n", ["chat", directory, *flags, *SMALL])
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    messages = [{"role": "user", "content": "one"}]
    first = llm.chat(messages, params)[0].outputs[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "two"}]
    assert (status, out) == (0, f"{first}\n{llm.chat(messages, params)[0].outputs[0].text}\n")
    assert "maximum context length is 60 tokens" in err
    assert "the conversation before it is kept" in err


def test_chat_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = save_model(LlamaConfig(**LLAMA), tmp_path / "bare", tokenizer=False)
    assert main(["chat", str(bare), *SMALL]) == 1
    assert "has no tokenizer" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter([KeyboardInterrupt, " hello ", KeyboardInterrupt, EOFError, "never"])

    def type_in(prompt: str) -> str:
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", type_in)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert list(lines()) == [" hello"]


def test_ctrl_c_in_a_terminal_stops_the_answer_and_not_the_chat(directory: str) -> None:
    # The child is given a terminal of its own; what is typed and shown goes through these pipes.
    spawn = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    command = [*OCTAVO, "chat", directory, *ENDLESS, *SMALL]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", spawn, *command], stdin=pipe, stdout=pipe, env=os.environ | {"TERM": "dumb"}
    )
    started.append(process)
    assert process.stdin is not None

    def type_in(keys: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(keys)
        process.stdin.flush()

    def wait_for(words: bytes) -> None:
        shown = b""
        while words not in shown:
            piece = read_some(process.stdout)
            assert piece, f"the chat ended before it showed {words!r}: {shown[-500:]!r}"
            shown += piece

    wait_for(b"> ")
    for _ in range(2):
        type_in(b"hello\n")
        wait_for(b"hello\r\n")
        read_some(process.stdout, 8)
        type_in(b"\x03")
        wait_for(b"[stopped]")
        wait_for(b"> ")
    type_in(b"/receipt\n")
    wait_for(b"abort")
    wait_for(b"> ")
    type_in(b"\x04")
    process.communicate(timeout=60)
    assert process.returncode == 0
