"""One request at a time on an engine of this thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from octavo.engine import Engine
from octavo.errors import InvalidRequest
from octavo.live import LiveRequest


def deltas(engine: Engine, live: LiveRequest, stop: threading.Event | None = None) -> Iterator[str]:
    """The text of the first answer, piece by piece as it is made.

    Ends early when `stop` is set, and aborts the request when it is left for any reason. Raises the request's error.
    """
    engine.submit(live)
    shown = 0
    try:
        while not (live.finished or (stop is not None and stop.is_set())):
            engine.step()
            text = live.answers[0].text if live.answers else ""
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
    finally:
        engine.abort(live.request.request_id)
    if live.error is not None:
        raise live.error


def text_of(text: str, param: str) -> str:
    """`text` from outside; raises `InvalidRequest` where its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} is not UTF-8 at character {error.start}; convert it", param=param
        ) from error
    return text
