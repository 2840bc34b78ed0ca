"""Hypothesis profiles: `dev` while working, `ci` in `make check`, `nightly` for long searches."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile(
    "ci",
    max_examples=300,
    derandomize=True,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("nightly", max_examples=20_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Shells ignore SIGINT for what they start in the background, `nohup` ignores SIGHUP, and processes
# inherit that: those of the tests must hear what they are sent.
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _default = signal.default_int_handler if _number is signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, _default)

# Files of more than half a minute, the longest first: begun last, one would run on alone.
LONG = (
    "test_serve_hub.py",
    "test_smollm2_exact.py",
    "test_serve_process.py",
    "test_ring_models.py",
    "test_swarm_live.py",
    "test_serve_hub_nat.py",
    "test_report_page.py",
    "test_swarm_processes.py",
    "test_run_scenario.py",
    "test_live_ring.py",
    "test_serve_smollm2.py",
    "test_serve_tiny.py",
    "test_wheel.py",
    "test_serve_hub_joined.py",
    "test_hub_process.py",
    "test_hub_schema.py",
    "test_scenario_hub.py",
    "test_remote_model.py",
    "test_serve_joined.py",
    "test_live_hub.py",
    "test_ring_laps.py",
    "test_join.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(LONG)))
