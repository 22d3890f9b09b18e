"""Compiles a grammar where it can do no harm: in a process of its own, with little time, memory and stack.

A few bytes of schema can ask for minutes, gigabytes or a recursion that ends the process, and the compiler's own limits
do not see all of it. What has compiled here compiles anywhere.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import OctavoError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

logger = logging.getLogger("octavo")

CPU_SECONDS = 1
BYTES = 256 << 20
STACK_BYTES = 4 << 20  # half of what a thread usually has
_PATIENCE_SECONDS = 60  # the machine may be busy

STEP_MAX_ITEMS = 10_000


def limits() -> LLParserLimits:
    """A fifth of the library's own, or an ambiguous grammar takes its neighbours' time: 50 ms and more per token."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=STEP_MAX_ITEMS,
        step_lexer_fuel=40_000,
        initial_lexer_fuel=200_000,
        verbose_errors=False,
    )


class Guard:
    """The process. Started when first needed, again where a grammar has ended it, and ended with this object.

    `special` are the texts of the tokenizer's special tokens, which grammars may name.
    """

    def __init__(self, special: Sequence[str]) -> None:
        self._special = list(special)
        self._process: subprocess.Popen[bytes] | None = None

    def survives(self, source: str) -> bool:
        """Whether compiling `source` ends within the limits, be it with an error.

        Raises `OctavoError` where there can be no process.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(source).encode() + b"\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _PATIENCE_SECONDS)
            if ready and process.stdout.readline():
                return True
        except BrokenPipeError:
            pass
        self._process = None
        _end(process)
        return False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-c", "from octavo.guard import serve; serve()"]
            # A session of its own: Ctrl-C is for the engine.
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise OctavoError(
                    f"no process can be started to compile structured_outputs: {error}"
                ) from error
            weakref.finalize(self, _end, process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(self._special).encode() + b"\n")
            self._process = process
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is None:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                logger.debug("the guard's pipe was broken")


class _Bytes:
    """The smallest tokenizer that llguidance takes: a token for every byte, and the special ones."""

    def __init__(self, special: Sequence[str]) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        names = ["</end>", *(name for name in special if name)]
        self.tokens = [bytes([i]) for i in range(256)] + [name.encode() for name in names]
        self.special_token_ids = list(range(256, 256 + len(names)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def serve() -> None:
    """The process: reads grammars, a line of JSON each, and answers a line to each that it survives."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    tokens = LLTokenizer(TokenizerWrapper(_Bytes(json.loads(sys.stdin.readline()))))
    _limit(resource.RLIMIT_AS, _size() + BYTES)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    while line := sys.stdin.readline():
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS)
        matcher = LLMatcher(tokens, json.loads(line), log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        del matcher
        print("survived", flush=True)


def _size() -> int:
    """Bytes of address space this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))
