"""Two hosts on one machine: network namespaces with a cable between them."""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def two_hosts() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces joined by a cable; gives (namespace, its address, our address)."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the `ip` command")
    name = f"kv{uuid.uuid4().hex[:8]}"
    ours, theirs = f"{name}a", f"{name}b"
    subnet = int(name[2:4], 16)
    steps = [
        f"ip netns add {name}",
        f"ip link add {ours} type veth peer name {theirs} netns {name}",
        f"ip addr add 10.123.{subnet}.1/24 dev {ours}",
        f"ip link set {ours} up",
        f"ip -n {name} addr add 10.123.{subnet}.2/24 dev {theirs}",
        f"ip -n {name} link set {theirs} up",
        f"ip -n {name} link set lo up",
    ]
    try:
        for step in steps:
            done = subprocess.run(step.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {step}: {done.stderr.strip()}")
        yield name, f"10.123.{subnet}.2", f"10.123.{subnet}.1"
    finally:
        subprocess.run(["ip", "link", "del", ours], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
