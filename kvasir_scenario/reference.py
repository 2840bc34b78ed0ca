"""The scenario reference, docs/scenario.md: written from the schema, so that it cannot lag behind.

python -m kvasir_scenario.reference > docs/scenario.md
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from kvasir_scenario.schema import Scenario

INTRO = """# The scenario file

One YAML file drives `kvasir-sim` and `kvasir-rt`. This page is written from the schema
(`python -m kvasir_scenario.reference`); `kvasir-sim --schema` prints the same as a JSON Schema, for
editors. Unknown keys, wrong units and impossible values are refused before anything runs, with
file, line, key, value and what would be right. Any key can be set from the command line:
`--set ring.window=1`. Relative paths start at the scenario file; `${KVASIR_DATA}` is expanded.

Times are seconds, sizes bytes or tokens, rates per second, unless a key's name says otherwise.
"""

TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
}
DIGITS = 6

Node = Mapping[str, Any]


def scenario_reference() -> str:
    """The page."""
    schema = Scenario.model_json_schema()
    definitions: Mapping[str, Node] = schema["$defs"]
    parts = [INTRO, "## The whole file\n", _table(schema, definitions)]
    for name in _in_order(schema, definitions):
        definition = definitions[name]
        parts += [f"## {_title(name, definition)}\n"]
        if description := definition.get("description"):
            parts.append(f"{_sentence(description)}\n")
        parts.append(_table(definition, definitions))
    return "\n".join(parts)


def _title(name: str, definition: Node) -> str:
    kind = definition.get("properties", {}).get("kind", {}).get("const")
    return f"{name} (`kind: {kind}`)" if kind else name


def _in_order(schema: Node, definitions: Mapping[str, Node]) -> list[str]:
    """Sections as a reader of the file meets them."""
    found: list[str] = []

    def walk(node: Any) -> None:
        for name in _references(node):
            if name not in found:
                found.append(name)
                walk(definitions[name])

    walk(schema["properties"])
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        for key, value in node.items():
            if key not in {"discriminator", "$defs"}:
                yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _table(section: Node, definitions: Mapping[str, Node]) -> str:
    required = set(section.get("required", ()))
    lines = ["| key | meaning | value | default |", "|---|---|---|---|"]
    for key, node in section.get("properties", {}).items():
        if "const" in node:
            continue  # The kind, which stands in the title.
        meaning = _sentence(node["description"]) if "description" in node else ""
        default = "required" if key in required else _value(node.get("default"))
        cells = (f"`{key}`", meaning, _kind(node, definitions), default)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    flat = " ".join(text.split())
    return flat if flat.endswith((".", ":", "!", "?")) else f"{flat}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return "as below" if value else "none"
    if isinstance(value, list | tuple):
        return "none" if not value else f"`{list(value)}`"
    return f"`{value:.{DIGITS}g}`" if isinstance(value, float) else f"`{value}`"


def _kind(node: Node, definitions: Mapping[str, Node]) -> str:
    """What may stand there, in words."""
    if "$ref" in node:
        return f"[{_link(node['$ref'], definitions)}"
    for several in ("anyOf", "oneOf"):
        if several in node:
            kinds = [_kind(one, definitions) for one in node[several] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in node:
        return " or ".join(f"`{value}`" for value in node["enum"])
    if "const" in node:
        return f"`{node['const']}`"
    match node.get("type"):
        case "array":
            return _list(node, definitions)
        case "object":
            values = [*node.get("patternProperties", {}).values()]
            if isinstance(other := node.get("additionalProperties"), dict):
                values.append(other)
            inner = _kind(values[0], definitions) if values else ""
            return f"map of names to {inner}" if inner else "map"
        case kind:
            return TYPES.get(str(kind), "any value") + _limits(node)


def _list(node: Node, definitions: Mapping[str, Node]) -> str:
    if "prefixItems" in node:
        parts = ", ".join(_kind(item, definitions) for item in node["prefixItems"])
        return f"[{parts}]"
    return f"list of {_kind(node.get('items', {}), definitions)}"


def _link(reference: str, definitions: Mapping[str, Node]) -> str:
    name = reference.rpartition("/")[2]
    anchor = _title(name, definitions[name]).lower()
    kept = "".join(sign for sign in anchor if sign.isalnum() or sign in " -_")
    return f"{name}](#{kept.replace(' ', '-')})"


def _limits(node: Node) -> str:
    words = []
    for key, word in (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    ):
        if key in node:
            words.append(
                f"{word} {node[key]:,.{DIGITS}g}" if node[key] < 1e6 else f"{word} {node[key]:.0e}"
            )
    return f", {', '.join(words)}" if words else ""


if __name__ == "__main__":
    sys.stdout.write(scenario_reference())
