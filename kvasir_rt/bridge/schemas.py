"""What a request may say, checked before anything is done. What is not supported is refused.

A field of the OpenAI API that we do not support is accepted with its neutral value (null, or what
the API does when it is left out) and refused by name with any other. An unknown field is refused.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvasir_rt.bridge.errors import ApiError, bad_request
from kvasir_rt.bridge.limits import Limits

ROLES = ("system", "developer", "user", "assistant")
LOGPROBS_MAX = 20  # As the plan's result rows.
SEED_MAX = 2**63 - 1

# Fields of the API that are not supported, and the values that mean the same as leaving them out.
NEUTRAL_SHARED: dict[str, tuple[Any, ...]] = {
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "safety_identifier": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
}
NEUTRAL_COMPLETION = NEUTRAL_SHARED | {"suffix": ("",), "echo": (False,), "best_of": (1,)}
NEUTRAL_CHAT = NEUTRAL_SHARED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
}
NEUTRAL_STREAM = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

FormT = TypeVar("FormT", bound=msgspec.Struct)
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=2**31)]
Alternatives = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    include_usage: bool | None = None


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=SEED_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    max_tokens: Count | None = None
    ignore_eos: bool | None = None
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None


class CompletionRequest(Options, kw_only=True, frozen=True):
    prompt: Any
    logprobs: Alternatives | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]  # ROLES names them in errors.
    content: str | list[TextPart]

    @property
    def as_template_input(self) -> dict[str, str]:
        """The chat template knows no `developer`: such a message is the system's."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Options, kw_only=True, frozen=True):
    messages: list[Message]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None


def read_json(body: bytes | bytearray) -> dict[str, Any]:
    """Strict JSON (UTF-8, no NaN, bounded depth), an object at the top.

    Raises:
        ApiError: 400 saying what is wrong.
    """
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("The JSON is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request(
            f"The body is a JSON {type(raw).__name__}; it must be an object.", code="invalid_json"
        )
    return raw


def completion_request(raw: dict[str, Any], limits: Limits) -> CompletionRequest:
    """Raises ApiError (400) naming the field, what was found and the rule."""
    _drop_neutral(raw, NEUTRAL_COMPLETION)
    request = _convert(raw, CompletionRequest)
    _check_shared(request, limits)
    return request


def chat_request(raw: dict[str, Any], limits: Limits) -> ChatRequest:
    """Raises ApiError (400) naming the field, what was found and the rule."""
    _drop_neutral(raw, NEUTRAL_CHAT)
    _drop_neutral_of_messages(raw)
    request = _convert(raw, ChatRequest)
    _check_shared(request, limits)
    _check_messages(request.messages, limits)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request(
            f"max_tokens is {both[0]} and max_completion_tokens is {both[1]}; give one of them."
        )
    return request


def tokenize_request(raw: dict[str, Any], limits: Limits) -> TokenizeRequest:
    """Raises ApiError (400) naming the field, what was found and the rule."""
    _drop_neutral_of_messages(raw)
    request = _convert(raw, TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Give either prompt or messages.")
    if request.messages is not None:
        _check_messages(request.messages, limits)
    return request


def stops_of(request: Options) -> tuple[str, ...]:
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _check_shared(request: Options, limits: Limits) -> None:
    stops = stops_of(request)
    if len(stops) > limits.stops_max:
        raise bad_request(f"stop has {len(stops)} strings; the limit is {limits.stops_max}.")
    for stop in stops:
        if not 1 <= len(stop) <= limits.stop_characters_max:
            raise bad_request(
                f"A stop string has {len(stop)} characters; it must have from 1 to "
                f"{limits.stop_characters_max}."
            )
    if request.n is not None and request.n > limits.choices_max:
        raise bad_request(f"n is {request.n}; the limit is {limits.choices_max}.")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed with stream: true.")


def _check_messages(messages: list[Message], limits: Limits) -> None:
    if not 1 <= len(messages) <= limits.messages_max:
        raise bad_request(
            f"messages has {len(messages)} entries; it must have from 1 to {limits.messages_max}."
        )


def _drop_neutral_of_messages(raw: dict[str, Any]) -> None:
    messages = raw.get("messages")
    if isinstance(messages, list):
        for index, message in enumerate(messages):
            if isinstance(message, dict):
                _drop_neutral(message, NEUTRAL_MESSAGE, where=f"messages[{index}].")


def _drop_neutral(
    raw: dict[str, Any], neutral: dict[str, tuple[Any, ...]], where: str = ""
) -> None:
    """Removes unsupported fields that say nothing; refuses those that say something."""
    for name in neutral.keys() & raw.keys():
        value = raw[name]
        same = [v for v in neutral[name] if type(v) is type(value) and v == value]
        if value is not None and not same:
            raise bad_request(
                f"{where}{name} is not supported by this server; leave it out.",
                code="unsupported_parameter",
            )
        del raw[name]
    options = raw.get("stream_options")
    if isinstance(options, dict) and neutral is not NEUTRAL_STREAM:
        _drop_neutral(options, NEUTRAL_STREAM, where="stream_options.")


def _convert(raw: dict[str, Any], form: type[FormT]) -> FormT:
    try:
        return msgspec.convert(raw, form)
    except msgspec.ValidationError as error:
        raise _explained(str(error), raw) from None


def _explained(message: str, raw: dict[str, Any]) -> ApiError:
    """The decoder's message, with the field's name first and the value found."""
    rule, _, path = message.partition(" - at `$")
    where = path.rstrip("`").removeprefix(".")
    if unknown := re.search(r"unknown field `(.*)`", rule, re.DOTALL):
        name = f"{where}.{unknown[1]}" if where else unknown[1]
        return bad_request(f"Unknown field {name[:80]!r}.", code="unknown_parameter")
    if missing := re.search(r"missing required field `(.*)`", rule, re.DOTALL):
        name = f"{where}.{missing[1]}" if where else missing[1]
        return bad_request(f"{name} is missing.", code="missing_parameter")
    found = _value_at(raw, where)
    if rule.startswith("Invalid enum value"):
        known = "text" if where.endswith(".type") else ", ".join(ROLES)
        return bad_request(f"{where} is {found}; supported here: {known}.")
    rule = f"{where}: {rule[:1].lower()}{rule[1:].replace('`', '')}"
    if where.endswith("[...]"):  # A map's value; the decoder does not say which.
        return bad_request(f"{rule}.")
    return bad_request(f"{rule}, found {found}.")


def _value_at(raw: Any, where: str) -> str:
    value = raw
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", where):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            break
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:80] + "..."
