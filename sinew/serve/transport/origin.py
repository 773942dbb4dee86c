"""Web pages must not drive a robot: requests that a browser sends on behalf of a page are refused.

A server on loopback is reachable by every page that the user of the machine has open, without a key. A browser says
so itself: it sends ``Origin`` with WebSockets and with POST, and a page that had its own name resolved to 127.0.0.1
(DNS rebinding) sends that name as ``Host``. Robot clients send no Origin and the address that they were given.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from sinew.serve.transport.listen import Listen


def refuse_web_pages(request: web.Request, listen: Listen) -> web.Response | None:
    """The refusal, or None for a request that no foreign page has sent."""
    host = request.headers.get("Host", "")
    if listen.is_loopback and not _is_here(host):
        return _forbidden(f"Host: expected an address of this machine, got {host[:80]!r}")
    origin = request.headers.get("Origin")
    if origin is None or origin in listen.origins:
        return None
    if origin != "null" and urlsplit(origin).netloc == host:
        return None  # a page of this very server
    return _forbidden(f"Origin: requests from web pages are refused, got {origin[:80]!r}; see --allow-origin")


def _is_here(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _forbidden(reason: str) -> web.Response:
    response = web.Response(status=403, text=f"{reason}\n")
    response.force_close()
    return response
