"""Telling the core what a peer said: its refusals get a status, its values become JSON's."""

from dataclasses import asdict
from typing import Any, TypeVar

from kvasir_core.swarm.decisions import HubDecision
from kvasir_core.swarm.events import HubEvent
from kvasir_core.swarm.refusal import Refused
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.hub.control import Control

STATUSES = {"malformed": 400, "unknown": 404, "foreign": 403, "stale": 409, "full": 503}

DecisionT = TypeVar("DecisionT", bound=HubDecision)


def refused(refusal: Refused) -> ApiError:
    return ApiError(STATUSES[refusal.code], f"{refusal}.", code=refusal.code)


def tell(control: Control, event: HubEvent) -> list[HubDecision]:
    """What `Control.tell` does.

    Raises:
        ApiError: The core refused; nothing has changed.
    """
    try:
        return control.tell(event)
    except Refused as refusal:
        raise refused(refusal) from None


def only(decisions: list[HubDecision], kind: type[DecisionT]) -> DecisionT:
    (found,) = [decision for decision in decisions if isinstance(decision, kind)]
    return found


def plain(value: Any) -> Any:
    """A frozen dataclass of the core as JSON's own types: tuples become lists."""
    return _lists(asdict(value))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_lists(each) for each in value]
    return value
