"""A home behind a router, out of network namespaces: it can dial out and cannot be dialled.

    here 198.18.P.1 --- line --- 198.18.P.2 [router: masquerade] 10.78.P.1 --- veth --- 10.78.P.2 home

The line is a veth, or a slow and lossy one. Needs root, iproute2, nftables and TUN. Names carry this process's number, so that two runs do not meet.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.rt.swarm.slow_link import DEVICE, Loss, SlowLink, slow_link

RULES = """
table ip home {
  counter knocks {}
  chain masq {
    type nat hook postrouting priority srcnat
    oifname "wan0" masquerade
  }
  chain through {
    type filter hook forward priority filter; policy drop;
    ct state established,related accept
    iifname "lan0" oifname "wan0" ct state new accept
    iifname "wan0" counter name knocks
  }
  chain inward {
    type filter hook input priority filter; policy drop;
    iifname { "lo", "lan0" } accept
    ct state established,related accept
    iifname "wan0" counter name knocks
  }
}
"""
PROBE = "table ip p { chain c { type nat hook postrouting priority srcnat; masquerade\n}\n}"


def missing() -> str:
    """Why no home can be built here; empty if one can."""
    for program in ("ip", "nft"):
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None:
            return f"{program} is not installed (Debian: iproute2, nftables)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        os.close(os.open(DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{DEVICE}: {error.strerror}"
    probe = f"kv{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    if made.returncode:
        return f"ip netns add: {made.stderr.decode().strip()}"
    rules = _in(probe, "nft", "-f", "-", text=PROBE, is_checked=False)
    _run("ip", "netns", "del", probe)
    return "" if rules.returncode == 0 else f"nft: {rules.stderr.decode().strip()[:200]}"


@dataclass(frozen=True)
class Home:
    """Where its router is seen, and how to run something inside."""

    here: str  # Our address on the router's outer side.
    router: str
    address: str  # Of the home behind it.
    namespace: str
    router_namespace: str
    line: SlowLink | None  # None: a veth.

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace)

    def reach(self, address: str) -> None:
        """Give the router a way to another address of this machine."""
        _in(self.router_namespace, "ip", "route", "replace", f"{address}/32", "via", self.here)

    @property
    def knocks(self) -> int:
        """Packets that tried to open something towards the home or its router."""
        shown = _in(self.router_namespace, "nft", "list", "counter", "ip", "home", "knocks")
        return int(shown.stdout.decode().split("packets")[1].split()[0])


@contextmanager
def home(index: int = 0, loss: Loss | None = None) -> Iterator[Home]:
    """Built, and removed whatever happens. Homes with other indexes may stand beside it.

    Args:
        index: 0 to 2.
        loss: What its line to us is like; None is fast and loses nothing.
    """
    number = (os.getpid() + 83 * index) % 250 + 1
    name = f"kv{os.getpid()}{'abc'[index]}"
    inner, router = f"{name}w", f"{name}r"
    link = f"{name}h"[:15]
    here, outer = f"198.18.{number}.1", f"198.18.{number}.2"
    address = f"10.78.{number}.2"
    with ExitStack() as stack:
        for namespace in (inner, router):
            _run("ip", "netns", "add", namespace)
            stack.callback(_quietly, "ip", "netns", "del", namespace)
            _in(namespace, "ip", "link", "set", "lo", "up")
        line = None
        if loss is None:
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "wan0", "netns", router)
            stack.callback(_quietly, "ip", "link", "del", link)
        else:
            line = stack.enter_context(slow_link(link, f"{name}x", loss))
            _run("ip", "link", "set", f"{name}x", "netns", router, "name", "wan0")
        _run("ip", "addr", "add", f"{here}/30", "dev", link)
        _run("ip", "link", "set", link, "up")
        _in(router, "ip", "addr", "add", f"{outer}/30", "dev", "wan0")
        _in(router, "ip", "link", "set", "wan0", "up")
        _in(router, "ip", "link", "add", "lan0", "type", "veth", "peer", "name", "eth0",
            "netns", inner)  # fmt: skip
        _in(router, "ip", "addr", "add", f"10.78.{number}.1/24", "dev", "lan0")
        _in(router, "ip", "link", "set", "lan0", "up")
        _in(inner, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        _in(inner, "ip", "link", "set", "eth0", "up")
        _in(inner, "ip", "route", "add", "default", "via", f"10.78.{number}.1")
        _run("ip", "route", "add", f"10.78.{number}.0/24", "via", outer)  # Even with a way there.
        _in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        _in(router, "nft", "-f", "-", text=RULES)
        yield Home(here, outer, address, inner, router, line)


def _in(
    namespace: str, *command: str, text: str = "", is_checked: bool = True
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["ip", "netns", "exec", namespace, *command],
        input=text.encode(), capture_output=True, check=is_checked,
    )  # fmt: skip


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)


def _quietly(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=False)
