"""Web pages must not drive a robot, nor look through its cameras: requests that a browser sends on behalf of a page are
refused.

A server without a key is open to every page that a browser beside it has open. A browser says so itself: it sends
``Origin`` with WebSockets and with POST. A page that had its own name resolved to the server's address (DNS rebinding)
is of the same origin for its browser: it sends that name as ``Host``, its ``Origin`` is the same, and GET has none.

So ``Host`` has to be an address, a name of this machine or one of ``--allow-host`` for whatever such a page could ask:

* on loopback, for every request;
* elsewhere, for requests with ``Origin``, and for GET; but not for what no page can send or use: WebSockets and POST
  without ``Origin`` (robots, by whatever name they know the server), ``/healthz`` and ``/metrics`` (probes and
  Prometheus, by the names of services), and not where a key is wanted, which such a page does not have.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
from urllib.parse import urlsplit

from aiohttp import web

from sinew.serve.transport.listen import Listen

OPEN = ("/healthz", "/metrics")


def refuse_web_pages(request: web.Request, listen: Listen, wants_key: bool = False) -> web.Response | None:
    """Return the refusal, or None for a request that no foreign page has sent. wants_key: the server wants one."""
    host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
    allowed = origin is not None and origin in listen.origins
    if listen.is_loopback:
        looked_at = True
    elif origin is not None:
        looked_at = not wants_key and not allowed
    else:
        asks = request.method in ("GET", "HEAD") and "Upgrade" not in request.headers
        looked_at = asks and not wants_key and request.path not in OPEN
    if looked_at and not _is_here(host, listen):
        return _forbidden(
            f"Host: expected an address or a name of this machine, got {host[:80]!r}; see --allow-host"
        )
    if origin is None or allowed:
        return None
    if origin.partition("://")[2] == host:
        return None  # a page of this very server
    return _forbidden(f"Origin: requests from web pages are refused, got {origin[:80]!r}; see --allow-origin")


def _is_here(host: str, listen: Listen) -> bool:
    name = _name(host)
    if name is None:
        return False
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    if name in _own_names() or name in map(_name, (listen.host, *listen.hosts)):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str | None:
    """Return the name or address in a ``Host``, in lower case and without the port; None where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None


@functools.cache
def _own_names() -> frozenset[str]:
    """Return what this machine calls itself, and what multicast DNS calls it: names that no stranger can register."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({name, short, f"{short}.local"} - {""})


def _forbidden(reason: str) -> web.Response:
    response = web.Response(status=403, text=f"{reason}\n")
    response.force_close()
    return response
