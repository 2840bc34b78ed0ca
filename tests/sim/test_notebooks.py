"""The notebooks: both forms of each say the same, were executed, and use the public API only.

That they run is up to `pytest --nbmake notebooks`, which `make check` calls.
"""

import ast
from pathlib import Path
from typing import Any

import pytest

jupytext = pytest.importorskip("jupytext", reason="needs the package jupytext")

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
PUBLIC = {"kvasir_sim", "matplotlib", "numpy", "pandas"}
STANDARD = {"json", "pathlib", "subprocess", "sys", "tempfile"}
PICTURES_MIN = 2


def cells(path: Path) -> list[Any]:
    found: list[Any] = jupytext.read(path)["cells"]
    return found


def test_there_are_the_five_stories() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05"]
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_say_the_same(name: str) -> None:
    script, notebook = (cells(FOLDER / f"{name}{suffix}") for suffix in (".py", ".ipynb"))
    assert [(each["cell_type"], each["source"]) for each in script] == [
        (each["cell_type"], each["source"]) for each in notebook
    ]


@pytest.mark.parametrize("name", NAMES)
def test_it_was_executed_in_order_and_shows_pictures(name: str) -> None:
    code = [each for each in cells(FOLDER / f"{name}.ipynb") if each["cell_type"] == "code"]
    assert [each["execution_count"] for each in code] == list(range(1, len(code) + 1))
    outputs = [output for each in code for output in each["outputs"]]
    kinds = [output["output_type"] for output in outputs]
    assert "error" not in kinds
    assert not [output for output in outputs if output.get("name") == "stderr"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= PICTURES_MIN


@pytest.mark.parametrize("name", NAMES)
def test_it_begins_with_a_heading_and_uses_the_public_api_only(name: str) -> None:
    first = cells(FOLDER / f"{name}.py")[0]
    assert first["cell_type"] == "markdown"
    assert first["source"].startswith("# ")
    modules = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            modules.add(node.module.split(".")[0])
            if node.module.startswith("kvasir"):
                assert node.module == "kvasir_sim"
    assert "kvasir_sim" in modules
    assert modules <= PUBLIC | STANDARD
