"""Frozen configuration of a server: what it adds to that of its engine."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import MOST, parse_bytes
from octavo.errors import ConfigError, show

ADMIN = "admin"
"""The tenant of the admin key."""


@dataclass(frozen=True)
class ServerConfig:
    """How one engine is served over HTTP. Sizes are bytes, times seconds. Raises `ConfigError` on an impossible value.

    | field | meaning |
    |---|---|
    | served_model_names | what requests may call the model; none given: its MODEL |
    | api_keys | key → name of the tenant it belongs to; none: everybody is let in |
    | admin_key | the key of who may see and change what concerns all tenants |
    | share_prefixes | all tenants share one cache namespace |
    | max_body | the longest body of a request |
    | max_bodies | what the bodies of all requests may hold together |
    | max_messages | the most messages of a conversation |
    | body_timeout | how long the headers, and then the body, of a request may take to arrive |
    | send_timeout | how long a client may leave what it was sent unread before its request is dropped |
    | max_connections | open connections; further ones are turned away |
    | stall_timeout | queued work without a finished step for this long turns /health to 503 |
    | log_json | one JSON object per line of the log |
    | log_prompts | prompts and answers may be logged |
    | request_log | a file that gets a line per answered request: lengths, block hashes and times, no text |
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    share_prefixes: bool = False
    max_body: int = 4 * 1024**2
    max_bodies: int = 256 * 1024**2
    max_messages: int = 10_000
    body_timeout: float = 30.0
    send_timeout: float = 30.0
    max_connections: int = 1000
    stall_timeout: float = 60.0
    log_json: bool = False
    log_prompts: bool = False
    request_log: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("port", 0),
            ("max_body", 1),
            ("max_bodies", 1),
            ("max_messages", 1),
            ("max_connections", 1),
        ):
            value = getattr(self, name)
            most = 65535 if name == "port" else MOST
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(
                    f"{name}={show(value)} must be a whole number from {least} to {most}", param=name
                )
        for name in ("body_timeout", "send_timeout", "stall_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name}={show(value)} must be seconds, more than 0", param=name)
        if self.max_bodies < self.max_body:
            raise ConfigError(
                f"max_bodies={self.max_bodies} must be at least max_body={self.max_body}, or no body of that size "
                "could ever be read",
                param="max_bodies",
            )
        for key in (*self.api_keys, *([] if self.admin_key is None else [self.admin_key])):
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    "a key must be printable ASCII without spaces, and not empty", param="api_key"
                )
        if ADMIN in self.api_keys.values():
            raise ConfigError(
                f"the tenant {ADMIN!r} is that of --admin-key; name it otherwise", param="api_key_file"
            )
        if self.admin_key is not None and self.admin_key in self.api_keys:
            raise ConfigError("the admin key is also a tenant's; make another one", param="admin_key")
        if self.share_prefixes and not self.api_keys:
            raise ConfigError(
                "share_prefixes does nothing without keys of tenants; leave it out", param="share_prefixes"
            )
        if any(not name for name in self.served_model_names):
            raise ConfigError("served_model_name must not be empty", param="served_model_name")

    @classmethod
    def create(
        cls,
        *,
        api_key: Sequence[str] = (),
        api_key_file: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> ServerConfig:
        """Build from user input: sizes may be strings, and each key of `api_key` is a tenant of its own.

        Lines of `api_key_file` are `tenant key`; empty ones and those that begin with # are skipped.
        """
        keys = {key: tenant_of_key(key) for key in api_key}
        if api_key_file is not None:
            keys |= _read_keys(Path(api_key_file))
        for name in ("max_body", "max_bodies"):
            if options.get(name) is not None:
                options[name] = parse_bytes(options[name], name)
        return cls(api_keys=keys, **options)


def tenant_of_key(key: str) -> str:
    """The name of the tenant of a key that came without one. It does not give the key away."""
    return f"key-{hashlib.sha256(b'octavo tenant ' + key.encode()).hexdigest()[:8]}"


def _read_keys(path: Path) -> dict[str, str]:
    keys: dict[str, str] = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"api_key_file={show(str(path))} cannot be read: {error}", param="api_key_file"
        ) from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[1] in keys:
            wrong = "the key of another line again" if len(words) == 2 else "not `tenant key`"
            raise ConfigError(f"{path} line {number} is {wrong}", param="api_key_file")
        keys[words[1]] = words[0]
    if not keys:
        raise ConfigError(f"{path} holds no keys; write lines of `tenant key`", param="api_key_file")
    return keys
