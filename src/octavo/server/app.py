"""The app: routes, and around them what every request goes through."""

from __future__ import annotations

from fastapi import FastAPI

from octavo.aio import AsyncEngine
from octavo.config import ServerConfig
from octavo.server import picture
from octavo.server.anthropic import messages
from octavo.server.openai import chat, completions
from octavo.server.state import ServerState


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The ASGI app that serves `engine`. Blocks until the engine answers; not for its own thread."""
    app = FastAPI(title="Octavo")
    app.state.octavo = ServerState(engine, config)
    for routes in (chat, completions, messages, picture):
        app.include_router(routes.router)
    return app
