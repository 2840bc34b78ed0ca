"""What `kvasir-rt worker`, `relay` and `serve --hub` refuse before anything is begun."""

from pathlib import Path

import pytest

from kvasir_rt.cli import main
from tests.rt.hub.hubs import running_hub

HUB = "http://127.0.0.1:9"  # Nobody is asked.
TOKEN = "a-service-token-of-24-ch"


def refusal(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    """What the command, run in this process, says when it ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, given)])
    assert ended.value.code == 2
    return capsys.readouterr().err


BAD_RELAYS = ("http://h:1", "ws://", "ws://h:99999/x", "ws://a b/x", "ws://h:1/x?token=t")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        *((("--relay", url), "--relay") for url in BAD_RELAYS),
        (("--model", ""), "--model is ''"),
        (("--model", "a\x01"), "printable ASCII"),
        (("--model", "a\n"), "printable ASCII"),
        (("--model", "a" * 129), "1 to 128"),
    ],
)
def test_a_worker_refuses_addresses_and_names_that_no_hub_can_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: tuple[str, str], why: str
) -> None:
    store = tmp_path / "store"
    assert why in refusal(capsys, "worker", "--hub", HUB, "--store", store, *given)
    assert not store.exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--nats-credentials", __file__), "needs --relay"),
        (("--relay", "nats://127.0.0.1:9", "--nats-credentials", "/nowhere"), "/nowhere"),
    ],
)
def test_a_relay_refuses_credentials_that_are_of_no_use(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...], why: str
) -> None:
    assert why in refusal(capsys, "relay", "--hub", HUB, "--port", 0, *given)


def test_a_relay_whose_token_the_hub_refuses_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_HUB_TOKEN", TOKEN)
    with running_hub(tmp_path) as hub:
        assert hub.token != TOKEN
        assert "refuses the service token" in refusal(
            capsys, "relay", "--hub", hub.url, "--port", 0
        )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--relay", "ws://"), "--relay"),
        (("--hub-model", ""), "--hub-model is ''"),
        (("--experts-policy", "call_deadline_s=1e30"), "at most 1,000,000,000"),
    ],
)
def test_serve_refuses_what_its_stages_could_not_be_told(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, str],
    why: str,
) -> None:
    monkeypatch.setenv("KVASIR_HUB_TOKEN", TOKEN)
    assert why in refusal(capsys, "serve", "no-such.gguf", "--hub", HUB, *given)
