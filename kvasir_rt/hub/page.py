"""The OpenAPI description as one page that needs no script and nothing from the network."""

import json
from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "pre{background:#f4f4f4;padding:.6em;overflow:auto}summary{cursor:pointer}"
    "code{font-size:95%}b{display:inline-block;min-width:4.5em}"
)


def docs_page(schema: dict[str, Any]) -> str:
    """HTML: every path with its parameters, body, answers; then every body's schema."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{_text(schema['info']['title'])}</title><style>{STYLE}</style>",
        f"<h1>{_text(schema['info']['title'])}</h1><p>{_text(schema['info']['description'])}</p>",
        "<p>For programs: <a href=openapi.json>openapi.json</a></p><h2>Paths</h2>",
    ]
    for path, methods in schema["paths"].items():
        parts += [_operation(path, method, found) for method, found in methods.items()]
    parts.append("<h2>Bodies</h2>")
    for name, body in schema["components"]["schemas"].items():
        shown = _text(json.dumps(body, indent=2))
        title = f"<details id={_text(name)}><summary>{_text(name)}</summary>"
        parts.append(f"{title}<pre>{shown}</pre></details>")
    return "\n".join(parts)


def _operation(path: str, method: str, found: dict[str, Any]) -> str:
    query = "".join(
        f"<li><code>{_text(each['name'])}</code> in the {_text(each['in'])}"
        f"{', required' if each.get('required') else ''}</li>"
        for each in found.get("parameters", ())
    )
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {})
    takes = f"<p>Body: {_links(body['schema'])}</p>" if body else ""
    answers = "".join(
        f"<li>{_text(status)}: {_text(answer.get('description', ''))} "
        f"{_links(answer.get('content', {}).get('application/json', {}).get('schema', {}))}</li>"
        for status, answer in found["responses"].items()
    )
    return (
        f"<details><summary><b>{_text(method.upper())}</b> <code>{_text(path)}</code> "
        f"{_text(found.get('description', ''))}</summary>"
        f"<ul>{query}</ul>{takes}<ul>{answers}</ul></details>"
    )


def _links(schema: dict[str, Any]) -> str:
    """Links to the bodies that a schema refers to."""
    references = [schema] if "$ref" in schema else schema.get("anyOf", [])
    names = [each["$ref"].rpartition("/")[2] for each in references if "$ref" in each]
    return " or ".join(f"<a href=#{_text(name)}>{_text(name)}</a>" for name in names)


def _text(value: str) -> str:
    return escape(str(value), quote=True)
