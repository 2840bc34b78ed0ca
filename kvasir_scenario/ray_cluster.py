"""A Ray cluster that runs already, for the shells that place work on it (extra `cluster`)."""

import logging
import os
import socket
from importlib import import_module
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_scenario.digits import whole_number

CONNECT_S_MAX = 5.0


def connected(address: str) -> Any:
    """The module `ray`, connected to a cluster; without telemetry and dashboard.

    Args:
        address: `HOST:PORT`, or `auto` for the one that runs on this machine.

    Raises:
        ScenarioError: Ray is not installed, or there is no such cluster.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise ScenarioError(
            "--cluster needs Ray, which is not installed: pip install 'kvasir[cluster]'"
        ) from None
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        raise _unreachable(address, error) from None
    return ray


def node_address() -> str:
    """The address by which the other nodes reach this one."""
    util: Any = import_module("ray.util")
    return str(util.get_node_ip_address())


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or whole_number(port, 1, 65535) is None:
        raise ScenarioError(f"--cluster {address[:80]}: it must be auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S_MAX).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> ScenarioError:
    said = " ".join(str(error).split())[:300]
    return ScenarioError(
        f"--cluster {address}: no Ray cluster answers ({said}); start one on this machine with "
        "`ray start --head`, or join one with `ray start --address=HOST:PORT`"
    )
