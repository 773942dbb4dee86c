"""Access rules for every port of Sinew: checks of keys, of the client's address, and of the headers Host and Origin.

**Keys.** A server with keys rejects a request without one of its keys. Keys travel in the header ``Authorization``
or ``X-API-Key``, in gRPC's metadata, or in a field of the native protocol. A key never travels in an address, a
cookie or a body of HTTP. A key of the role ``metrics`` allows only ``/metrics``. A key of the role ``robot`` allows
everything except ``/metrics`` and changes of policies. A key of the role ``admin``, or without a role, allows
everything.

**Web pages** must not drive a robot or use its cameras. A server without a key could be reached by every page in a
browser on this machine. The browser marks such requests: it sends ``Origin`` with WebSockets and with POST. With
DNS rebinding, a page resolves its own name to the server's address. The browser then sees one origin for the page
and the server: it sends the page's name as ``Host`` and as ``Origin``, and no ``Origin`` with GET. So ``Host`` must
be an address, a name of this machine or one of ``--allow-host`` for all requests that such a page could send:

* on loopback, for every request;
* elsewhere, for requests with ``Origin``, and for GET. Exceptions are requests that no page can send or use:
WebSockets and POST without ``Origin`` (robots, with any name of the server), ``/healthz`` and ``/metrics`` (probes
and Prometheus, with names of services), and servers with a key, which such a page does not have.
"""

from __future__ import annotations

import base64
import functools
import hmac
import ipaddress
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from sinew_client.auth import ADMIN, METRICS, ROBOT, role_and_key
from sinew_client.tls import is_loopback

from sinew.core import SinewError

OPEN = ("/healthz", "/metrics")
POLICIES = "/v1/policies"  # paths of HTTP and WebSockets have this prefix before a policy's name


class UnauthorizedError(SinewError):
    """Error for a request with a missing or wrong key, on a server that requires a key."""

    code = "unauthorized"


class PortAddress(Protocol):
    """The address of a port, as far as the access rules need it (:class:`sinew.serve.transport.listen.Listen`).

    Attributes:
        host: An address of this machine.
        hosts: Further names of this machine.
        origins: Web pages that may send requests.
    """

    @property
    def host(self) -> str: ...
    @property
    def hosts(self) -> Sequence[str]: ...
    @property
    def origins(self) -> Collection[str]: ...


def check_key(key: str | bytes | None, keys: Sequence[str], role: str = ROBOT) -> None:
    """Check the key of a request. The check takes the same time for every wrong key.

    Args:
        key: The request's key.
        keys: The server's keys; () allows all requests. Each is ``role:key``, or a key that allows everything. The
            role ``admin`` allows everything too.
        role: The role that the request needs.

    Raises:
        UnauthorizedError: The key is not one of the server's keys, or its role does not allow the request.
    """
    if not keys:
        return
    got = key.encode(errors="surrogateescape") if isinstance(key, str) else key or b""
    entries = map(role_and_key, keys)
    roles = [own for own, each in entries if hmac.compare_digest(got, each.encode())]
    if not roles:
        raise UnauthorizedError(
            "this server requires an API key, and the request has no key or a wrong one; pass the key to the client"
        )
    if not {"", ADMIN, role} & set(roles):
        raise UnauthorizedError(
            f"this request requires a key of the role {role}, and its key has the role {roles[0]}; use another key"
        )


def role_for(method: str, path: str) -> str:
    """Return the role (admin, robot or metrics) that a key must have to allow an HTTP request."""
    if path == "/metrics":
        return METRICS
    return ADMIN if path.startswith(POLICIES) and method in ("PUT", "DELETE") else ROBOT


def key_of(authorization: str) -> str:
    """Return the key in a header ``Authorization: Bearer K`` or ``Api-Key K``; "" for another scheme.

    In ``Basic`` the password is the key, for clients that only take an address (``ws://:KEY@host:8000``).
    """
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(key.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return key.strip() if scheme.lower() in ("api-key", "bearer") else ""


def key_in(headers: Mapping[str, str]) -> str:
    """Return the key in the headers of an HTTP request; "" if there is none. The case of the header's name does not
    matter.
    """
    return key_of(headers.get("Authorization", "")) or headers.get("X-API-Key", "")


def refused_page(
    method: str, path: str, headers: Mapping[str, str], place: PortAddress, keyed: bool = False
) -> str | None:
    """Check that an HTTP request does not come from a foreign web page.

    Args:
        method: Method of the request.
        path: Path of the request.
        headers: Headers of the request.
        place: The address of the port.
        keyed: True if the server requires a key.

    Returns:
        The reason to reject the request; None if it is allowed.
    """
    host, origin = headers.get("Host", ""), headers.get("Origin")
    allowed = origin is not None and origin in place.origins
    if is_loopback(place.host):
        checked = True
    elif origin is not None:
        checked = not keyed and not allowed
    else:
        asks = method in ("GET", "HEAD") and "Upgrade" not in headers
        checked = asks and not keyed and path not in OPEN
    if checked and not _is_here(host, place):
        return f"Host: expected an address or a name of this machine, got {host[:80]!r}; see --allow-host"
    if origin is None or allowed:
        return None
    if origin in (f"http://{host}", f"https://{host}"):
        return None  # the request comes from this server's own page
    return f"Origin: requests from web pages are rejected, got {origin[:80]!r}; see --allow-origin"


def _is_here(host: str, place: PortAddress) -> bool:
    name = _name(host)
    if name is None:
        return False
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    if name in _own_names() or name in map(_name, (place.host, *place.hosts)):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str | None:
    """Return the name or address in a ``Host``, in lower case and without the port; None if it is invalid."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None


@functools.cache
def _own_names() -> frozenset[str]:
    """Return the names of this machine, including its name in multicast DNS (NAME.local). No other machine can register
    one of these names on the internet.
    """
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return frozenset({name, short, f"{short}.local"} - {""})
