"""Keys and the challenge they sign."""

from pathlib import Path

import pytest

from kvasir_rt.swarm.identity import (
    Identity,
    IdentityError,
    create_secret_file,
    is_signed,
    node_id,
    read_secret_file,
)


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
