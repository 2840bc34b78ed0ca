"""Who may call a route, as FastAPI dependencies: strangers, nodes, services, viewers."""

from typing import Annotated

from fastapi import Depends, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvasir_core.swarm.words import WorkerId
from kvasir_rt.bridge.errors import ApiError, bad_request
from kvasir_rt.hub.auth import Keeper, Principal, Scope, unauthenticated
from kvasir_rt.hub.dials import is_loopback_host
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.rates import Rates

BEARER = HTTPBearer(auto_error=False, description="A node's token, or the hub's service token.")


class Gate:
    """Tokens and rates.

    Args:
        is_exposed: The hub listens beyond this machine: then even looking needs a token.
    """

    def __init__(self, keeper: Keeper, limits: HubLimits, *, is_exposed: bool) -> None:
        self.keeper = keeper
        self.is_exposed = is_exposed
        self._nodes = Rates(limits.node_rate_per_s, limits.node_burst, limits.nodes_max)
        self._strangers = Rates(
            limits.stranger_rate_per_s, limits.stranger_burst, limits.addresses_max
        )
        self.slowed = 0

    def stranger(self, address: str) -> None:
        """Somebody without a valid token. Raises ApiError (429)."""
        self._spend(self._strangers.take(address))

    def known(self, token: str, address: str) -> Principal:
        """Raises ApiError: 401 nobody's token, 429 too often."""
        try:
            principal = self.keeper.principal(token)
        except ApiError:
            self.stranger(address)
            raise
        if principal.node is not None:
            self._spend(self._nodes.take(principal.node))
        return principal

    def _spend(self, wait_s: float) -> None:
        if wait_s:
            self.slowed += 1
            raise ApiError(
                429, "Too many requests; slow down.", code="too_often", retry_after_s=wait_s
            )


def address_of(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def is_peer_local(request: Request) -> bool:
    return is_loopback_host(address_of(request))


Credentials = Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]


def _caller(request: Request, credentials: Credentials) -> Principal | None:
    """The token's owner; None without a token, never with a wrong one."""
    gate: Gate = request.app.state.gate
    if "authorization" not in request.headers:
        gate.stranger(address_of(request))
        return None
    if len(request.headers.getlist("authorization")) > 1:
        raise bad_request("Authorization is sent once.")
    token = credentials.credentials if credentials is not None else ""
    return gate.known(token, address_of(request))


Caller = Annotated[Principal | None, Depends(_caller)]


def _node(caller: Caller) -> WorkerId:
    if caller is None:
        raise unauthenticated("This needs a node's token: see POST /api/node-challenge.")
    if caller.node is None:
        raise _wrong_scope(caller, Scope.NODE)
    return caller.node


def _service(caller: Caller) -> Principal:
    if caller is None:
        raise unauthenticated("This needs the hub's service token as a bearer token.")
    if caller.scope is not Scope.SERVICE:
        raise _wrong_scope(caller, Scope.SERVICE)
    return caller


def _member(caller: Caller) -> Principal:
    if caller is None:
        raise unauthenticated("This needs a node's token or the hub's service token.")
    return caller


def _viewer(request: Request, caller: Caller) -> None:
    if caller is None and request.app.state.gate.is_exposed:
        raise unauthenticated("This hub listens beyond its machine, so even looking needs a token.")


def _stranger(request: Request) -> None:
    request.app.state.gate.stranger(address_of(request))


def _wrong_scope(caller: Principal, needed: Scope) -> ApiError:
    return ApiError(
        403, f"The token's scope is {caller.scope}; this needs {needed}.", code="wrong_scope"
    )


NodeCaller = Annotated[WorkerId, Depends(_node)]
MemberCaller = Annotated[Principal, Depends(_member)]
NEEDS_SERVICE = Depends(_service)
NEEDS_NOTHING = Depends(_stranger)
NEEDS_VIEW = Depends(_viewer)
