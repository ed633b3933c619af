"""The package itself: its names, its imports, its shields."""

import ast
import sys
from pathlib import Path

import pytest

import actors
import actors.testing

ROOT = Path(actors.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("package", [actors, actors.testing])
def test_exported_names_are_sorted_and_complete(package) -> None:
    public = [name for name in vars(package) if not name.startswith("_") and name != "testing"]
    assert package.__all__ == sorted(public)


def test_every_module_is_private_and_re_exported() -> None:
    assert [path.name for path in SOURCES if path.stem != "__init__" and not path.name.startswith("_")] == []
    assert (ROOT / "py.typed").exists()


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_imports_are_trio_and_the_standard_library(path) -> None:
    assert imported(path) <= {"trio"} | set(sys.stdlib_module_names) - {"asyncio"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_shield_says_its_bound(path) -> None:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert "shield=True" not in line or "# bounded:" in line, f"{path}:{number}"
