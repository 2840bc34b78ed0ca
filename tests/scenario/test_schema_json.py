"""The JSON Schema for editors, held to an independent validator and to our own reader."""

from typing import Any

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario.load import load_text
from kvasir_scenario.schema import json_schema
from kvasir_scenario.yaml_tree import read_tree

jsonschema = pytest.importorskip("jsonschema", reason="needs the package jsonschema")

HEAD = "model: {layers: 8, context: 512}\n"
RING = "ring: {stages: 2}\n"
LOAD = "workload: {kind: trace, requests: [[0, 1, 10]]}\n"
VALID = [
    HEAD + RING + LOAD,
    "model: {preset: llama-3-8b}\n" + RING + LOAD,
    HEAD + "ring: {stages: [{layers: 3}, {layers: [3, 8]}], credits: unbounded, window: 3}\n" + LOAD,
    HEAD + RING + "workload: {kind: closed, users: 9, requests: 5, think_s: {uniform: [1, 2]},"
    " prompt_tokens: {percentiles: {50: 9}}, output_tokens: 3}\n",
    HEAD + RING + LOAD + "devices: {a: {preset: x}}\nexperts: null\nrun: {horizon_s: null}\n"
    "what_if: {a: {ring.window: 1}}\nfaults: [{kind: link_stop, hop: any, at_s: 1, for_s: 2}]\n",
]  # fmt: skip
INVALID = [
    RING + LOAD,
    "model: {context: 512}\n" + RING + LOAD,
    "model: {preset: llama-3-8}\n" + RING + LOAD,
    HEAD + "ring: {stages: 1}\n" + LOAD,
    HEAD + "ring: {stages: [{layers: 8}]}\n" + LOAD,
    HEAD + "ring: {stages: 2, row_width: 0}\n" + LOAD,
    HEAD + "ring: {stages: 2, row_width: true}\n" + LOAD,
    HEAD + "ring: {stages: 2, row_widht: 9}\n" + LOAD,
    HEAD + "ring: {stages: 2, credits: none}\n" + LOAD,
    HEAD + RING + "workload: {kind: trace, requests: []}\n",
    HEAD + RING + "workload: {kind: trace, requests: [[0, 0, 1]]}\n",
    HEAD + RING + "workload: {kind: trace, requests: [[0, 1]]}\n",
    HEAD + RING + "workload: {kind: posson}\n",
    HEAD + RING + LOAD + "run: {seed: -1}\n",
    HEAD + RING + LOAD + "name: ../up\n",
    HEAD + RING + LOAD + "faults: [{kind: stage_dead}]\n",
]


def is_valid(text: str) -> bool:
    validator: Any = jsonschema.Draft202012Validator(json_schema())
    return bool(validator.is_valid(read_tree(text, "s.yaml").data))


def test_the_json_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("text", VALID)
def test_what_we_read_an_editor_accepts(text: str) -> None:
    load_text(text)
    assert is_valid(text)


@pytest.mark.parametrize("text", INVALID)
def test_what_an_editor_marks_we_refuse(text: str) -> None:
    assert not is_valid(text)
    with pytest.raises(ScenarioError):
        load_text(text)


def test_no_constraint_is_lost_on_the_way() -> None:
    """The library writes a bound that it cannot place as `ge` or as the length of a list."""
    lost = ("ge", "gt", "le", "lt")

    def walk(schema: Any, name: str) -> None:
        if isinstance(schema, dict):
            if name != "properties":
                assert not [key for key in lost if key in schema], schema
                assert schema.get("type") != "array" or "maxLength" not in schema, schema
            for key, value in schema.items():
                walk(value, key)
        elif isinstance(schema, list):
            for item in schema:
                walk(item, name)

    walk(json_schema(), "")
