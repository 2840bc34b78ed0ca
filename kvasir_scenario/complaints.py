"""From the validation library's errors to sentences: what was found, and what would be right."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvasir_core.errors import ScenarioError
from kvasir_scenario.origin import Origin
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_types import Section, did_you_mean
from kvasir_scenario.yaml_tree import KeyPath, dotted

COMPLAINTS_MAX = 8  # More does not help anybody.
FOUND_CHARACTERS_MAX = 60

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a map of keys",
    "model_type": "a map of keys",
    "model_attributes_type": "a map of keys",
    "finite_number": "a finite number",
}


def scenario_error(error: ValidationError, origin: Origin) -> ScenarioError:
    """One line for each complaint, `file:line: key: ...`, in the schema's order."""
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        if detail["type"] == "too_short" and detail["input"]:
            continue  # Only because its entries are wrong, and they are told.
        path, message = _complaint(detail, origin.data)
        line = f"{origin.place(path)}: {dotted(path)}: {message}"
        if line not in lines:
            lines.append(line)
    more = len(lines) - COMPLAINTS_MAX
    rest = [f"{origin.label}: and {more} more"] if more > 0 else []
    return ScenarioError("\n".join(lines[:COMPLAINTS_MAX] + rest))


def first_complaint(error: ValidationError) -> str:
    """The first error of a document that a program wrote, by its key."""
    details = error.errors(include_url=False)
    detail = details[0]
    rest = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    if detail["type"] == "json_invalid":
        why = str(detail.get("ctx", {}).get("error", "it is cut off or damaged"))
        return f"it is no JSON: {why[:200]}"
    key = dotted(detail["loc"])
    if detail["type"] == "missing":
        said = "missing"
    elif detail["type"] == "extra_forbidden":
        said = "unknown key"
    else:
        said = f"found {found(detail['input'])}; {_rule(detail, detail.get('ctx', {}))}"
    return f"{key}: {said}{rest}" if key else f"{said}{rest}"


def _complaint(detail: ErrorDetails, data: Any) -> tuple[KeyPath, str]:
    context = detail.get("ctx", {})
    path = _path(detail, data)
    if detail["type"] == "unknown_key":
        key = str(context["path"][0])
        return (*path, key), detail["msg"].replace("; ", f"; {_home(key, path)}", 1)
    if detail["type"] == "rule":
        return (*path, *context["path"]), detail["msg"]
    if detail["type"] == "missing":
        if isinstance(path[-1], int):
            return path[:-1], f"found a list of {path[-1]}; it must have more entries"
        return path, "missing; this key has no default"
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_kind(path, detail, context)
    return path, f"found {found(detail['input'])}; {_rule(detail, context)}"


def _home(key: str, path: KeyPath) -> str:
    """Where an unknown key would be known."""
    if "." in key:
        return "dotted keys are for --set and what_if, here maps are nested. "
    for name, field in Scenario.model_fields.items():
        section = field.annotation
        if path == (name,) or not isinstance(section, type) or not issubclass(section, Section):
            continue
        if key in section.model_fields:
            return f"`{name}` has such a key. "
    return ""


def _path(detail: ErrorDetails, data: Any) -> KeyPath:
    """The library's location without the tags of unions, which are not keys of the file."""
    path: list[str | int] = []
    for depth, part in enumerate(detail["loc"]):
        if _has(data, part):
            data = data[part]
        elif depth < len(detail["loc"]) - 1 or detail["type"] != "missing":
            continue
        path.append(part)
    return tuple(path)


def _has(data: Any, part: str | int) -> bool:
    if isinstance(data, Mapping):
        return part in data
    return isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)


def _wrong_kind(
    path: KeyPath, detail: ErrorDetails, context: Mapping[str, Any]
) -> tuple[KeyPath, str]:
    kinds = [tag.strip(" '") for tag in str(context.get("expected_tags", "")).split(",")]
    if detail["type"] == "union_tag_not_found":
        if isinstance(detail["input"], Mapping):
            return (*path, "kind"), "missing; say which kind it is"
        return path, f"found {found(detail['input'])}; it must be a map with the key `kind`"
    tag = str(context.get("tag", ""))
    return (*path, "kind"), f"found {found(tag)}; {did_you_mean(tag, kinds)}"


def _rule(detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    kind = detail["type"]
    if kind in _WANTED:
        return f"it must be {_WANTED[kind]}{_hint(kind, detail['input'])}"
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("more than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
    }
    if kind in bounds:
        word, key = bounds[kind]
        return f"it must be {word} {_number(context[key])}"
    if kind == "literal_error":
        words = str(context["expected"]).replace(" or ", ", ").split(",")
        return did_you_mean(str(detail["input"]), [word.strip(" '") for word in words])
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        word = "at least" if kind == "too_short" else "at most"
        return f"it must have {word} {bound} entries"
    message = detail["msg"]
    return message[:1].lower() + message[1:]


def _hint(kind: str, value: Any) -> str:
    """For what YAML readers trip over."""
    if kind == "bool_type" and isinstance(value, str):
        return " (yes, no, on and off are text in YAML 1.2)"
    if not isinstance(value, str) or kind not in ("int_type", "float_type"):
        return ""
    if ":" in value:
        return "; times such as 1:30 are not read, write seconds"
    if value.lstrip("+-").startswith("0") and value.lstrip("+-").isdecimal():
        return f"; leave out the leading zero, or write 0o{value.lstrip('+-0') or 0} for octal"
    if value[:1].isdecimal() and value[-1:].isalpha():
        return "; the unit is part of the key's name, write the number alone"
    return ""


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def found(value: Any) -> str:
    """The value as the user may have written it, short."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, Mapping):
        return f"a map with the keys {', '.join(map(str, list(value)[:5])) or '(none)'}"[:200]
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
    if len(text) > FOUND_CHARACTERS_MAX:
        text = text[:FOUND_CHARACTERS_MAX] + "..."
    return text.replace("\n", " ")
