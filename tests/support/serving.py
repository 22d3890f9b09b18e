"""Servers in tests: over a real socket, in a thread of this process or as a process of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from octavo import AsyncEngine
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.listen import Server, bind
from octavo.server.state import ServerState

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory": "8MiB",
    "num_threads": 1,
}
"""Options of an engine that is enough for most tests."""


@dataclass
class Served:
    """A server that runs in a thread of this process. `engine` may be asked from the test."""

    host: str
    port: int
    engine: AsyncEngine
    server: Server
    state: ServerState

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, function: Any) -> Any:
        """What `function` returns when it is called with the engine, between two steps."""
        return self.engine.ask(function).result(60)

    def client(self, **options: Any) -> httpx.Client:
        """A client of this server."""
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)


@contextmanager
def serving(engine: AsyncEngine, **options: Any) -> Iterator[Served]:
    """Serve `engine` with `ServerConfig(**options)` until the block is left. The engine stays open.

    Its requests have ended and the books balance when this returns.
    """
    config = ServerConfig(**{"served_model_names": ("tiny",), **options})
    app = create_app(engine, config)
    listener = bind("127.0.0.1", 0)
    state: ServerState = app.state.octavo
    server = Server(app, config, stopping=state.drain, aborting=state.abort_all)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="server")
    thread.start()
    try:
        yield Served("127.0.0.1", listener.getsockname()[1], engine, server, state)
    finally:
        server.stop()
        server.stop()
        thread.join(60)
        assert not thread.is_alive()
        state.close()
        if engine.health().failed is None:
            engine.ask(lambda engine: engine.check()).result(60)


class ServeProcess:
    """`octavo serve` as a process of its own, listening on a port that was free."""

    def __init__(self, model: str | Path, *flags: str, env: dict[str, str] | None = None) -> None:
        listener = bind("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        listener.close()
        command = [sys.executable, "-m", "octavo.cli", "serve", str(model), "--port", str(self.port), *flags]
        self._out = tempfile.TemporaryFile()  # noqa: SIM115  (both are closed on exit)
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdout=self._out, stderr=self._err, env=os.environ | (env or {})
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self, attempts: int = 6000) -> None:
        """Until `/health` answers 200. Raises if the process ends before."""
        for _ in range(attempts):
            assert self.process.poll() is None, self._written(self._err)
            try:
                if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            threading.Event().wait(0.1)
        raise AssertionError("the server did not come up")

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def finish(self, timeout: float = 300) -> tuple[int, str, str]:
        """Wait for the end: exit status, stdout, stderr."""
        status = self.process.wait(timeout)
        return status, self._written(self._out), self._written(self._err)

    def _written(self, file: IO[bytes]) -> str:
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()

    def stop(self) -> tuple[int, str, str]:
        """Ask it to end, and wait for it."""
        self.signal(signal.SIGTERM)
        return self.finish()

    def __enter__(self) -> ServeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._out.close()
        self._err.close()
