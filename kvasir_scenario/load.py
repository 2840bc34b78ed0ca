"""From a file to a checked scenario: read, override, validate, and complain by file and line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from kvasir_core.errors import KvasirError, ScenarioError
from kvasir_scenario.complaints import found
from kvasir_scenario.data_paths import expand_path
from kvasir_scenario.origin import Origin
from kvasir_scenario.overrides import apply_change, apply_settings
from kvasir_scenario.planning import Planner, plan_of
from kvasir_scenario.schema import Scenario
from kvasir_scenario.validate import scenario_of
from kvasir_scenario.variants import variants_of
from kvasir_scenario.yaml_tree import FILE_BYTES_MAX, read_tree

SHAPE_READERS = "kvasir.shape_readers"
ShapeReader = Callable[[Path], Mapping[str, int | str | bool]]
"""Reads keys of section `model` (layers, context, hidden, ...) from a model file."""


def load_scenario(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    seed: int | None = None,
    planner: Planner | None = None,
    read_shape: ShapeReader | None = None,
) -> Scenario:
    """Reads and checks a scenario file, its variants and its plan.

    Args:
        path: The YAML file.
        overrides: `key.path=value` each, as after `--set`; the value is YAML.
        seed: Overrides `run.seed`.
        planner: Solves `layers: auto`; without it such a scenario is refused.
        read_shape: Reads the shape of `model.path` where the scenario gives no layers itself;
            without it the runtime's, if that is installed.

    Raises:
        ScenarioError: One line per complaint: file, line, key, what was found, what is right.
    """
    return load_text(
        read_text(path),
        label=str(path),
        base=path.parent,
        overrides=overrides,
        seed=seed,
        planner=planner,
        read_shape=read_shape,
    )


def load_text(
    text: str,
    *,
    label: str = "scenario",
    base: Path = Path(),
    overrides: Sequence[str] = (),
    seed: int | None = None,
    planner: Planner | None = None,
    read_shape: ShapeReader | None = None,
) -> Scenario:
    """As `load_scenario`, from text; `label` stands for the file's name in messages."""
    tree = read_tree(text, label)
    if not isinstance(tree.data, dict):
        raise ScenarioError(
            f"{label}:1: (top level): found {found(tree.data)}; "
            "a scenario is a map with the keys model, ring, workload"
        )
    origin = Origin(label=label, base=base, data=tree.data, lines=tree.lines)
    origin = apply_settings(origin, overrides)
    if seed is not None:
        origin = apply_change(origin, "run.seed", seed, f"--seed {seed}")
    scenario = scenario_of(_with_shape(origin, read_shape))
    plan_of(scenario, planner)
    for _, variant in variants_of(scenario):
        plan_of(variant, planner)
    return scenario


def _with_shape(origin: Origin, read_shape: ShapeReader | None) -> Origin:
    """The data with the model file's shape below the scenario's own keys."""
    model = origin.data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("path"), str):
        return origin
    if model.get("layers") is not None or model.get("preset") is not None:
        return origin
    if read_shape is None:
        read_shape = _installed_reader(origin)
    try:
        shape = read_shape(expand_path(model["path"], origin.base))
    except KvasirError as error:
        raise origin.error(("model", "path"), str(error)) from None
    given = {key: value for key, value in model.items() if value is not None}
    return replace(origin, data={**origin.data, "model": {**shape, **given}})


def _installed_reader(origin: Origin) -> ShapeReader:
    """The runtime's, which says by an entry point that it has one: no shell imports the other."""
    for entry in entry_points(group=SHAPE_READERS):
        try:
            reader: ShapeReader = entry.load()
        except ImportError:
            continue  # The runtime is there, and what it is built on is not.
        return reader
    raise origin.error(
        ("model", "path"),
        "a model file is read by the runtime, which is not installed; install kvasir[rt], or give "
        "layers (and hidden, experts, ... where they matter) or a preset",
    )


def resolve_path(scenario: Scenario, text: str) -> Path:
    """A path of the scenario as the system needs it: variables expanded, base directory applied."""
    return expand_path(text, scenario.base)


def read_text(path: Path) -> str:
    """A scenario file's text.

    Raises:
        ScenarioError: It cannot be read, is too long, or is no UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ScenarioError(f"{str(path)!r}: is no path: {error}") from None
    if len(raw) > FILE_BYTES_MAX:
        raise ScenarioError(
            f"{path}: more than {FILE_BYTES_MAX} bytes; a scenario is smaller "
            "(put a long trace into a CSV file: workload.path)"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ScenarioError(f"{path}:{line}: is not UTF-8 text") from None
