"""ARCHITECTURE.md is a map: it must show what is there, and the way imports really go."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "octavo"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def modules() -> set[str]:
    """Every module with content, but for the command line's and the benchmarks' inner parts."""
    found = set()
    for file in SOURCE.rglob("*.py"):
        parts = ("octavo", *file.relative_to(SOURCE).with_suffix("").parts)
        if parts[-1] != "__init__":
            found.add(".".join(parts))
    return found


def order() -> list[str]:
    return re.findall(r"^\| `(octavo[\w.]*)` \|", TEXT, re.MULTILINE)


def test_every_name_on_the_map_imports() -> None:
    names = set(re.findall(r"`(octavo(?:\.\w+)+)`", TEXT)) | set(re.findall(r"(octavo(?:\.\w+)+)", TEXT))
    assert len(names) > 30
    for name in names:
        importlib.import_module(name)


def test_every_module_is_on_the_map() -> None:
    rows = order()
    unnamed = {m for m in modules() if not any(m == row or m.startswith(row + ".") for row in rows)}
    assert not unnamed


def test_every_native_file_is_on_the_map() -> None:
    for file in (ROOT / "native").iterdir():
        assert file.name in TEXT or file.name.startswith("isa_"), file.name


def imports(module: str) -> set[str]:
    """Names of this package that `module` imports at run time."""
    path = SOURCE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("octavo"):
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


def test_imports_go_one_way() -> None:
    rows = order()

    def rank(module: str) -> int | None:
        return next((i for i, row in enumerate(rows) if module == row or module.startswith(row + ".")), None)

    for module in modules():
        here = rank(module)
        assert here is not None
        for name in imports(module):
            there = rank(name)
            assert there is None or there <= here, f"{module} imports {name}, which stands below it"
