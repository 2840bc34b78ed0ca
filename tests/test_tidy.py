"""Tidy: the house rules that a linter does not know, each with the reason it exists."""

import ast
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvasir_core", "kvasir_scenario", "kvasir_sim", "kvasir_rt")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
OTHERS = sorted(
    path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
FUNCTION_LINES_MAX = 60  # One screen.
MODULE_LINES_MAX = 400  # One sitting.
UNFINISHED = ("FIX" + "ME", "TO" + "DO", "XX" + "X")  # Spelt so that this file is tidy itself.


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_empty_package(path: Path) -> bool:
    return path.name == "__init__.py" and not path.read_text().strip()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_enough_to_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX


@pytest.mark.parametrize("path", MODULES + OTHERS, ids=name_of)
def test_a_module_says_what_it_is_for_and_is_finished(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    assert ast.get_docstring(tree) or is_empty_package(path), "say what the module is for"
    for word in UNFINISHED:
        assert word not in source, f"{word} is for before the merge"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} does not fit on a screen"


def test_the_codemap_names_every_module() -> None:
    """By a path that no other module ends with: `ring.py` will do, `swarm/events.py` must be told.

    A module is found in ARCHITECTURE.md as any unambiguous end of its path, between backticks.
    """
    codemap = (ROOT / "ARCHITECTURE.md").read_text()
    names = [name_of(path) for path in MODULES if path.name != "__init__.py"]
    ends = Counter(end for name in names for end in ends_of(name))
    missing = [
        name
        for name in names
        if not any(f"`{end}`" in codemap for end in ends_of(name) if ends[end] == 1)
    ]
    assert not missing


def ends_of(name: str) -> list[str]:
    """`a/b/c.py` ends with itself, `b/c.py` and `c.py`."""
    parts = PurePosixPath(name).parts
    return ["/".join(parts[k:]) for k in range(len(parts))]


def test_the_codemap_names_no_module_that_is_gone() -> None:
    codemap = (ROOT / "ARCHITECTURE.md").read_text()
    known = {end for path in MODULES + OTHERS for end in ends_of(name_of(path))}
    named = {word for word in codemap.split("`")[1::2] if word.endswith(".py")}
    assert not {word for word in named if word not in known and not (ROOT / word).exists()}
