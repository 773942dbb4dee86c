"""TLS encryption for the native protocol, and the rule that protects API keys on plain connections.

A client uses TLS if the address of its server begins with ``tls://``. It trusts the certificate authorities of the
operating system. If the environment variable ``SSL_CERT_FILE`` is set, it trusts the certificates in that file instead.
On a connection without TLS, a client never sends an API key to another machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import threading
from typing import Any, Sequence

from sinew_client.addresses import ServerAddress
from sinew_client.errors import ClientError

ALLOW_VARIABLE = "SINEW_ALLOW_UNENCRYPTED_KEY"
# A TLS connection begins with a handshake record, whose first byte has this value (RFC 8446, section 5.1). A ZMTP
# connection without TLS begins with 0xff.
FIRST_BYTE = b"\x16"
# One call encrypts at most this many bytes, so that a reply to a slow peer is encrypted only as far as the peer
# accepts.
MAX_PIECE = 1 << 16


class TlsSocket(ssl.SSLSocket):
    """A non-blocking socket with TLS that behaves like a plain socket. Create it with :func:`encrypted`.

    It raises ``BlockingIOError`` where an ``SSLSocket`` raises ``SSLWantReadError``. It is thread-safe: a lock ensures
    that OpenSSL gets one call at a time.
    """

    sendmsg = None  # type: ignore[assignment] # a TLS socket can only send one buffer at a time
    lock: Any

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Receive decrypted bytes into ``buffer``. Return the number of bytes.

        Raises:
            OSError: The connection broke.
        """
        try:
            with self.lock:
                return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: Any, flags: int = 0) -> int:
        """Encrypt and send at most ``MAX_PIECE`` bytes. Return the number of sent bytes.

        Raises:
            OSError: The connection broke.
        """
        try:
            with self.lock:
                return super().send(memoryview(data)[:MAX_PIECE], flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


def encrypted(context: ssl.SSLContext, made: socket.socket, **options: Any) -> TlsSocket:
    """Start TLS on a connected socket.

    Args:
        context: Settings and certificates.
        made: The connected socket.
        **options: Further arguments of ``SSLContext.wrap_socket``, such as ``server_hostname``.

    Returns:
        The socket with TLS.

    Raises:
        OSError: The handshake failed.
    """
    context.sslsocket_class = TlsSocket
    wrapped = context.wrap_socket(made, **options)
    assert isinstance(wrapped, TlsSocket)
    wrapped.lock = threading.Lock()
    return wrapped


def refusal_of(error: ssl.SSLError, address: str) -> str:
    """Explain why a TLS connection to ``address`` failed, with the next step for the user."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{address}: expected a trusted certificate, got {error.verify_message}; to trust your own certificate, set"
            " SSL_CERT_FILE=CERT.pem in the environment"
        )
    return (
        f"{address}: expected a server with TLS, got {error.reason or error}; start it with --tls-cert and --tls-key,"
        " or use tcp:// within this machine"
    )


def is_loopback(host: str | None) -> bool:
    """Return True for an IP address or a host name that always means this machine, such as "127.0.0.1"."""
    if host is None:
        return False
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host.lower() == "localhost"
    # Before Python 3.13, is_loopback is False for IPv4 addresses inside IPv6, such as ::ffff:127.0.0.1.
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def check_key_is_private(servers: Sequence[ServerAddress], key: str, serves_tls: bool = True) -> None:
    """Check that an API key is not sent to another machine without encryption.

    The user can allow it: with ``SINEW_ALLOW_UNENCRYPTED_KEY=1`` in the environment, nothing is checked.

    Args:
        servers: Addresses of the servers. A name other than localhost counts as another machine.
        key: The API key; "" if no key is sent.
        serves_tls: False if the server at the address does not support TLS, so that the error does not suggest TLS.

    Raises:
        ClientError: The key would be sent unencrypted. The message lists what the user can do.
    """
    if not key or os.environ.get(ALLOW_VARIABLE) == "1":
        return
    for server in servers:
        scheme, host, port = server.scheme, server.host, server.port
        if scheme in ("ipc", "tls", "https") or is_loopback(host):
            continue
        secure = f"{'tls' if scheme == 'tcp' else 'https'}{server.text[len(scheme) :]}"
        ways = [f"start the server with --tls-cert and --tls-key, and use {secure}"] if serves_tls else []
        ways += [
            f"run `ssh -N -L {port}:127.0.0.1:{port} {host}` and use {scheme}://127.0.0.1:{port}",
            f"on a network that you trust, set {ALLOW_VARIABLE}=1",
        ]
        choices = "; ".join(f"({number}) {way}" for number, way in enumerate(ways, 1))
        raise ClientError(
            f"{server.text}: expected encryption for the API key, got a plain connection to another machine; nothing"
            f" was sent. Choose one: {choices}"
        )
