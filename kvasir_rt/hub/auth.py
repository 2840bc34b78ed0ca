"""Who is asking: nodes by their key, coordinators and relays by the operator's service token.

A node asks for a challenge, signs it, and gets a short-lived token. A nonce is used up by the first
try, right or wrong. Tokens are kept as digests, so reading the hub's memory or comparing times
tells nobody a token. Nothing here survives a restart: after one, nodes sign again.
"""

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from time import monotonic

from kvasir_core.swarm.words import WorkerId
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.swarm.identity import is_signed, node_id

TOKEN_CHARACTERS_MAX = 512


class Scope(StrEnum):
    NODE = "node"  # May volunteer, report its own coverage, download slices, dial the relay.
    SERVICE = "service"  # May register coordinators, report serving, read maps, admit dials.


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. `node` is None for a service."""

    scope: Scope
    node: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class _Issued:
    node: WorkerId
    expires_at: float


def unauthenticated(why: str) -> ApiError:
    return ApiError(401, why, code="unauthenticated")


class Keeper:
    """Challenges and tokens.

    Args:
        hub: The hub's own name, part of what nodes sign.
        service_token: What coordinators show.
        join_token: What a node shows to be challenged at all; None lets every key in.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        hub: str,
        *,
        service_token: str,
        join_token: str | None,
        limits: HubLimits,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.hub = hub
        self._limits = limits
        self._clock = clock
        self._service = _digest(service_token)
        self._join = None if join_token is None else _digest(join_token)
        self._nonces: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._issued: OrderedDict[bytes, _Issued] = OrderedDict()  # Issued longest ago first.
        self._of_node: dict[WorkerId, bytes] = {}
        self.failures = 0

    @property
    def tokens_live(self) -> int:
        return len(self._issued)

    def challenge(self, public_key: bytes, join: str | None) -> str:
        """A nonce for this key.

        Raises:
            ApiError: 401 without the join token, where one is asked for.
        """
        if self._join is not None and not _is_equal(join or "", self._join):
            self.failures += 1
            raise unauthenticated(
                "This hub admits nodes by invitation: send its join token as "
                "'Authorization: Bearer TOKEN'."
            )
        nonce = secrets.token_hex(32)
        self._nonces[nonce] = public_key, self._clock() + self._limits.challenge_s
        if len(self._nonces) > self._limits.challenges_max:
            self._nonces.popitem(last=False)
        return nonce

    def token(self, public_key: bytes, nonce: str, signature: bytes) -> tuple[WorkerId, str]:
        """A new token for the key's owner; the one before is over.

        Raises:
            ApiError: 401; the nonce cannot be tried again.
        """
        found = self._nonces.pop(nonce, None)
        if (
            found is None
            or found[1] < self._clock()
            or not hmac.compare_digest(found[0], public_key)
            or not is_signed(public_key, self.hub, nonce, signature)
        ):
            self.failures += 1
            raise unauthenticated(
                "The nonce is unknown, used or expired, or the signature is not this key's over "
                "this hub's challenge; ask for a new challenge."
            )
        node = WorkerId(node_id(public_key))
        self.revoke(node)
        token = secrets.token_urlsafe(32)
        digest = _digest(token)
        self._issued[digest] = _Issued(node, self._clock() + self._limits.token_s)
        self._of_node[node] = digest
        self._drop_expired()
        while len(self._issued) > self._limits.nodes_max:
            self.revoke(next(iter(self._issued.values())).node)
        return node, token

    def revoke(self, node: WorkerId) -> None:
        digest = self._of_node.pop(node, None)
        if digest is not None:
            del self._issued[digest]

    def principal(self, token: str) -> Principal:
        """Whose token this is.

        Raises:
            ApiError: 401; it is nobody's, or over.
        """
        if 0 < len(token) <= TOKEN_CHARACTERS_MAX:
            digest = _digest(token)
            if hmac.compare_digest(digest, self._service):
                return Principal(Scope.SERVICE)
            issued = self._issued.get(digest)
            if issued is not None and issued.expires_at >= self._clock():
                return Principal(Scope.NODE, issued.node)
        self.failures += 1
        raise unauthenticated(
            "The bearer token is unknown or has expired; a node asks for a new challenge, a "
            "coordinator sends the hub's service token."
        )

    def _drop_expired(self) -> None:
        now = self._clock()
        while self._issued and (first := next(iter(self._issued.values()))).expires_at < now:
            self.revoke(first.node)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _is_equal(token: str, digest: bytes) -> bool:
    return hmac.compare_digest(_digest(token), digest)
