"""The app: routes, and around them what every request goes through.

Watch (id, log, counts) ─ Gate (key, tenant) ─ Bodies (size, time, JSON) ─ routes
"""

from __future__ import annotations

from fastapi import FastAPI

from octavo import __version__
from octavo.aio import AsyncEngine
from octavo.server import admin, dashboard, picture
from octavo.server.anthropic import messages
from octavo.server.auth import Gate, Keyring
from octavo.server.body import Bodies
from octavo.server.config import ServerConfig
from octavo.server.describe import describe
from octavo.server.logs import Watch
from octavo.server.openai import chat, completions
from octavo.server.problems import handle_errors
from octavo.server.state import ServerState


def create_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The ASGI app that serves `engine`. Blocks until the engine answers; not for its own thread."""
    state = ServerState(engine, config)
    app = FastAPI(title="Octavo", version=__version__, docs_url=None, redoc_url=None)
    app.state.octavo = state
    for routes in (chat, completions, messages, admin, picture, dashboard):
        app.include_router(routes.router)
    handle_errors(app)
    keyring = Keyring(config, engine.config.tenant)
    describe(app, keyed=keyring.required)
    app.add_middleware(Bodies, config=config)
    app.add_middleware(Gate, keyring=keyring)
    app.add_middleware(Watch, state=state)
    return app
