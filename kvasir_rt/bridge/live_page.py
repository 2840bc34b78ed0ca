"""The files of a live page: plain HTML, a style and scripts, under a strict policy.

They hold nothing of the server's: anybody may load them, also where the data behind them needs a
key. The page asks for it, keeps it in memory, and sends it as any client does.
"""

from functools import cache
from importlib.resources import files

from starlette.responses import Response

KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",  # A newer server has newer scripts.
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
BRIDGE, HUB = "kvasir_rt.bridge", "kvasir_rt.hub"
SHARED = {"/live.css": (BRIDGE, "live.css"), "/live.js": (BRIDGE, "live.js")}
RING_FILES = {"/": (BRIDGE, "ring.html"), "/ring.js": (BRIDGE, "ring.js"), **SHARED}
SWARM_FILES = {"/": (HUB, "swarm.html"), "/swarm.js": (HUB, "swarm.js"), **SHARED}
"""By path: the package that a file lies in, and its name."""


def page_file(where: tuple[str, str]) -> Response:
    """One of the files as an answer."""
    kind = KINDS[where[1].rpartition(".")[2]]
    return Response(_content(*where), headers=HEADERS, media_type=f"{kind}; charset=utf-8")


@cache
def _content(package: str, name: str) -> bytes:
    return files(package).joinpath(name).read_bytes()
