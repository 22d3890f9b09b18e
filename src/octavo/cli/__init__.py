"""The command line. Thin: flags become `EngineConfig` and `SamplingParams`, commands live in modules of their own.

Those modules are imported by the command that needs them, so that `octavo --help` does not load torch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from octavo import __version__
from octavo.bench.cli import app as bench
from octavo.cli.calibrate import calibrate
from octavo.cli.eval import eval_formats
from octavo.cli.options import with_flags, with_server_flags
from octavo.cli.plan import plan
from octavo.cli.show import notice, show_log
from octavo.cli.simulate import simulate
from octavo.config import EngineConfig, Environment
from octavo.errors import InvalidRequest, OctavoError, error_body, show
from octavo.params import SamplingParams
from octavo.server.config import ServerConfig

# Typer's parser has changed its home between versions; this is its ClickException in all of them.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="octavo",
    help="An LLM inference engine built around its KV cache.",
    add_completion=False,
    rich_markup_mode=None,  # panels cut long flags off, and docs/cli.md is this very text
    context_settings={"max_content_width": 100},
)


bench.command()(calibrate)
app.add_typer(bench)
app.command()(plan)
app.command()(simulate)
app.command("eval")(eval_formats)


def _version(asked: bool) -> None:
    if asked:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _octavo(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
@with_flags(temperature=0.0)  # its best guess
def run(
    config: EngineConfig,
    params: SamplingParams,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Send the prompt as it is, without chat template.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, at the end.")] = False,
) -> None:
    """Answer one PROMPT and show the receipt: what the cache did for it."""
    from octavo.cli.run import run_prompt

    run_prompt(config, params, prompt, raw=raw, as_json=as_json)


@app.command()
@with_flags(temperature=0.7)  # small models that always take the likeliest token begin to go in circles
def chat(
    config: EngineConfig,
    params: SamplingParams,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.", show_default=False)] = None,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /help lists the commands. A message that begins with a slash needs a
    space before it."""
    from octavo.cli.chat import run_chat

    run_chat(config, params, system=system)


@app.command()
@with_server_flags
def serve(
    config: EngineConfig,
    server: ServerConfig,
    api_key: Annotated[
        list[str],
        typer.Option(
            "--api-key",
            help="A key that is let in, as a tenant of its own. May be repeated.",
            show_default="none",
        ),
    ] = [],  # noqa: B006  (typer copies it)
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="Lines of `tenant key`.", show_default="none")
    ] = None,
) -> None:
    """Serve MODEL over HTTP: OpenAI's and Anthropic's APIs, /metrics and a /dashboard."""
    from octavo.cli.serve import run_server

    if not run_server(config, server):
        raise typer.Exit(130)


@app.command()
def pull(
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Name of a demo model, e.g. smollm2.")],
) -> None:
    """Fetch a demo model now, so that its first use needs no network. Prints the path of its file."""
    from octavo.model.pull import pull as fetch

    print(fetch(alias, Environment.read().home, notice))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 1 for an error, 2 for a wrong command line, 130 after Ctrl-C, 141 when
    nobody reads what it prints any more."""
    given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    as_json = "--json" in (given[: given.index("--")] if "--" in given else given)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if stream is sys.stdin else "replace")
    show_log()
    try:
        status = _run(given, as_json)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return status


def _run(given: list[str], as_json: bool) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("octavo", given) as context:
            command.invoke(context)
    except typer.Exit as end:
        return int(end.exit_code)
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        if message.startswith("Usage:"):  # the help, for a group without a command
            notice(message)
            return 2
        return _fail(
            InvalidRequest(f"{message.rstrip('.')}{_given(error)}. See `octavo --help`."), as_json, 2
        )
    except OctavoError as error:
        return _fail(error, as_json, 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(OctavoError(str(error)), as_json, 1)
    except (KeyboardInterrupt, typer.Abort):
        if sys.stdout.isatty():
            print()
        return 130
    return 0


def _given(error: Exception) -> str:
    """The value that could not be read, which typer's message leaves out."""
    read = getattr(error.__cause__, "errors", None)  # pydantic's ValidationError
    return f" (given: {show(read()[0]['input'])})" if read else ""


def _fail(error: OctavoError, as_json: bool, status: int) -> int:
    if as_json:
        print(json.dumps(error_body(error), ensure_ascii=False), flush=True)
    else:
        notice(f"octavo: error: {' '.join(error.message.split())}")
    return status
