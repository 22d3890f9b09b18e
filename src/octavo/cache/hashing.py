"""Content addresses: chained SHA-256 over a namespace and the token ids of one block after the other.

A digest finds a block; it never proves one (see `prefix`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides token ids decides K and V. A `salt` of None and `""` are two different namespaces."""

    model: str = ""
    tenant: str = ""
    salt: str | None = None
    adapter: str | None = None

    def encode(self) -> bytes:
        """Typed and length-prefixed, so that no two namespaces share an encoding."""
        parts = []
        for value in (self.model, self.tenant, self.salt, self.adapter):
            data = b"" if value is None else value.encode("utf-8", "surrogatepass")
            parts.append((b"\0" if value is None else b"\1") + len(data).to_bytes(8, "little") + data)
        return b"".join(parts)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as 4-byte integers: the exact content that a hit is compared with."""
    return array("i", token_ids).tobytes()


class Hasher:
    """`bits` below 256 cut every digest: a test hook that makes collisions common."""

    def __init__(self, bits: int = 256) -> None:
        self._length = bits // 8

    def root(self, namespace: Namespace) -> bytes:
        """Digest that every chain of `namespace` starts from."""
        return hashlib.sha256(namespace.encode()).digest()[: self._length]

    def chain(self, parent: bytes, tokens: bytes) -> bytes:
        """Digest of the block with packed `tokens` that follows `parent`."""
        return hashlib.sha256(parent + tokens).digest()[: self._length]
