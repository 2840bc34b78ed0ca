"""Every limit of the hub, with its reason. What is beyond one is refused before it costs."""

from dataclasses import dataclass, field

from kvasir_rt.bridge.limits import MEBIBYTE, Limits


def _http() -> Limits:
    return Limits(
        body_bytes_max=MEBIBYTE,  # The largest heartbeat, 4,096 segments, has 100 kB.
        bodies_bytes_max=64 * MEBIBYTE,
        body_s_max=10.0,
        connections_max=4096,  # Workers keep one for the relay and open another now and then.
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """Bounds on what one peer, and all peers together, can make the hub hold or do."""

    http: Limits = field(default_factory=_http)
    json_depth_max: int = 16  # Our deepest body has 5.
    json_containers_max: int = 10_000  # Brackets; the longest report has 8,194.
    json_keys_max: int = 32  # Of one object; our largest has 8.
    query_bytes_max: int = 2048
    # Who may ask how often. A worker's heartbeat comes every 15 s, a volunteer's poll every 45 s.
    node_rate_per_s: float = 5.0
    node_burst: int = 30
    stranger_rate_per_s: float = 50.0  # Per address: requests without a valid token.
    stranger_burst: int = 1000  # A herd behind one NAT authenticates at once.
    addresses_max: int = 4096  # Remembered for that.
    # Identities.
    challenge_s: float = 60.0
    challenges_max: int = 10_000
    token_s: float = 900.0  # Short-lived; a worker renews it with a new challenge.
    nodes_max: int = 20_000  # With a valid token, and remembered with their keys.
    segments_max: int = 200_000  # Of all workers' coverage: some 100 MB.
    # Coordinators and models.
    coordinators_max: int = 64  # Each costs a poll every 10 s.
    models_max: int = 64
    coordinator_lease_s: float = 600.0  # Without a registration or a report: gone.
    slots_bytes_max: int = MEBIBYTE  # 10,000 slots of llama.cpp's short form.
    slots_max: int = 65_536
    # Slices.
    downloads_max: int = 64
    downloads_per_node_max: int = 2  # The second resumes while the first dies.
    cuts_max: int = 2  # Slices being cut at once; each reads and writes at the disk's speed.
    # The record.
    history_max: int = 10_000  # Rows kept in the database.
    recent_max: int = 200  # Shown by `/api/swarm`.
    snapshot_s: float = 1.0  # `/api/swarm` is made anew at most so often, whoever asks.
    nodes_shown_max: int = 1000  # By `/api/swarm`.
