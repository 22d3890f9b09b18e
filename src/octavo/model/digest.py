"""SHA-256 of files, remembered by path, size and time of change so that a second start need not read them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path


def file_sha256(path: Path, home: Path) -> str:
    """Hex SHA-256 of `path`. Computed once per content as told by (real path, size, mtime), kept in
    `home/digests`."""
    real = path.resolve()
    status = real.stat()
    fingerprint = [str(real), status.st_size, status.st_mtime_ns]
    note = home / "digests" / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(note.read_text())
        if known["fingerprint"] == fingerprint:
            return str(known["sha256"])
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with (
        contextlib.suppress(OSError),
        atomic_file(note) as draft,
    ):  # a read-only home costs time, not the start
        draft.write_text(json.dumps({"fingerprint": fingerprint, "sha256": digest}))
    return digest


def weights_digest(path: Path, home: Path) -> str:
    """Hex SHA-256 over `config.json` and every weight file of the model directory `path`, names included."""
    total = hashlib.sha256()
    for file in sorted([path / "config.json", *path.glob("*.safetensors")]):
        total.update(f"{file.name}:{file_sha256(file, home)}\n".encode())
    return total.hexdigest()


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """A private path beside `target` that becomes `target` when the block ends well and disappears when not.

    Many processes may write the same target: each has its own draft and the last complete one stays.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield draft
        _flush(draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """As `atomic_file`, for a directory; when another process was first, its complete directory stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as name:
        draft = Path(name) / target.name
        draft.mkdir()
        yield draft
        for file in draft.iterdir():
            _flush(file)
        try:
            draft.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _flush(file: Path) -> None:
    """To the disk itself: a rename must not outlive the content across a power cut."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
