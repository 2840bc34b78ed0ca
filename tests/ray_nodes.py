"""A real Ray cluster of two nodes with one core each, both on loopback."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

START_S = 120.0

# Ray takes 127.0.0.1 for the machine's outer address; the rest of 127.0.0.0/8 it leaves alone.
CLUSTER = """\
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.2"})
cluster.add_node(**node, node_ip_address="127.0.0.3")
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def two_nodes() -> Iterator[tuple[str, int]]:
    """Yields where the cluster listens, and the process above all of it; it ends with the block."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert select.select([process.stdout], [], [], START_S)[0], "the cluster starts"
        words = process.stdout.readline().split()
        assert words[:1] == ["address"], words
        yield words[1], process.pid
    finally:
        process.stdin.close()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
