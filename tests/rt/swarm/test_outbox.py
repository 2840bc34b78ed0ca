"""What waits to be sent keeps its order and its bounds, and urgent frames pass large ones."""

from hypothesis import given
from hypothesis import strategies as st

from kvasir_rt.relay.outbox import Outbox
from kvasir_rt.swarm.frames import CHUNK_BYTES_MAX, Beat, Drop, Joiner, pack

LARGE = 3 * CHUNK_BYTES_MAX + 5
BEAT = pack(Beat())


def frames_of(outbox: Outbox, joiner: Joiner | None = None) -> list[bytes]:
    """Everything that is left, put together as the other end would."""
    joiner, found = joiner or Joiner(), []
    while (message := outbox.take()) is not None:
        frame = joiner.take(message)
        if frame is not None:
            found.append(bytes(frame))
    return found


def test_an_urgent_frame_waits_for_one_chunk_at_most() -> None:
    outbox = Outbox(10 * LARGE, 10, 10)
    outbox.post(b"a" * LARGE)
    outbox.post(b"b" * LARGE)
    joiner = Joiner()
    first = outbox.take()
    assert first is not None
    assert joiner.take(first) is None  # The first of four chunks.
    outbox.post_urgent(BEAT)
    second = outbox.take()
    assert second is not None
    assert joiner.take(second) == BEAT
    left = []
    while (message := outbox.take()) is not None:
        left.append(joiner.take(message))
    assert [frame for frame in left if frame is not None] == [b"a" * LARGE, b"b" * LARGE]


def test_a_frame_is_taken_back_until_it_has_begun() -> None:
    outbox = Outbox(10 * LARGE, 10, 10)
    numbers = [outbox.post(bytes([n]) * LARGE) for n in range(3)]
    joiner = Joiner()
    joiner.take(outbox.take() or b"")
    taken_back = [outbox.withdraw(number) for number in numbers if number is not None]
    assert taken_back == [False, True, True]
    assert outbox.bytes_held == 0
    assert frames_of(outbox, joiner) == [bytes([0]) * LARGE]


@given(
    st.lists(
        st.tuples(st.sampled_from(["post", "urgent", "take"]), st.integers(1, 400)), max_size=60
    )
)
def test_nothing_is_lost_doubled_or_beyond_the_bounds(steps: list[tuple[str, int]]) -> None:
    outbox = Outbox(bytes_max=1000, frames_max=5, urgent_max=3)
    bulk: list[bytes] = []
    urgent: list[bytes] = []
    sent: list[bytes] = []
    joiner = Joiner()
    for step, (kind, size) in enumerate(steps):
        if kind == "post":
            frame = step.to_bytes(4, "little") * size
            is_room = len(bulk) < 5 and sum(map(len, bulk)) + len(frame) <= 1000
            assert (outbox.post(frame) is not None) == is_room
            bulk += [frame] * is_room
        elif kind == "urgent":
            frame = pack(Drop(step))
            assert outbox.post_urgent(frame) == (len(urgent) < 3)
            urgent += [frame] * (len(urgent) < 3)
        else:
            message = outbox.take()
            expected = urgent.pop(0) if urgent else bulk.pop(0) if bulk else None
            found = None if message is None else joiner.take(message)
            assert found == expected
            sent += [] if found is None else [bytes(found)]
        assert outbox.bytes_held == sum(map(len, bulk)) <= 1000
    assert frames_of(outbox) == urgent + bulk
