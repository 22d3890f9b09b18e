"""The request log: what a simulator needs of each request, and no text.

One JSON object per line. `timestamp` (of the arrival, Unix milliseconds), `input_length`, `output_length` and
`hash_ids` are those of the Mooncake traces; `hash_ids` has one id per full block of the prompt and `output_hash_ids`
goes on over the first answer. Equal ids are equal beginnings of the same tenant and salt. The chain starts from a
secret that is drawn anew each time, so that nobody can find a text by hashing guesses.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.cache.hashing import Hasher, Namespace, pack
from octavo.errors import ConfigError
from octavo.live import LiveRequest
from octavo.server.backlog import Backlog
from octavo.server.moment import unix

logger = logging.getLogger("octavo")


class RequestLog:
    """Appends to `path`, in a thread of its own, so that a slow disk delays no step. Of one that hangs it holds
    `CAPACITY` requests; the log says how many more have got no line.

    Raises `ConfigError` if the file cannot be written.
    """

    CAPACITY = 1000
    PATIENCE_S = 5.0
    """How long the disk has to take what waits at the end."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._block_size = block_size
        self._hasher = Hasher()
        self._secret = secrets.token_hex(16)
        self._torn = False
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"request_log={os.fspath(path)!r} cannot be written: {error.strerror}", param="request_log"
            ) from error
        self._ended: Backlog[tuple[LiveRequest, str]] = Backlog(
            "octavo-request-log", self.CAPACITY, self._write
        )

    def add(self, live: LiveRequest, reason: str) -> None:
        """`live` has ended and changes no more."""
        self._ended.put((live, reason))

    def close(self) -> None:
        """Write what was added, and close the file. Idempotent."""
        if self._ended.close(self.PATIENCE_S):
            self._file.close()
        else:
            logger.error("the end of the request log could not be written: the disk does not answer")

    def _write(self, item: tuple[LiveRequest, str], dropped: int) -> None:
        if dropped:
            logger.error("%d requests are missing in the request log: the disk is too slow", dropped)
        line = json.dumps(self._record(*item)).encode() + b"\n"
        if self._torn:  # what a full disk left of the line before is a line of its own
            line = b"\n" + line
        try:
            written = self._file.write(line)
        except OSError as error:
            if not self._torn:
                logger.error("the request log cannot be written: %s", error.strerror)
            self._torn = True
        else:
            self._torn = written < len(line)

    def _record(self, live: LiveRequest, reason: str) -> dict[str, Any]:
        request, timing = live.request, live.timing
        prompt = list(request.prompt_token_ids)
        answers = [answer.output(i) for i, answer in enumerate(live.answers)]
        first = answers[0].token_ids if answers else []
        # The last token of an answer is never computed, so it is in no block.
        ids = self._ids(request.namespace, prompt + first[:-1])
        full = len(prompt) // self._block_size
        return {
            "timestamp": round(unix(timing.arrived) * 1000),
            "input_length": len(prompt),
            "output_length": sum(len(answer.token_ids) for answer in answers),
            "hash_ids": ids[:full],
            "output_hash_ids": ids[full:],
            "block_size": self._block_size,
            "n": request.n,
            "priority": request.priority,
            "finish_reason": reason,
        }

    def _ids(self, namespace: Namespace, token_ids: Sequence[int]) -> list[int]:
        """One id of 63 bits per full block."""
        digest = self._hasher.root(
            Namespace(self._secret, namespace.tenant, namespace.salt, namespace.adapter)
        )
        found = []
        for start in range(0, len(token_ids) - self._block_size + 1, self._block_size):
            digest = self._hasher.chain(digest, pack(token_ids[start : start + self._block_size]))
            found.append(int.from_bytes(digest[:8], "big") >> 1)
        return found
