"""Who a node is: an ed25519 key in a file of its own, whose fingerprint is the node's name.

A node proves itself by signing a challenge. The signed text names its purpose, the hub, the nonce
and the key, so that a signature is good for nothing else. A node should remember the hub's name
from its first visit and refuse to sign for another at the same address.
"""

import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)

from kvasir_core.errors import KvasirError
from kvasir_scenario.run_dir import named_output

KEY_BYTES = 32
KEY_FILE_BYTES_MAX = 256
PURPOSE = b"kvasir node challenge v1\n"


class IdentityError(KvasirError):
    """A key file cannot be used; the message names the file, what was found and what to do."""


def node_id(public_key: bytes) -> str:
    """A node's name: the first half of its key's SHA-256, in hex."""
    return hashlib.sha256(public_key).hexdigest()[:32]


def challenge_text(hub: str, nonce: str, public_key: bytes) -> bytes:
    """What is signed. `hub` and `nonce` are as the challenge spells them."""
    return PURPOSE + f"{hub}\n{nonce}\n{public_key.hex()}\n".encode()


@dataclass(frozen=True, slots=True, repr=False)
class Identity:
    """A node's key."""

    _secret: bytes

    def __repr__(self) -> str:
        return f"Identity({self.node})"

    @classmethod
    def fresh(cls) -> "Identity":
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The key kept in a file only its owner can read; made on the first call.

        Raises:
            IdentityError: The file is readable by others, is no key file, or cannot be made.
        """
        fresh = cls.fresh()
        if create_secret_file(path, fresh._secret.hex()):  # noqa: SLF001 - Its own class.
            return fresh
        return cls._load(path)

    @classmethod
    def _load(cls, path: Path) -> "Identity":
        text = read_secret_file(path, KEY_FILE_BYTES_MAX)
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            secret = b""
        if len(secret) != KEY_BYTES:
            raise IdentityError(
                f"{path} is no key file: it must hold {2 * KEY_BYTES} hexadecimal digits; "
                "move it away and a new key is made (the node gets a new name)"
            )
        return cls(secret)

    @property
    def public_key(self) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self._secret).public_key().public_bytes_raw()

    @property
    def node(self) -> str:
        return node_id(self.public_key)

    def sign_challenge(self, hub: str, nonce: str) -> bytes:
        """The signature, 64 bytes, that `POST /api/node-token` wants."""
        key = Ed25519PrivateKey.from_private_bytes(self._secret)
        return key.sign(challenge_text(hub, nonce, self.public_key))


def is_signed(public_key: bytes, hub: str, nonce: str, signature: bytes) -> bool:
    """Whether the key's owner signed this hub's challenge."""
    try:
        key = Ed25519PublicKey.from_public_bytes(public_key)
        key.verify(signature, challenge_text(hub, nonce, public_key))
    except (InvalidSignature, ValueError):
        return False
    return True


def create_secret_file(path: Path, text: str) -> bool:
    """Writes a secret that only its owner can read; False if the file is there already.

    The file appears whole or not at all, whoever else tries at the same moment.

    Raises:
        OutputError: It cannot be made.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    with named_output(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            return False
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(text + "\n")
            path.hardlink_to(part)
        except FileExistsError:
            return False
        finally:
            part.unlink()
    return True


def read_secret_file(path: Path, bytes_max: int) -> str:
    """A secret's text, stripped; the file must be a regular one that only its owner can read.

    Raises:
        IdentityError: It is not; the message says what to do.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise IdentityError(f"cannot read {path}: {error.strerror}") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise IdentityError(f"{path} is not a regular file")
        if found.st_mode & 0o077:
            raise IdentityError(
                f"{path} can be read by others (mode {stat.S_IMODE(found.st_mode):o}); "
                f"run: chmod 600 {path}"
            )
        data = os.read(descriptor, bytes_max + 1)
    finally:
        os.close(descriptor)
    if len(data) > bytes_max:
        raise IdentityError(f"{path} has more than {bytes_max} bytes: it holds no secret of ours")
    try:
        return data.decode("ascii").strip()
    except UnicodeDecodeError:
        raise IdentityError(f"{path} is not ASCII text: it holds no secret of ours") from None
