"""`octavo serve`: the port first, then the model, then requests until a signal ends it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from contextlib import closing

from fastapi import FastAPI

from octavo.aio import AsyncEngine
from octavo.config import EngineConfig, format_bytes
from octavo.errors import ConfigError
from octavo.plan.start import plan_engine
from octavo.server.app import create_app
from octavo.server.config import ServerConfig
from octavo.server.feed import feed_of
from octavo.server.listen import Server, allow_connections, bind
from octavo.server.logs import log_to_stderr
from octavo.server.state import ServerState

logger = logging.getLogger("octavo")


def run_server(engine_config: EngineConfig, config: ServerConfig) -> bool:
    """Serve until the first SIGTERM or Ctrl-C, finish what runs, and return true; false if a second one cut it off.

    Raises `ConfigError` if the port is taken, before the model is loaded.
    """
    if engine_config.tenant and config.api_keys and not config.share_prefixes:
        raise ConfigError(
            f"tenant={engine_config.tenant!r} is never used where each key has a tenant of its own; leave it out",
            param="tenant",
        )
    with bind(config.host, config.port) as listener, closing(log_to_stderr(config.log_json)):
        allow_connections(config.max_connections)
        engine = AsyncEngine(engine_config, notice=logger.info)
        try:
            app = create_app(engine, config)
            state: ServerState = app.state.octavo
            server = Server(app, config, stopping=lambda: _drain(state), aborting=state.abort_all)
            _announce(state, listener)
            try:
                asyncio.run(_serve(server, app, listener))
            finally:
                state.close()
        finally:
            engine.close()
    return not server.aborted


async def _serve(server: Server, app: FastAPI, listener: socket.socket) -> None:
    feed_of(app)
    await server.serve([listener])


def _drain(state: ServerState) -> None:
    state.drain()
    logger.info("Finishing the requests that run; once more ends them.")


def _announce(state: ServerState, listener: socket.socket) -> None:
    config, facts = state.config, state.facts
    host, port = listener.getsockname()[:2]
    logger.info(
        "Model %s: %s, context of %d tokens, %s.",
        ", ".join(state.model_names),
        facts.dtype,
        facts.max_model_len,
        "exact" if facts.exact else "not exact on this machine",
    )
    logger.info(
        "Cache of %s in %s: %d tokens in blocks of %d.",
        format_bytes(facts.bytes_total),
        facts.kv_cache_dtype,
        facts.cache_tokens,
        facts.block_size,
    )
    for line in state.engine.ask(plan_engine).result().lines():
        logger.info("%s.", line)
    _announce_keys(config, host)
    inner = f"[{host}]" if ":" in host else host
    logger.info("Listening on http://%s:%d, dashboard on /dashboard.", inner, port)


def _announce_keys(config: ServerConfig, host: str) -> None:
    if config.api_keys or config.admin_key is not None:
        tenants = len({*config.api_keys.values()})
        shared = (
            "sharing cached prefixes" if config.share_prefixes else "each with cached prefixes of its own"
        )
        logger.info("Keys are needed; tenants: %d, %s.", tenants, shared)
        return
    logger.info("No keys: whoever reaches the port is let in.")
    if not _is_loopback(host):
        logger.warning("%s is reached from other machines; set --api-key or --api-key-file.", host)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
