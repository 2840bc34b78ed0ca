"""Every limit of the relay, with its reason. What is beyond one is refused before it costs."""

from dataclasses import dataclass

from kvasir_rt.swarm.frames import BEAT_S, DEAD_S, FRAME_BYTES_MAX, SEND_S_MAX

MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Bounds on what one connection, and all together, can make the relay hold or wait for."""

    # Time.
    beat_s: float = BEAT_S
    dead_s: float = DEAD_S
    send_s_max: float = SEND_S_MAX  # A frozen peer is not seen by the library's keepalive.
    close_s: float = 1.0  # For a close frame to be answered; then the connection is aborted.
    late_s: float = 2.0  # After its deadline an unanswered request is forgotten.
    # One destination's queue.
    queue_bytes_max: int = 16 * MEBIBYTE  # Sixteen full frames: 2 s at 64 Mbit/s, the deadline.
    queue_frames_max: int = 256
    queue_urgent_max: int = 4096  # Beats, faults, drops: a few dozen bytes each.
    # One connection.
    due_max: int = 256  # Unanswered requests at one worker; a coordinator sends it 32 at most.
    calls_max: int = 4096  # Unanswered requests of one coordinator.
    strays_max: int = 1024  # Replies to nothing in a row; late ones are few and harmless.
    # All together.
    workers_max: int = 4096
    coordinators_max: int = 256
    knocking_max: int = 256  # Dials being checked.
    partial_bytes_max: int = 256 * MEBIBYTE  # Frames begun and not complete; the largest holder
    # loses its connection. One honest connection holds at most one frame.

    def __post_init__(self) -> None:
        assert self.queue_bytes_max >= FRAME_BYTES_MAX
