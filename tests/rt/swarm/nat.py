"""A home behind a router, out of network namespaces: it can dial out and cannot be dialled.

    here 198.18.P.1 --- veth --- 198.18.P.2 [router: masquerade] 10.78.P.1 --- veth --- 10.78.P.2 home

Needs root, iproute2 and nftables. Names carry this process's number, so that two runs do not meet.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

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
    is_slowed: bool  # 10 ms each way and 1 % loss: where the kernel can.

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
def home(index: int = 0) -> Iterator[Home]:
    """Built, and removed whatever happens. Homes with other indexes may stand beside it."""
    number = (os.getpid() + 83 * index) % 250 + 1
    name = f"kv{os.getpid()}{'abc'[index]}"
    inner, router = f"{name}w", f"{name}r"
    link = f"{name}h"[:15]
    here, outer = f"198.18.{number}.1", f"198.18.{number}.2"
    address = f"10.78.{number}.2"
    try:
        for namespace in (inner, router):
            _run("ip", "netns", "add", namespace)
            _in(namespace, "ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "wan0", "netns", router)
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
        slowed = _in(router, "tc", "qdisc", "add", "dev", "wan0", "root", "netem",
                     "delay", "10ms", "loss", "1%", is_checked=False)  # fmt: skip
        yield Home(here, outer, address, inner, router, slowed.returncode == 0)
    finally:
        with suppress(subprocess.CalledProcessError):
            _run("ip", "link", "del", link)
        for namespace in (inner, router):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", namespace)


def _in(
    namespace: str, *command: str, text: str = "", is_checked: bool = True
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["ip", "netns", "exec", namespace, *command],
        input=text.encode(), capture_output=True, check=is_checked,
    )  # fmt: skip


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True)
