"""The event log: what is written reads back equal; what is not an event is refused, and why."""

import json
from enum import StrEnum
from typing import Any, Literal, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import (
    Epoch,
    FinishReason,
    IllegalEvent,
    LapEnded,
    MicroBatchId,
    Nanos,
    Ring,
    RingEvent,
    StageTimesMeasured,
)
from kvasir_core.eventlog import LINE_MAX, RING_EVENTS, decode, encode, registry_of, replay
from tests.core.stories import arrived, cancelled, lap, measured, plan_of


class Colour(StrEnum):
    RED = "red"


class Point(NamedTuple):
    x: float
    label: str | None


class Rich(NamedTuple):
    """Every kind of field that an event may have, beyond those of the ring."""

    number: float
    name: str
    flag: bool
    colour: Colour
    mode: Literal["fast", 3]
    maybe: float | None
    either: int | str
    point: Point
    points: tuple[Point, ...]
    pair: tuple[int, str]


REGISTRY = {"Rich": Rich}
RICH = Rich(
    0.1, "näme\n", True, Colour.RED, "fast", None, "x", Point(1e300, None), (Point(2.0, "a"),), (1, "b")
)  # fmt: skip

ring_events = st.one_of([st.from_type(kind) for kind in get_args(RingEvent)])
floats = st.floats(allow_nan=False, allow_infinity=False)
points = st.builds(Point, floats, st.none() | st.text())
rich_events = st.builds(
    Rich,
    floats,
    st.text(),
    st.booleans(),
    st.sampled_from(Colour),
    st.sampled_from(["fast", 3]),
    st.none() | floats,
    st.integers() | st.text(),
    points,
    st.lists(points).map(tuple),
    st.tuples(st.integers(), st.text()),
)


@given(ring_events, st.integers(0, 2**63))
def test_every_event_of_the_ring_reads_back_equal(event: RingEvent, now: int) -> None:
    line = encode(event, Nanos(now))
    assert "\n" not in line
    assert decode(line) == (event, now)
    assert type(decode(line)[0]) is type(event)


@given(rich_events)
def test_events_of_other_cores_read_back_equal(event: Rich) -> None:
    assert decode(encode(event, Nanos(5)), REGISTRY) == (event, 5)


def test_types_survive() -> None:
    event, _ = decode(encode(RICH, Nanos(5)), REGISTRY)
    assert event == RICH
    assert isinstance(event.colour, Colour)
    assert isinstance(event.points[0], Point)
    read, _ = decode('[1,"RequestCancelled",4,"deadline"]')
    assert read.reason is FinishReason.DEADLINE


def test_a_whole_number_reads_as_a_float_where_one_is_due() -> None:
    line = json.dumps([1, "Rich", 2, *RICH[1:]])
    number = decode(line, REGISTRY)[0].number
    assert (number, type(number)) == (2.0, float)


def test_fields_with_defaults_may_be_left_out() -> None:
    assert decode('[7,"LapEnded",3,0]') == (LapEnded(MicroBatchId(3), Epoch(0)), 7)
    assert decode('[7,"RequestArrived",3,4,5]') == (arrived(3, 4, 5), 7)


def test_the_registry_names_every_event_of_the_ring() -> None:
    assert set(RING_EVENTS.values()) == set(get_args(RingEvent))
    assert registry_of(RingEvent) == RING_EVENTS


