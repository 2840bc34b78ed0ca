"""Who may do what: challenges, tokens, invitations, rates."""

from pathlib import Path

import pytest

from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.hub.auth import Keeper, Scope
from kvasir_rt.hub.dials import Dials, parse_origin
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.rates import Rates
from kvasir_rt.swarm.identity import Identity
from tests.rt.hub.hubs import Worker, running_hub

JOIN = "join-token-of-the-tests"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """A keeper and one node."""

    def __init__(self, join: str | None = None, **limits: float) -> None:
        self.clock = Clock()
        self.keeper = Keeper(
            "hub", service_token="service", join_token=join,
            limits=HubLimits(**limits), clock=self.clock,  # type: ignore[arg-type]
        )  # fmt: skip
        self.node = Identity.fresh()

    def login(self, node: Identity | None = None) -> str:
        node = node or self.node
        nonce = self.keeper.challenge(node.public_key, None)
        return self.try_token(node, nonce)

    def try_token(self, node: Identity, nonce: str, signature: bytes | None = None) -> str:
        signature = node.sign_challenge("hub", nonce) if signature is None else signature
        return self.keeper.token(node.public_key, nonce, signature)[1]

    def is_refused(self, node: Identity, nonce: str, signature: bytes | None = None) -> bool:
        with pytest.raises(ApiError) as found:
            self.try_token(node, nonce, signature)
        return found.value.status == 401


def test_a_signed_challenge_gives_a_token_of_node_scope() -> None:
    world = World()
    principal = world.keeper.principal(world.login())
    assert principal.scope is Scope.NODE
    assert principal.node == world.node.node
    assert world.keeper.principal("service").scope is Scope.SERVICE


def test_a_nonce_is_burned_by_the_first_try_right_or_wrong() -> None:
    world = World()
    nonce = world.keeper.challenge(world.node.public_key, None)
    assert world.is_refused(world.node, nonce, bytes(64))
    assert world.is_refused(world.node, nonce)  # The right signature comes too late.
    nonce = world.keeper.challenge(world.node.public_key, None)
    world.try_token(world.node, nonce)
    assert world.is_refused(world.node, nonce)


def test_a_challenge_is_for_one_key_and_a_short_time() -> None:
    world = World(challenge_s=60.0)
    thief = Identity.fresh()
    nonce = world.keeper.challenge(world.node.public_key, None)
    assert world.is_refused(thief, nonce)
    nonce = world.keeper.challenge(world.node.public_key, None)
    world.clock.now += 60.5
    assert world.is_refused(world.node, nonce)
    assert world.is_refused(world.node, "0" * 64)  # Never given.


def test_a_signature_for_another_hub_is_worth_nothing() -> None:
    world = World()
    nonce = world.keeper.challenge(world.node.public_key, None)
    assert world.is_refused(world.node, nonce, world.node.sign_challenge("other", nonce))


def test_a_token_ends_and_a_new_one_replaces_the_old() -> None:
    world = World(token_s=900.0)
    first = world.login()
    second = world.login()
    with pytest.raises(ApiError):
        world.keeper.principal(first)
    world.clock.now += 900.0
    world.keeper.principal(second)
    world.clock.now += 0.5
    with pytest.raises(ApiError):
        world.keeper.principal(second)
    world.login(Identity.fresh())
    assert world.keeper.tokens_live == 1  # The ended one was dropped.


def test_what_is_remembered_is_bounded() -> None:
    world = World(nodes_max=3, challenges_max=3)
    tokens = [world.login(Identity.fresh()) for _ in range(5)]
    assert world.keeper.tokens_live == 3
    world.keeper.principal(tokens[-1])
    nonces = [world.keeper.challenge(world.node.public_key, None) for _ in range(5)]
    assert world.is_refused(world.node, nonces[0])
    assert world.try_token(world.node, nonces[-1])


def test_no_secret_is_kept_as_it_was_given() -> None:
    world = World(join=JOIN)
    world.keeper.challenge(world.node.public_key, JOIN)
    token = world.try_token(world.node, next(iter(world.keeper._nonces)))
    kept = repr(vars(world.keeper))
    assert token not in kept
    assert JOIN not in kept
    assert "'service'" not in kept


def test_where_nodes_are_invited_the_join_token_is_needed(tmp_path: Path) -> None:
    with running_hub(tmp_path, join_token=JOIN) as hub:
        worker = Worker(hub)
        for wrong in (None, "wrong", hub.token):
            answer = hub.post("/api/node-challenge", wrong, public_key=worker.key)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        assert worker.login(JOIN).volunteer()["assigned"] is False


def test_a_wrong_signature_over_http_burns_the_nonce(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub:
        worker = Worker(hub)
        challenge = worker.challenge()
        wrong = hub.post(
            "/api/node-token", public_key=worker.key, nonce=challenge["nonce"], signature="0" * 128
        )
        assert wrong.status_code == 401
        assert worker.prove(challenge).status_code == 401
        assert worker.login().volunteer()["assigned"] is False
        assert hub.service.keeper.failures == 2


def test_a_hub_beyond_its_machine_shows_nothing_without_a_token(tmp_path: Path) -> None:
    with running_hub(tmp_path, host="0.0.0.0", is_open=True) as hub:
        worker = Worker(hub).login()
        for path in ("/api/swarm", "/api/moe/recruitment", "/api/expert-demand", "/metrics",
                     "/openapi.json", "/docs"):  # fmt: skip
            assert hub.get(path).status_code == 401, path
            assert hub.get(path, hub.token).status_code == 200, path
            assert hub.get(path, worker.token).status_code == 200, path
        assert hub.get("/health").status_code == 200


def test_buckets_refill_and_forget_the_longest_unheard() -> None:
    clock = Clock()
    rates = Rates(2.0, 3, 2, clock)
    assert [rates.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    clock.now += 0.5
    assert rates.take("a") == 0
    assert rates.take("a") == 0.5
    rates.take("b")
    rates.take("c")
    assert len(rates) == 2
    assert rates.take("a") == 0  # Forgotten, so rested.


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://LOCALHOST:8000/", "http://localhost:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://ring.example", "https://ring.example:443"),
        ("http://ring.example", "http://ring.example:80"),
    ],
)
def test_origins_are_spelled_one_way(text: str, spelled: str) -> None:
    assert str(parse_origin(text)) == spelled


def test_only_the_operators_addresses_and_this_machines_are_dialled() -> None:
    dials = Dials(frozenset([parse_origin("http://10.1.1.1:8000")]))
    dials.check("http://10.1.1.1:8000/", is_peer_local=False)
    dials.check("http://127.0.0.1:1", is_peer_local=True)
    dials.check("http://[::ffff:127.0.0.1]:1", is_peer_local=True)
    for url in ("http://10.1.1.1:8001", "https://10.1.1.1:8000", "http://10.1.1.2:8000"):
        with pytest.raises(ApiError, match="does not dial"):
            dials.check(url, is_peer_local=True)
    with pytest.raises(ApiError, match="does not dial"):  # The hub's own loopback, from elsewhere.
        dials.check("http://127.0.0.1:1", is_peer_local=False)
