"""Keys and tenants.

Without keys everybody is let in. With keys every request names one, as `Authorization: Bearer KEY` or `x-api-key`,
but for `/health`, `/version` and pages that hold no data. A key belongs to a tenant, who shares cached blocks with
nobody else. What concerns all tenants (`/cache`, `/metrics`, `/reset_prefix_cache`) is for the operator: the admin
key, or the key of a tenant who is alone.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import Forbidden, OctavoError, Unauthorized
from octavo.server.config import ADMIN, ServerConfig
from octavo.server.problems import response_to

OPEN = ("/health", "/version", "/openapi.json", "/dashboard")


@dataclass(frozen=True)
class Caller:
    """Who sent a request: `name` for logs, `tenant` for the cache namespace, and whether it may see everything."""

    name: str
    tenant: str
    operator: bool


class Keyring:
    """The callers, by key. Only digests of keys are held."""

    def __init__(self, config: ServerConfig, shared_tenant: str) -> None:
        tenants = set(config.api_keys.values())
        alone = config.admin_key is None and len(tenants) == 1
        self._anybody = Caller("", shared_tenant, operator=True)

        def caller(name: str, operator: bool) -> Caller:
            return Caller(name, shared_tenant if config.share_prefixes else name, operator)

        self._callers = [(_digest(key), caller(name, alone)) for key, name in config.api_keys.items()]
        if config.admin_key is not None:
            self._callers.append((_digest(config.admin_key), caller(ADMIN, True)))

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._callers)

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who sent these (lower-case) headers, in constant time. Raises `Unauthorized`."""
        if not self.required:
            return self._anybody
        digest = _digest(_key_in(dict(headers)))
        found = [caller for known, caller in self._callers if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthorized(
                "a valid API key is needed; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        return found[0]


class Gate:
    """ASGI middleware that lets callers in, and leaves them and their tenant in the request's state."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (self._keyring.required and is_open(scope["path"])):
            try:
                caller = self._keyring.identify(scope["headers"])
                _refuse_foreign_pages(scope)
            except OctavoError as error:
                await response_to(scope, error)(scope, receive, send)
                return
            scope.setdefault("state", {}).update(caller=caller, tenant=caller.tenant)
        await self._app(scope, receive, send)


def _refuse_foreign_pages(scope: Scope) -> None:
    """A page of another site must not make its reader's browser use a server that only that reader can reach."""
    if scope["method"] == "POST" and _is_foreign(dict(scope["headers"])):
        raise Forbidden("requests that a page of another site makes are refused; send them from a program")


def _is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Browsers say where a request comes from, but to addresses without TLS in `Origin` alone. Programs say nothing."""
    if (site := headers.get(b"sec-fetch-site")) is not None:
        return site in (b"cross-site", b"same-site")
    origin = headers.get(b"origin")
    return origin is not None and origin.partition(b"://")[2] != headers.get(b"host")


def require_operator(request: Request) -> None:
    """A dependency of routes that show or change what concerns all tenants. Raises `Forbidden`."""
    caller: Caller = request.state.caller
    if not caller.operator:
        raise Forbidden(
            f"{request.url.path} concerns all tenants and needs the admin key; start with --admin-key to have one"
        )


def is_open(path: str) -> bool:
    """Whether `path` is served without a key."""
    return path in OPEN or path.startswith("/dashboard/")


def _key_in(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def _digest(key: str | bytes) -> bytes:
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()
