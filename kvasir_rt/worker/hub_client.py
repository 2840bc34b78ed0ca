"""The worker's questions to the hub, and its proof of who it is.

A node signs a challenge and gets a token for some minutes; after a 401 it signs again. The hub's
name is kept from the first visit, and no other hub at the same address gets a signature.
"""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any, cast

from kvasir_rt.swarm import protocol as wire
from kvasir_rt.swarm.hub_http import HubError, HubHttp, HubRefused
from kvasir_rt.swarm.identity import Identity
from kvasir_scenario.run_dir import named_output

RENEW_BEFORE_S = 60.0
HUBS_FILE = "hubs.json"
HUBS_BYTES_MAX = 1 << 16


class OtherHub(HubError):
    """Another hub answers at an address where one was known; nothing was signed."""


class HubClient:
    """Asks as a node.

    Args:
        url: The hub's.
        identity: The node's key.
        store: Directory that remembers hubs.
        join_token: What the hub's operator gave, where nodes need it.
    """

    def __init__(
        self, url: str, identity: Identity, store: Path, join_token: str | None = None
    ) -> None:
        self.http = HubHttp(url)
        self._identity = identity
        self._hubs = store / HUBS_FILE
        self._join_token = join_token
        self._token = ""
        self._renew_at = 0.0
        self._signing = asyncio.Lock()

    async def close(self) -> None:
        await self.http.close()

    async def token(self) -> str:
        """A valid token, signed for anew where needed.

        Raises:
            HubError: The hub is away, refuses, or is another one.
        """
        async with self._signing:
            if time.monotonic() >= self._renew_at:
                await self._sign()
            return self._token

    def forget_token(self) -> None:
        """The hub did not take it: sign again next time."""
        self._renew_at = 0.0

    async def volunteer(self, request: wire.VolunteerRequest) -> wire.Assigned | wire.Declined:
        answer = await self._ask(
            cast("type[Any]", wire.Assigned | wire.Declined), "/api/expert-volunteer", request
        )
        assert isinstance(answer, wire.Assigned | wire.Declined)
        return answer

    async def cover(self, report: wire.CoverageReport) -> wire.CoverageReply:
        answer: wire.CoverageReply = await self._ask(
            wire.CoverageReply, "/api/expert-coverage", report
        )
        return answer

    async def _ask(self, kind: type[Any], path: str, body: Any) -> Any:
        try:
            return await self.http.ask(kind, "POST", path, token=await self.token(), body=body)
        except HubRefused as refused:
            if refused.status != 401:
                raise
            self.forget_token()
        return await self.http.ask(kind, "POST", path, token=await self.token(), body=body)

    async def _sign(self) -> None:
        key = self._identity.public_key.hex()
        challenge = await self.http.ask(
            wire.Challenge, "POST", "/api/node-challenge",
            token=self._join_token, body=wire.ChallengeRequest(public_key=key),
        )  # fmt: skip
        self._remember(challenge.hub)
        signature = self._identity.sign_challenge(challenge.hub, challenge.nonce).hex()
        answer = await self.http.ask(
            wire.NodeToken, "POST", "/api/node-token",
            body=wire.TokenRequest(public_key=key, nonce=challenge.nonce, signature=signature),
        )  # fmt: skip
        self._token = answer.token
        lasts_s = answer.expires_s - min(RENEW_BEFORE_S, answer.expires_s / 4)
        self._renew_at = time.monotonic() + lasts_s

    def _remember(self, hub: str) -> None:
        known = _read_hubs(self._hubs)
        before = known.get(self.http.url)
        if before == hub:
            return
        if before is not None:
            raise OtherHub(
                f"{self.http.url} says it is hub {hub[:12]}; {before[:12]} was known there. If its "
                f"operator began anew, remove {self._hubs}; else somebody stands in between"
            )
        part = self._hubs.with_name(f"{HUBS_FILE}.{os.getpid()}.part")
        try:
            with named_output(self._hubs):
                part.write_text(json.dumps({**known, self.http.url: hub}) + "\n", encoding="utf-8")
                part.replace(self._hubs)
        finally:
            part.unlink(missing_ok=True)


def _read_hubs(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(HUBS_BYTES_MAX))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise OtherHub(
            f"cannot read which hubs are known from {path}: {error}; move it away, and the next "
            "answer of each hub is believed anew"
        ) from None
    if not isinstance(found, dict):
        raise OtherHub(f"{path} must hold one JSON object: hub names by address; move it away")
    return {str(url): str(hub) for url, hub in found.items()}
