"""Models that convert nothing and ignore nothing, and unions whose errors name the one field at fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator


class Strict(BaseModel):
    """Nothing is converted and nothing ignored."""

    model_config = ConfigDict(strict=True, extra="forbid")


def by_type(value: Any) -> str:
    """The tag of a member of a union by its JSON type. Tags in angle brackets are no part of a field's path."""
    return f"<{type(value).__name__}>"


def by_key(key: str) -> Callable[[Any], str]:
    """As `by_type`, by the value under `key`."""
    return lambda value: f"<{value.get(key) if isinstance(value, Mapping) else None}>"


def one_of(kind: Callable[[Any], str], message: str) -> Discriminator:
    """The member whose tag `kind` makes of a value; `message` says what it must be where there is none."""
    return Discriminator(kind, custom_error_type="kind", custom_error_message=message)
