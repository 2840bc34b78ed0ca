"""Which addresses the hub opens a connection to: the operator's word, never a peer's alone.

The hub polls coordinators, so an address must come from somewhere. A coordinator may name its own
only if it has the service token, and only an address on the hub's own machine (when it asks from
there) or one that the operator listed with `--allow-coordinator`. The path is fixed to `/slots`,
redirects are not followed, and what comes back is shown to nobody. docs/decisions/0010-hub-dials.md
has the reasons.
"""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvasir_rt.bridge.errors import ApiError


@dataclass(frozen=True, slots=True)
class Origin:
    """`http://HOST:PORT`, spelled one way."""

    host: str  # Lower case; an IPv6 address without its brackets.
    port: int
    scheme: str = "http"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback_host(self.host)


def is_loopback_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def parse_origin(text: str) -> Origin:
    """An origin without path, query, user or password.

    Raises:
        ValueError: It is none; the message says what is wrong.
    """
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{text[:80]!r} is not a printable ASCII address")
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"{text[:80]!r} must start with http:// or https://")
    if parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text[:80]!r} must be http://HOST:PORT and nothing more")
    port = parts.port  # Raises ValueError beyond 65535.
    if not parts.hostname or port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"{text[:80]!r} names no host or no port")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return Origin(parts.hostname.lower(), port, parts.scheme)


def parse_relay(text: str) -> str:
    """A relay's address as it is dialled; its token goes into a header.

    Raises:
        ValueError: It is none; the message says what is wrong.
    """
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError(f"{text[:80]!r} is not a printable ASCII address")
    parts = urlsplit(text)
    is_right = parts.scheme in ("ws", "wss") and parts.hostname and parts.port != 0
    if not is_right or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text[:80]!r} must be ws(s)://HOST:PORT/api/expert-relay")
    return text


@dataclass(frozen=True, slots=True)
class Dials:
    """The operator's list."""

    allowed: frozenset[Origin] = frozenset()

    def check(self, url: str, *, is_peer_local: bool) -> Origin:
        """Where a coordinator's slots may be polled.

        Raises:
            ApiError: 400 no address; 403 not one that this hub dials.
        """
        try:
            origin = parse_origin(url)
        except ValueError as error:
            raise ApiError(400, f"slots_url: {error}.", code="invalid_value") from None
        if origin in self.allowed or (origin.is_loopback and is_peer_local):
            return origin
        raise ApiError(
            403,
            f"This hub does not dial {origin}: it polls coordinators on its own machine, and those "
            f"its operator lists; start the hub with --allow-coordinator {origin}.",
            code="address_not_allowed",
        )
