"""How large a test run is: a few seconds by default, everything with `OCTAVO_TEST_SIZE=full`."""

import os
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

FULL = os.environ.get("OCTAVO_TEST_SIZE") == "full"
DATA = Path(os.environ.get("OCTAVO_DATA", Path(__file__).parents[3] / "shared" / "data"))


def sized(small: T, full: T) -> T:
    return full if FULL else small
