"""What the bridge asks of the engine, and what it hears back."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvasir_core.microbatch import FinishReason
from kvasir_core.units import RequestId
from kvasir_rt.sampling import SamplingParams


class TokenEvent(msgspec.Struct, frozen=True, gc=False):  # As cheap as can be: one per token.
    """One token of a request; `index` counts them from 0. `top` is (token, log-probability)."""

    request_id: RequestId
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    index: int


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The request's last event. `detail` says why if it was refused or failed."""

    request_id: RequestId
    reason: FinishReason
    detail: str = ""


EngineEvent = TokenEvent | EndEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request.

    Attributes:
        request_id: Chosen by the caller, never reused within an engine.
        prompt_ids: At least one token id.
        output_tokens_max: At least 1.
        sampling: How the tail picks tokens.
        stop_ids: A token of these ends the request (it is still delivered).
        on_event: Called on the engine's thread; must return at once.
    """

    request_id: int
    prompt_ids: list[int]
    output_tokens_max: int
    sampling: SamplingParams
    stop_ids: frozenset[int]
    on_event: Callable[[EngineEvent], None]