@pytest.mark.parametrize(
    "line",
    [
        "", "null", "5", "[]", "[1]", "{}", '{"a":1,"b":2}', "[1,2", '"TimePassed"', "\x00",
        '[1,"Nothing"]', '[1,["TimePassed"]]', "[1,null]", '["1","TimePassed"]',
        '[1.5,"TimePassed"]', '[true,"TimePassed"]', '[null,"TimePassed"]', '[1,"TimePassed",1]',
        '[1,"RequestArrived",1,2]', '[1,"RequestArrived",1,2,3,4,5]',
        '[1,"RequestArrived","1",2,3]', '[1,"RequestArrived",1,2.0,3]',
        '[1,"RequestArrived",1,true,3]', '[1,"RequestArrived",1,null,3]',
        '[1,"RequestCancelled",1,"bored"]', '[1,"RequestCancelled",1,["stop"]]',
        '[1,"LapEnded",1,0,5]', '[1,"LapEnded",1,0,"12"]', '[1,"LapEnded",1,0,{"1":2}]',
        '[1,"LapEnded",1,0,[1,"2"]]', '[1,"LapEnded",1,0,[[1]]]',
        '[NaN,"TimePassed"]', '[1,"StageLost",Infinity]', '[1,"StageLost",1e3]',
        "[" * 100_000, '[1,"StageLost",' + "9" * 5000 + "]",
    ],
    ids=lambda line: repr(line[:40]),
)  # fmt: skip
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(IllegalEvent, match="not an event"):
        decode(line)


def test_a_line_over_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(IllegalEvent, match=f"{LINE_MAX + 1} characters; at most {LINE_MAX}"):
        decode("[" * (LINE_MAX + 1))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("number", "NaN"), ("number", "Infinity"), ("number", "1e999"), ("number", "1" + "0" * 400),
        ("number", '"1"'), ("number", "true"), ("name", "1"), ("flag", "1"), ("colour", '"blue"'),
        ("mode", '"slow"'), ("mode", "4"), ("maybe", '"x"'), ("maybe", "-Infinity"),
        ("either", "1.5"), ("either", "[1]"), ("point", "1"), ("point", "[1.0]"),
        ("point", '[1.0,"a",2]'), ("points", "[[1.0]]"), ("points", "[1]"), ("pair", "[1]"),
        ("pair", '[1,"b",2]'), ("pair", '["b",1]'), ("pair", "null"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_refused(field: str, text: str) -> None:
    values = [json.dumps(value) for value in RICH]
    values[Rich._fields.index(field)] = text
    with pytest.raises(IllegalEvent, match="not an event"):
        decode(f'[1,"Rich",{",".join(values)}]', REGISTRY)


@given(st.text() | st.from_regex(r'\[\d+,"[A-Z][A-Za-z]+"(,[\d\[\]"a-z.-]*)*\]', fullmatch=True))
def test_any_text_is_an_event_or_refused(line: str) -> None:
    try:
        event, now = decode(line)
    except IllegalEvent:
        return
    assert decode(encode(event, now)) == (event, now)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


@given(st.sampled_from(sorted(RING_EVENTS)), st.lists(json_values, max_size=5))
def test_any_fields_make_an_event_or_are_refused(name: str, values: list[Any]) -> None:
    line = json.dumps([1, name, *values])
    try:
        event, now = decode(line)
    except IllegalEvent:
        return
    assert decode(encode(event, now)) == (event, now)


def test_a_measure_that_is_not_finite_is_not_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode(RICH._replace(number=float("nan")), Nanos(1))


def test_replay_feeds_a_fresh_ring_and_passes_on_what_it_decides() -> None:
    plan = plan_of()
    events = [arrived(0), lap(0), measured([1, 1], [0, 0]), cancelled(0)]
    ring = Ring(plan)
    expected = [(event, Nanos(k), ring.handle(event, Nanos(k))) for k, event in enumerate(events)]
    lines = [encode(event, Nanos(k)) for k, event in enumerate(events)]
    assert list(replay(Ring(plan), lines)) == expected


def test_replay_stops_at_what_could_not_happen() -> None:
    lines = [encode(arrived(0), Nanos(1)), encode(lap(3), Nanos(2)), encode(lap(0), Nanos(3))]
    steps = replay(Ring(plan_of()), lines)
    next(steps)
    with pytest.raises(IllegalEvent, match="micro_batch=3"):
        next(steps)


def test_measured_times_keep_their_types() -> None:
    event = measured([1, 2], [3, 4], 5, 6)
    assert isinstance(event, StageTimesMeasured)
    read, _ = decode(encode(event, Nanos(0)))
    assert isinstance(read.holds, tuple)
