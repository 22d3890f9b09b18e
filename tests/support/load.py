"""Clients in tests that stream answers, leave in the midst of them, or come all at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.serving import Served


@dataclass(frozen=True)
class Heard:
    """All that must not depend on what others do: the text, and token by token its log-probs."""

    text: str
    logprobs: tuple[tuple[str, float, tuple[tuple[str, float], ...]], ...]
    finish_reason: str | None


class Refused(Exception):
    """The server answered with an error: `status`, its headers and its body."""

    def __init__(self, status: int, headers: dict[str, str], body: dict[str, Any]) -> None:
        super().__init__(status, body)
        self.status = status
        self.headers = headers
        self.body = body


class Stream:
    """A streamed chat on a connection of its own. `drop` may be called from another thread at any time."""

    def __init__(self, server: Served, name: str, body: dict[str, Any]) -> None:
        self.name = name
        self.dropped = False
        self.complete = False
        """Whether all of the answer was read."""
        self.receipt: dict[str, Any] = {}
        self._body = {
            "model": "tiny",
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            **body,
        }
        self._socket = socket.create_connection((server.host, server.port), timeout=120)
        self._connection = http.client.HTTPConnection(server.host, server.port)
        self._connection.sock = self._socket

    def send(self) -> None:
        """Send the request."""
        headers = {"content-type": "application/json", "x-request-id": self.name}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(self._body), headers)

    def chunks(self) -> Iterator[dict[str, Any]]:
        """What comes, event by event. Raises `Refused`, and `OSError` or `HTTPException` once it was dropped."""
        response = self._connection.getresponse()
        if response.status != 200:
            headers = {name.lower(): value for name, value in response.getheaders()}
            raise Refused(response.status, headers, json.loads(response.read()))
        for line in response:
            if line == b"data: [DONE]\n":
                self.complete = True
            elif line.startswith(b"data: "):
                yield json.loads(line[6:])

    def hear(self) -> Heard:
        """All of the answer. Raises as `chunks` does."""
        text, logprobs, reason = "", [], None
        for chunk in self.chunks():
            assert "error" not in chunk, chunk
            self.receipt = chunk.get("octavo") or self.receipt
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
                for token in (choice["logprobs"] or {}).get("content") or ():
                    top = tuple((t["token"], t["logprob"]) for t in token["top_logprobs"])
                    logprobs.append((token["token"], token["logprob"], top))
        if not self.complete:
            raise ConnectionError("the stream has ended before its end")
        return Heard(text, tuple(logprobs), reason)

    def drop(self, *, reset: bool = False) -> None:
        """Hang up, with a reset or in the ordinary way."""
        self.dropped = True
        with contextlib.suppress(OSError):
            if reset:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Wakes the thread that reads, which closes the connection; to shut down the other half says goodbye.
            self._socket.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


LEFT = (OSError, http.client.HTTPException, ValueError, AttributeError)
"""What reading raises after the connection was dropped in another thread."""


def ask(server: Served, name: str, body: dict[str, Any]) -> tuple[Heard, dict[str, Any]]:
    """An answer that is read to its end, and its receipt."""
    stream = Stream(server, name, body)
    stream.send()
    heard = stream.hear()
    stream.close()
    return heard, stream.receipt


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
