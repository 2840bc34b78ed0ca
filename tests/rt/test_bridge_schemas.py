"""Whatever JSON a client sends, it is a checked request or a 400 that says why."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.schemas import (
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    ChatRequest,
    CompletionRequest,
    chat_request,
    completion_request,
    read_json,
)

FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *NEUTRAL_CHAT, "other"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def result_of(check: Callable[[], object]) -> object:
    """What it gives, or its refusal; any other exception is a fault."""
    try:
        return check()
    except ApiError as error:
        return error


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6))
def test_any_object_is_checked_or_refused(body: dict[str, Any]) -> None:
    for check in (chat_request, completion_request):
        result = result_of(lambda check=check: check(deepcopy(body), Limits()))  # type: ignore[misc]
        assert isinstance(result, ChatRequest | CompletionRequest | ApiError)
        assert not isinstance(result, ApiError) or (result.status == 400 and result.message)


@given(st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_any_bytes_are_an_object_or_refused(data: bytes) -> None:
    result = result_of(lambda: read_json(data))
    assert isinstance(result, dict) or (isinstance(result, ApiError) and result.status == 400)


@pytest.mark.parametrize("name", sorted(NEUTRAL_CHAT))
def test_an_unsupported_field_is_accepted_when_it_says_nothing_and_named_when_it_does(
    name: str,
) -> None:
    messages = [{"role": "user", "content": "x"}]
    for value in (None, *NEUTRAL_CHAT[name]):
        chat_request({"messages": messages, name: value}, Limits())
    with pytest.raises(ApiError, match=name) as refusal:
        chat_request({"messages": messages, name: "something"}, Limits())
    assert refusal.value.code == "unsupported_parameter"


def test_one_is_not_true() -> None:
    """`echo: 0` is not the neutral `false`, nor `best_of: true` the neutral 1."""
    for name, value in (("echo", 0), ("best_of", True), ("store", 0)):
        assert name in NEUTRAL_COMPLETION
        with pytest.raises(ApiError, match=name):
            completion_request({"prompt": "x", name: value}, Limits())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("n", 0, ["n", ">= 1", "0"]),
        ("temperature", -1, ["temperature", "-1"]),
        ("top_p", 1.5, ["top_p", "1.5"]),
        ("seed", 2**70, ["seed"]),
        ("stop", [1], ["stop[0]", "str", "1"]),
        ("logit_bias", {"1": 1000}, ["logit_bias[...]: expected float <= 100.0."]),
        ("stream_options", {"odd": 1}, ["stream_options.odd"]),
        ("deadline_s", 0, ["deadline_s"]),
        ("user", "x" * 1000, ["user"]),
    ],
)
def test_a_wrong_value_is_told_with_its_field_and_what_was_found(
    field: str, value: Any, words: list[str]
) -> None:
    with pytest.raises(ApiError) as refusal:
        completion_request({"prompt": "x", "stream": True, field: value}, Limits())
    for word in words:
        assert word in refusal.value.message


def test_roles_and_parts_that_are_not_known_are_told_with_those_that_are() -> None:
    with pytest.raises(ApiError, match=r"wizard.*assistant"):
        chat_request({"messages": [{"role": "wizard", "content": "x"}]}, Limits())
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ApiError, match=r"image_url.*text"):
        chat_request({"messages": [image]}, Limits())
