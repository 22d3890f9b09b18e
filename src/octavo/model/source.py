"""MODEL, as the user wrote it, to a local directory of safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from octavo.errors import ModelNotFound, ModelRefused, show
from octavo.model.pull import ALIASES, Notice, pull

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


def resolve(model: str, home: Path, progress: Notice | None = None) -> Path:
    """The directory of `model`: an alias, a directory, a `.gguf` file (converted once) or a hub id.

    An alias wins over a directory of the same name; write `./name` for the directory. `progress` receives a
    line per slow phase. Raises `ModelNotFound` and `ModelRefused`.
    """
    if model in ALIASES:
        return _converted(pull(model, home, progress), home, progress)
    path = Path(model).expanduser()
    if model and _is(path.is_dir):
        return path
    if _is(path.is_file):
        if path.suffix.lower() == ".gguf":
            return _converted(path, home, progress)
        raise ModelRefused(
            f"model={model!r} is a file that is not .gguf; pass the directory that holds the model's "
            "config.json and .safetensors files",
            param="model",
        )
    if _HUB_ID.fullmatch(model) and path.suffix.lower() != ".gguf":
        return _from_hub(model, progress)
    raise ModelNotFound(
        f"model={show(model)} is no alias ({', '.join(ALIASES)}), no directory, no .gguf file on this machine "
        "and no hub id (owner/name)",
        param="model",
    )


def _is(test: Callable[[], bool]) -> bool:
    """Whether `test` of a path holds; it does not for what can be no path, such as a name too long."""
    try:
        return test()
    except (OSError, ValueError):
        return False


def _converted(gguf: Path, home: Path, progress: Notice | None) -> Path:
    # Here and not above: `octavo --help` and a hub id need no GGUF reader.
    from octavo.model.convert import convert

    return convert(gguf, home, progress)


def _from_hub(model: str, progress: Notice | None) -> Path:
    """Download (or find in the hub's own cache) everything but pickle weights and code."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if progress:
        progress(f"Fetching {model} from the Hugging Face hub unless it is cached ...")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"model={model!r} is gated: accept its terms on the hub and log in", param="model"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"model={model!r} is neither a directory here nor a repository on the hub (or it is private)",
            param="model",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"model={model!r} is no directory here and the hub cannot be reached ({reason}); connect to the "
            f"network once, or pass a directory, a .gguf file or an alias ({', '.join(ALIASES)})",
            param="model",
        ) from error
