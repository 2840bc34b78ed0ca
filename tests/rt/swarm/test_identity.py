"""Keys, the challenge they sign, and the hubs that are remembered."""

import asyncio
import os
from pathlib import Path

import pytest

from kvasir_core.errors import OutputError
from kvasir_rt.swarm.identity import (
    Identity,
    IdentityError,
    create_secret_file,
    is_signed,
    node_id,
    read_secret_file,
)
from kvasir_rt.worker.hub_client import HubClient
from tests.rt.hub.hubs import running_hub


def test_a_key_file_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "node.key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).node == first.node
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["node.key"]
    assert first.node == node_id(first.public_key)
    assert path.read_text().strip() not in repr(first)


def test_a_signature_is_good_for_one_hub_one_nonce_one_key() -> None:
    node, other = Identity.fresh(), Identity.fresh()
    signature = node.sign_challenge("hub", "nonce")
    assert is_signed(node.public_key, "hub", "nonce", signature)
    assert not is_signed(node.public_key, "other hub", "nonce", signature)
    assert not is_signed(node.public_key, "hub", "other nonce", signature)
    assert not is_signed(other.public_key, "hub", "nonce", signature)
    assert not is_signed(node.public_key, "hub", "nonce", signature[:-1])
    assert not is_signed(b"short", "hub", "nonce", signature)


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        ("ab" * 32, 0o644, "chmod 600"),
        ("no hex at all", 0o600, "no key file"),
        ("ab" * 31, 0o600, "no key file"),
        ("é", 0o600, "not ASCII"),
        ("a" * 300, 0o600, "more than"),
    ],
)
def test_a_bad_key_file_is_refused_with_what_to_do(
    tmp_path: Path, content: str, mode: int, why: str
) -> None:
    path = tmp_path / "node.key"
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(IdentityError, match=why):
        Identity.load_or_create(path)


def test_a_directory_is_no_secret(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="regular"):
        read_secret_file(tmp_path, 10)
    assert not create_secret_file(tmp_path, "x")


def test_a_full_disk_is_named_where_a_hub_is_to_be_remembered(tmp_path: Path) -> None:
    store = tmp_path / "node"
    store.mkdir()
    part = store / f"hubs.json.{os.getpid()}.part"
    part.symlink_to("/dev/full")

    async def story(url: str) -> None:
        client = HubClient(url, Identity.fresh(), store)
        try:
            with pytest.raises(OutputError, match=r"hubs\.json cannot be written: No space left"):
                await client.token()
            assert not list(store.iterdir())
            assert await client.token()
        finally:
            await client.close()

    with running_hub(tmp_path) as hub:
        asyncio.run(story(hub.url))
