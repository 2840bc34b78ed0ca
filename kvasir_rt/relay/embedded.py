"""The relay inside the hub's process: `embedded_relay` is what the hub asks for."""

from kvasir_rt.relay.app import RelayApp
from kvasir_rt.relay.gate import EmbeddedGate, HubGate
from kvasir_rt.relay.relay import Relay


def embedded_relay(hub: HubGate) -> RelayApp:
    """An ASGI application for the hub's `/api/expert-relay`; its server needs `RelayWebSocket`."""
    return RelayApp(Relay(), EmbeddedGate(hub))
