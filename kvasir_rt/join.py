"""Stages on other machines: the ring's token, addresses, and `kvasir-rt stage --join`.

The token holds two things: a secret that proves a stage belongs to the ring, and the bridge's
public key that proves the bridge to the stage. All TCP lines are CURVE; a stage learns its
neighbours' addresses and keys from the authenticated bridge and from nobody else. The process that
joins is a small parent: it restarts a stage that dies, and ends when the bridge refuses or is gone.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zmq.utils import z85

from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.link import CurveKeys
from kvasir_rt.ring_errors import JoinError
from kvasir_rt.stage import EXIT_NO_BRIDGE, EXIT_REFUSED, StageConfig
from kvasir_rt.supervisor import StageProcess
from kvasir_rt.swarm.identity import create_secret_file
from kvasir_scenario.digits import whole_number

TOKEN_PREFIX = "kvasir1"  # noqa: S105 - The form's name, no secret.
TOKEN_VARIABLE = "KVASIR_JOIN_TOKEN"  # noqa: S105 - Where it is looked for.
SECRET_BYTES = 32
KEY_FILE_MAX = 4096
RESTARTS_MAX = 10
RESTART_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class RingKeys:
    """What a ring that others may join has: the stages' secret and the bridge's key pair."""

    secret: str
    bridge: CurveKeys

    @classmethod
    def fresh(cls) -> "RingKeys":
        return cls(secrets.token_hex(SECRET_BYTES), CurveKeys.fresh())

    @property
    def token(self) -> str:
        """What a joining stage needs to know; as secret as a password."""
        return f"{TOKEN_PREFIX}-{self.secret}-{z85.decode(self.bridge.public).hex()}"

    def __repr__(self) -> str:
        return "RingKeys(...)"

    @classmethod
    def load_or_create(cls, path: Path) -> "RingKeys":
        """The keys kept in a file, so that a restarted bridge has the same token.

        Raises:
            JoinError: The file is readable by others, or is no key file.
            OutputError: It cannot be made.
        """
        keys = cls.fresh()
        fields = {
            "secret": keys.secret,
            "public_key": keys.bridge.public.decode(),
            "secret_key": keys.bridge.secret.decode(),
        }
        if not create_secret_file(path, json.dumps(fields)):
            return cls._load(path)
        return keys

    @classmethod
    def _load(cls, path: Path) -> "RingKeys":
        try:
            if path.stat().st_mode & 0o077:
                raise JoinError(
                    f"{path} holds secrets and others may read it; run `chmod 600 {path}`"
                )
            with path.open() as file:
                fields = json.loads(file.read(KEY_FILE_MAX))
            keys = CurveKeys(fields["public_key"].encode(), fields["secret_key"].encode())
            if len(z85.decode(keys.public)) != 32 or len(z85.decode(keys.secret)) != 32:
                raise ValueError("a key has not 32 bytes")
            return cls(str(fields["secret"]), keys)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JoinError(f"{path} is no key file of a ring: {error}") from None


def parse_token(text: str) -> tuple[str, str]:
    """The stages' secret and the bridge's public key (Z85) of a token.

    Raises:
        JoinError: It is not a token; its text is not repeated.
    """
    parts = text.strip().split("-")
    wrong = "the token is not one that `kvasir-rt serve` printed (kvasir1-...-...)"
    if len(parts) != 3 or parts[0] != TOKEN_PREFIX or len(parts[1]) != 2 * SECRET_BYTES:
        raise JoinError(wrong)
    try:
        key = bytes.fromhex(parts[2])
    except ValueError:
        raise JoinError(wrong) from None
    if len(key) != 32:
        raise JoinError(wrong)
    return parts[1], z85.encode(key).decode()


def find_token(file: Path | None = None) -> str:
    """The token from a file, or from the environment.

    Raises:
        JoinError: There is none.
    """
    if file is not None:
        try:
            return file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise JoinError(f"cannot read the token from {file}: {error}") from None
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise JoinError(
            f"a stage that joins needs the ring's token: set {TOKEN_VARIABLE}, or give "
            "--token-file; `kvasir-rt serve` prints it when it waits for stages"
        )
    return token


def tcp_endpoint(address: str, *, may_be_any: bool = False) -> str:
    """`tcp://HOST:PORT` from `HOST:PORT`.

    Args:
        address: As given by a person; IPv6 in brackets.
        may_be_any: Whether the port may be 0 and the host a wildcard.

    Raises:
        JoinError: It is no address, or a wildcard that neighbours cannot connect to.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or whole_number(port, 0, 65535) is None:
        raise JoinError(f"{address!r} is no HOST:PORT")
    bare = host.removeprefix("[").removesuffix("]")
    if ":" in bare and not host.startswith("["):
        raise JoinError(f"{address!r}: write an IPv6 host in brackets, such as [::1]:7100")
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(bare).is_unspecified and not may_be_any:
            raise JoinError(
                f"{address!r} is every address of this machine; give the one that the neighbouring "
                "stages can reach"
            )
    return f"tcp://{host}:{port}"


