"""Chat templates: Jinja from the model's file, in a sandbox, with users' text kept apart.

A template mixes its own control tokens with what users wrote, in one string. To tell them apart
afterwards, a *guard* (a Unicode noncharacter that occurs in neither) is put into every control
token's text that users' strings contain, before rendering. The template sees ordinary strings, so
its own logic works; in the result only the template's control tokens are intact, and the caller
takes the guards out of the text between them.
"""

import datetime as dt
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kvasir_rt.errors import ChatError

GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode's noncharacters.
DEPTH_MAX = 32  # Of nested lists and objects in a message (tool calls).


class ChatTemplate:
    """A compiled template; `constants` are its variables `bos_token` and `eos_token`."""

    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        self._source = source
        self._constants = dict(constants)
        self._compiled: Any = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        guarded: Collection[str],
    ) -> tuple[str, str]:
        """The conversation up to the assistant's answer, and the guard that stands in it.

        Args:
            messages: Each with `role` and `content` (text, or parts of type "text").
            tools: Passed on to the template.
            guarded: Texts of control tokens that users must not be able to write.

        Raises:
            ChatError: No messages, a part that is not text, or the template refuses.
        """
        from jinja2 import TemplateError

        if not messages:
            raise ChatError("there must be at least one message")
        plain = [_with_plain_content(message) for message in messages]
        guard = self._guard(plain, tools) if guarded else ""
        shield = _Shield(guarded, guard)
        try:
            text: str = self._template().render(
                messages=shield.protect(plain),
                tools=shield.protect(list(tools)) if tools else None,
                add_generation_prompt=True,
                **self._constants,
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatError(f"the model's chat template refuses them: {error}") from error
        return text, guard

    def _template(self) -> Any:
        if self._compiled is None:
            from jinja2.sandbox import ImmutableSandboxedEnvironment

            environment = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _raise
            environment.globals["strftime_now"] = _now
            self._compiled = environment.from_string(self._source)
        return self._compiled

    def _guard(self, messages: list[dict[str, Any]], tools: Sequence[Any] | None) -> str:
        text = self._source + json.dumps([messages, tools], ensure_ascii=False, default=str)
        for guard in GUARDS:
            if guard not in text:
                return guard
        raise ChatError("the messages use every Unicode noncharacter; they cannot be told apart")


class _Shield:
    """Breaks control tokens' texts in users' strings: a guard after the first character."""

    def __init__(self, guarded: Collection[str], guard: str) -> None:
        ordered = sorted(guarded, key=lambda text: (-len(text), text))
        self._finder = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._starts = {text[:cut] for text in guarded for cut in range(1, len(text))}
        self._starts_length = max(map(len, self._starts), default=0)
        self._guard = guard

    def protect(self, value: Any, depth: int = 0) -> Any:
        if depth > DEPTH_MAX:
            raise ChatError(f"a message is nested deeper than {DEPTH_MAX}")
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {
                self._text(str(key)): self.protect(each, depth + 1) for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.protect(each, depth + 1) for each in value]
        return value

    def _text(self, text: str) -> str:
        if self._finder is None:
            return text
        while self._finder.search(text):  # Again, since texts of two tokens may overlap.
            text = self._finder.sub(lambda found: found[0][0] + self._guard + found[0][1:], text)
        # What another string may continue to a control token is closed as well.
        for length in range(1, min(self._starts_length, len(text)) + 1):
            if text[-length:] in self._starts:
                return text + self._guard
        return text


def _with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    texts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatError(f"a message has a part of type {str(kind)[:40]!r}; only text is served")
        texts.append(str(part.get("text", "")))
    return {**message, "content": "".join(texts)}


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    # Jinja's own filter escapes for HTML, which no template for a model wants.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(pattern: str) -> str:
    return dt.datetime.now(tz=dt.UTC).strftime(pattern)
