"""The ring's exceptions.

KvasirError
├── WireError     a message breaks the protocol or the plan's bounds
├── JoinError     a stage was refused by the bridge, or cannot reach it; the process exits 2
└── RingDown      the ring cannot start, or gave up after too many losses
"""

from kvasir_core.errors import KvasirError


class WireError(KvasirError):
    """A peer sent what this plan or protocol does not allow; the message names both values."""


class JoinError(KvasirError):
    """The stage cannot take part in this ring; the message says what to change."""


class RingDown(KvasirError):
    """The ring serves nothing any more; the message says which stage, why and how often."""

    exit_status = 1