def digest_of(model: Path) -> str:
    """The hash by which the bridge and its stages know that they have the same model.

    Raises:
        ModelFileError: It is no usable model file.
    """
    with open_gguf(model) as gguf:
        return gguf.digest()


def place_of(listen: str, core: int | None) -> str:
    """The endpoint of a stage that can be here; else the ring would have to hear that it cannot.

    Raises:
        JoinError: The address is taken or not this machine's, or the core is not to be used.
    """
    cores = os.sched_getaffinity(0)
    if core is not None and core not in cores:
        raise JoinError(f"--core {core} is none of those this process may use: {sorted(cores)}")
    endpoint = tcp_endpoint(listen)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise JoinError(f"cannot listen on {listen}: {error.strerror or error}") from None
    return endpoint


def join_ring(
    bridge: str,
    listen: str,
    *,
    token: str,
    model: Path | None,
    threads: int | None = None,
    core: int | None = None,
    wait_s: float = 60.0,
    say: Callable[[str], None] = print,
) -> None:
    """Be a stage of the ring at `bridge` until the ring ends.

    Args:
        bridge: `HOST:PORT` where the bridge waits for stages.
        listen: `HOST:PORT` where the upstream neighbour reaches this machine; the port may be 0.
        token: As `kvasir-rt serve` printed it.
        model: This machine's copy of the model file; its hash must be the plan's.
        threads: Compute threads.
        core: The one core to run on.
        wait_s: How long the bridge may be away, at first and later.
        say: Called with a sentence for people.

    Raises:
        JoinError: The bridge refused or is not there, or the stage died too often.
    """
    secret, bridge_key = parse_token(token)
    config = StageConfig(
        control=tcp_endpoint(bridge),
        secret=secret,
        stage=None,
        listen=place_of(listen, core),
        parent=os.getpid(),
        bridge_key=bridge_key,
        core=core,
        model_path=str(model) if model is not None else None,
        sha256=digest_of(model) if model is not None else "",
        wait_s=wait_s,
    )
    say(f"joining the ring at {bridge}, listening on {listen}")
    deaths: deque[float] = deque()
    while True:
        child = StageProcess(config, threads)
        try:
            child.wait(None)
        finally:
            how = child.end()
        if child.status == 0:
            say("the ring has ended")
            return
        if child.status == EXIT_REFUSED:
            raise JoinError("the stage cannot take part; the reason is above")
        if child.status == EXIT_NO_BRIDGE:
            raise JoinError(f"no bridge answers at {bridge}")
        deaths.append(time.monotonic())
        while deaths[0] < deaths[-1] - RESTART_WINDOW_S:
            deaths.popleft()
        if len(deaths) > RESTARTS_MAX:
            raise JoinError(f"gave up: the stage died {len(deaths)} times; the last: {how}")
        say(f"the stage died ({how}); starting it again")
