"""Parse the addresses of servers, and choose the one that a client uses. This module opens no sockets."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Iterator, Sequence

from sinew_client.errors import ClientError

logger = logging.getLogger("sinew_client")

# After one of these error codes, the client tries the next address, because this server accepts no more requests.
LEAVING = ("shutting_down", "unhealthy")
# A client with a single address waits between two attempts to connect. The pause doubles after each failed attempt.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
_WEB = ("http", "https")


def split_scheme(text: str) -> tuple[str, str]:
    """Split a text into the scheme of an address and the rest.

    Args:
        text: An address such as ``tcp://host:port``, or any other text.

    Returns:
        (scheme, rest). The scheme is "" if the text has none.

    Example:
        >>> split_scheme("tcp://server:5555")
        ('tcp', 'server:5555')
        >>> split_scheme("policy.gguf")
        ('', 'policy.gguf')
    """
    scheme, separator, rest = text.partition("://")
    return (scheme, rest) if separator else ("", text)


def host_and_port(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. The brackets around an IPv6 address are removed.

    Returns:
        (host, port). ("", 0) if the text has another form, or if the port is above 65535.

    Example:
        >>> host_and_port("[::1]:5555")
        ('::1', 5555)
    """
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        return "", 0
    bracketed = host.startswith("[") and host.endswith("]")
    return host[1:-1] if bracketed else host, int(port)


def split_list(addresses: str | Sequence[str]) -> list[str]:
    """Return the addresses of a sequence, or of a text that separates them by commas."""
    return addresses.split(",") if isinstance(addresses, str) else list(addresses)


@dataclass(frozen=True)
class ServerAddress:
    """The address of one server.

    Attributes:
        text: The address with its scheme and without the policy's name, such as ``tcp://[::1]:5555``.
        scheme: "tcp", "tls" or "ipc"; "http" or "https" for a web server.
        host: Host name or IP address, without brackets; "" for a Unix socket.
        port: The port; 0 for a Unix socket.
        path: Path of a Unix socket, else "".
        policy: Name of the policy at the server; "" for the server's first policy.
    """

    text: str
    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    policy: str = ""

    @classmethod
    def parse(cls, text: str, web: bool = False) -> ServerAddress:
        """Parse an address.

        Args:
            text: ``[tcp://]host:port[/policy]``, ``tls://host:port[/policy]`` or ``ipc:///path[#policy]``. With
                ``web``: ``http://host:port`` or ``https://host:port``.
            web: True for the address of a web server.

        Returns:
            The address.

        Raises:
            ClientError: The text has another form, the host name is not valid, or this system has no Unix sockets.

        Example:
            >>> ServerAddress.parse("server:5555/pick").policy
            'pick'
        """
        scheme, rest = split_scheme(text)
        if scheme == "ipc" and rest.startswith("/") and not web:
            if not hasattr(socket, "AF_UNIX"):
                raise ClientError(f"{text}: this system has no Unix sockets; use tcp://HOST:PORT")
            path, _, policy = rest.partition("#")
            return cls(f"ipc://{path}", scheme, path=path, policy=policy)
        place, _, policy = rest.partition("/")
        host, port = host_and_port(place)
        if scheme not in (_WEB if web else ("", "tcp", "tls")) or not port:
            expected = (
                "http://HOST:PORT"
                if web
                else "tcp://HOST:PORT with the port of the native protocol (5555, or PORT of"
                " `sinew serve --wire native:PORT`), tls://HOST:PORT if the server has --tls-cert,"
                " or ipc:///PATH if it has `--wire native:ipc:///PATH`"
            )
            raise ClientError(f"address: expected {expected}, got {text!r}")
        address = cls(f"{scheme or 'tcp'}://{place}", scheme or "tcp", host, port, policy=policy)
        try:
            host.encode("idna")
        except UnicodeError as error:
            raise ClientError(
                f"cannot connect to {address.text}: {error}; correct the name of the host"
            ) from None
        return address


class Addresses:
    """The server addresses of a client, in the order in which the client tries them. All servers have the same policy.

    Args:
        address: One address, or several addresses in the order in which they are tried.

    Attributes:
        all: The addresses without the policy's name.
        servers: The parsed addresses.
        given: The addresses as the user wrote them.
        policy: Name of the policy at the servers; "" for each server's first policy.
        place: Index of the present address in ``all``.

    Raises:
        ClientError: There is no address, or the addresses name several policies.
    """

    def __init__(self, address: str | Sequence[str]):
        texts = split_list(address)
        self.servers = tuple(map(ServerAddress.parse, texts))
        if len({server.policy for server in self.servers}) != 1:
            raise ClientError(
                f"address: expected one or more addresses, all with the same policy, got {address!r}"
            )
        self.all = tuple(server.text for server in self.servers)
        # `given` has the addresses as the user wrote them, with the policy's name. `all` has them without that name.
        self.given = tuple(texts)
        self.policy = self.servers[0].policy
        self.place = 0

    def __len__(self) -> int:
        return len(self.all)

    @property
    def present(self) -> str:
        """The address that the client uses at present."""
        return self.all[self.place]

    @property
    def server(self) -> ServerAddress:
        """The parsed address that the client uses at present."""
        return self.servers[self.place]

    def move(self, place: int, why: str) -> bool:
        """Change to the next address after a failure, and log the reason.

        Args:
            place: Index of the address that failed.
            why: Reason of the failure, for the log.

        Returns:
            True if the address was changed. False if there is only one address, or if another thread has changed the
            address already.
        """
        if len(self.all) < 2 or place != self.place:
            return False
        before, self.place = self.present, (self.place + 1) % len(self.all)
        logger.warning("%s: %s; trying %s", before, why, self.present)
        return True


def pauses() -> Iterator[float]:
    """Yield the pause after each failed attempt to connect, in seconds: 0.1, 0.2, 0.4, 0.8, 1, 1 ..."""
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_S)
