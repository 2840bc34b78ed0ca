"""The hub's live page over HTTP: its files, who may listen, and what comes."""

import json
from pathlib import Path

from kvasir_rt.bridge.live_page import SWARM_FILES
from tests.rt.hub.hubs import SERVICE, RunningHub, bearer, running_hub

LIVE = "/api/live"


def first_message(hub: RunningHub, token: str | None = None) -> dict[str, object]:
    with hub.client.stream("GET", LIVE, headers=bearer(token)) as response:
        assert response.status_code == 200, response.read()
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
        message: dict[str, object] = json.loads(line[6:])
        return message


def test_the_feed_has_what_the_swarm_view_has(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        for path in SWARM_FILES:
            answer = hub.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
        message, swarm = first_message(hub), hub.get("/api/swarm").json()
        assert set(message) == set(swarm)
        for name in ("hub", "policy", "recruitment", "demand", "slices", "workers"):
            assert message[name] == swarm[name]
        assert hub.get(LIVE, model="x").status_code == 400  # It takes no parameter.


def test_beyond_its_machine_the_feed_needs_a_token_and_the_files_do_not(tmp_path: Path) -> None:
    with running_hub(tmp_path, host="0.0.0.0", is_open=True) as hub:
        assert hub.get("/").status_code == 200
        assert hub.get(LIVE).status_code == 401
        assert hub.get(LIVE, "wrong").status_code == 401
        assert "hub" in first_message(hub, SERVICE)


def test_on_loopback_a_page_of_another_site_cannot_listen(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        evil = {"Origin": "http://evil.example"}
        assert hub.client.get(LIVE, headers=evil).status_code == 403
        assert hub.client.get(LIVE, headers={"Host": "evil.example"}).status_code == 403
