"""Findings kept in files between runs, so that a start pays for each only once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Kept:
    """One finding of a `kind`, in a `file` under the directory `home`, for as long as none of the `facts` it depends on
    changes."""

    def __init__(self, home: Path, kind: str, facts: Sequence[object]) -> None:
        key = hashlib.sha256(json.dumps(list(facts), default=str).encode()).hexdigest()
        self.file = home / kind / f"{key}.json"

    def load(self) -> dict[str, Any]:
        """What was kept; empty if nothing was, or if it cannot be read."""
        try:
            found = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def save(self, finding: dict[str, Any]) -> bool:
        """Keep `finding`; not being able to is no error. Returns whether it was kept."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            part = self.file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(finding))
            part.replace(self.file)
        except OSError:
            return False
        return True
