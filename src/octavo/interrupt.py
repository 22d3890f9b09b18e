"""Ctrl-C between steps: an interrupt in the middle of one would leave the books of the cache half written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Inside, Ctrl-C sets the event and nothing else: a step is never cut in the middle.

    Ctrl-C goes to the main thread; in others, and where it is ignored, the event is never set.
    """
    pressed = threading.Event()
    handled = callable(signal.getsignal(signal.SIGINT))
    if not handled or threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def uninterrupted() -> Iterator[threading.Event]:
    """As `interruptible`, but Ctrl-C is only put off: at the end it goes to the handler that was there before."""
    with interruptible() as pressed:
        yield pressed
    if pressed.is_set():
        signal.raise_signal(signal.SIGINT)
