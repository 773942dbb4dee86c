"""The address on which a protocol listens, and the limits of its connections."""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import ssl
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sinew_client.untrusted import UntrustedError, read_bytes

from sinew.core import SinewError
from sinew.serve.access import is_loopback
from sinew.serve.renewed import ReloadedFile

logger = logging.getLogger(__name__)

ARRIVAL_S = 10.0  # seconds within which a request must arrive completely; robots need much less
CERTIFICATE = r"(?s)-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----"
TIMES = rb"[\x17\x18][\x0d\x0f](\d{12,14})Z"  # times in a DER certificate; a year of two digits is in this century
# The extension basicConstraints with CA:TRUE in a DER certificate (RFC 5280).
AUTHORITY = rb"\x06\x03\x55\x1d\x13(\x01\x01\xff)?\x04.\x30.\x01\x01\xff"
KEY = r"-----BEGIN (?!ENCRYPTED)[A-Z ]*PRIVATE KEY-----(?!\s*Proc-Type: 4,ENCRYPTED)"


class AddressError(SinewError):
    """Error for an address that the server cannot listen on, because it is in use or does not belong to this
    machine.
    """

    code = "bad_address"


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """Settings of the protocol lerobot-remote in addition to a port. LeRobot's robots compare them with their own
    settings.

    Attributes:
        deployment: Name by which robots find the policy; "" for the name of the bundle.
        semantics: Name of the units of state and action, which each robot has to repeat; "" for the bundle's
            units.
        camera_sizes: Camera -> height and width of its frames, if they differ from the training data.
        router: Endpoint of a Zenoh router to connect to, such as tls/HOST:7447; "" to listen for robots.
        zenoh_config: JSON5 file with further settings of Zenoh, such as certificates; None without a file.
    """

    deployment: str = ""
    semantics: str = ""
    camera_sizes: tuple[tuple[str, tuple[int, int]], ...] = ()
    router: str = ""
    zenoh_config: Path | None = None


@dataclass(frozen=True, slots=True)
class Listen:
    """The address of a server, and its settings.

    Attributes:
        host: An address of this machine. The default is reachable from this machine only.
        port: The port; 0 picks a free port.
        path: Path of a Unix socket in place of a port, for the protocols of ZeroMQ.
        max_message_bytes: Largest size of one request.
        max_connections: Most open connections, if the protocol can count them.
        arrival_s: Seconds from a request's first byte to its last, after which its connection is closed.
        tls_cert: PEM file of the certificate, for protocols with TLS (native, openpi, http, lerobot).
        tls_key: PEM file of the certificate's key; None if ``tls_cert`` has the key.
        origins: Web pages that may send requests to the web protocols, as browsers write them (https://host:port).
        hosts: Further names of this server, which its web pages may have in their address.
        dashboard: True to show a page at / of the web protocols.
        remote: Settings of the protocol lerobot-remote.
    """

    host: str = "127.0.0.1"
    port: int = 0
    path: str = ""
    max_message_bytes: int = 64 << 20
    max_connections: int = 256
    arrival_s: float = ARRIVAL_S
    tls_cert: Path | None = None
    tls_key: Path | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    dashboard: bool = False
    remote: RemoteSettings = RemoteSettings()

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def numeric_host(self) -> str:
        """Return the host as a numeric address, because ZeroMQ does not look up host names for a listening socket.

        Raises:
            OSError: The host name is unknown.
        """
        if self.host in ("*", ""):
            return "0.0.0.0"  # noqa: S104 - the user requested all interfaces
        addresses = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        # Prefer IPv4, because clients use 127.0.0.1 for localhost.
        addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return str(addresses[0][4][0])

    def tcp_socket(self) -> socket.socket:
        """Return a bound and listening socket. Connections wait in its backlog until they are accepted.

        Raises:
            AddressError: The address is in use, or does not belong to this machine.
        """
        try:
            host = self.numeric_host()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, self.port), family=family, backlog=self.max_connections)
        except OSError as error:
            # The error numbers of the name resolver differ from the error numbers of the system.
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise AddressError(f"cannot listen on {self.host}:{self.port}: {why}") from error
        listener.setblocking(False)
        return listener

    def at(self, place: int | str) -> Listen:
        """Return these settings with a port, or with the path of a Unix socket."""
        return replace(self, path=place) if isinstance(place, str) else replace(self, port=place)

    def unix_socket(self) -> socket.socket:
        """Return a bound and listening Unix socket at ``path``. Only this user may connect. A socket file of a
        killed server is replaced.

        Raises:
            AddressError: The path is in use, or cannot be used.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if os.path.lexists(self.path):
                self._take_away()
            listener.bind(self.path)
            # Set the mode before listen(), so that no other user can connect.
            Path(self.path).chmod(0o600)
            listener.listen(self.max_connections)
        except OSError as error:
            listener.close()
            raise AddressError(f"cannot listen on ipc://{self.path}: {error.strerror or error}") from error
        listener.setblocking(False)
        return listener

    def _take_away(self) -> None:
        """Remove the socket file of a server that does not run any more.

        Raises:
            OSError: The path is not a socket file, or a server listens on it.
        """
        if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
            raise FileExistsError(
                errno.EEXIST, "a file that is not a socket has this name; choose another name"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(self.path) != errno.ECONNREFUSED:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        Path(self.path).unlink()

    def tls(self) -> ssl.SSLContext | None:
        """Return the server's TLS context; None if there are no certificate files. New connections use the newest
        content of the files.

        Raises:
            SinewError: The files are not usable.
        """
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise SinewError(f"TLS: --tls-key {self.tls_key}: pass --tls-cert too")
            return None
        newest = ReloadedFile([path for path in (self.tls_cert, self.tls_key) if path], self._tls_context)

        def choose(connection: ssl.SSLSocket | ssl.SSLObject, _name: str, _first: ssl.SSLContext) -> None:
            connection.context = newest()

        context = newest()
        # OpenSSL calls this function in every handshake, also if the client sends no server name.
        context.sni_callback = choose
        return context

    def _tls_context(self) -> ssl.SSLContext:
        assert self.tls_cert is not None
        cert, key = self.tls_cert, self.tls_key or self.tls_cert
        files = f"--tls-cert {cert}", f"--tls-key {key}" if self.tls_key else f"without --tls-key {key}"
        for file, path, pattern in zip(files, (cert, key), (CERTIFICATE, KEY), strict=True):
            if not path.is_file() or re.search(pattern, _pem(path)) is None:
                what = "certificate" if pattern == CERTIFICATE else "private key without a passphrase"
                raise SinewError(f"TLS: {file}: expected a PEM file with a {what}, got a file without it")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(cert, self.tls_key)
        except (OSError, ValueError) as error:
            # NO_CERTIFICATE means that the key has another algorithm than the certificate.
            other = "MISMATCH" in str(error) or "NO_CERTIFICATE" in str(error)
            why = "the key does not belong to this certificate" if other else error
            raise SinewError(f"TLS: {', '.join(files)}: {why}") from error
        if (end := _end(cert)) < time.strftime("%Y%m%d%H%M%S", time.gmtime()):
            logger.warning(
                "TLS: %s: the certificate ended on %s (UTC), so clients reject it; renew it", files[0], end
            )
        return context


def _pem(path: Path) -> str:
    """Return the text of a PEM file (a certificate or a key).

    Raises:
        SinewError: The file cannot be read.
    """
    with SinewError.at(f"TLS: {path}", OSError, UntrustedError):
        return read_bytes(path).decode("utf-8", "replace")


def is_authority(cert: Path) -> bool:
    """Return True if the first certificate in a file belongs to a certificate authority. The TLS library rustls rejects
    a server that identifies itself with such a certificate.
    """
    return re.search(AUTHORITY, _der(cert), re.DOTALL) is not None


def _der(cert: Path) -> bytes:
    first = re.search(CERTIFICATE, _pem(cert))
    return ssl.PEM_cert_to_DER_cert(first[0] if first else "")


def _end(cert: Path) -> str:
    """Return the time at which the first certificate in a file expires, as %Y%m%d%H%M%S in UTC. It is the second time
    in the certificate (RFC 5280).
    """
    times = re.findall(TIMES, _der(cert))
    return f"20{times[1].decode()}"[-14:]


def reachable(address: str) -> str:
    """Return an address as a client writes it. An address of all interfaces is replaced by this machine's name."""
    for wildcard in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
        if f"//{wildcard}:" in address:
            return address.replace(wildcard, socket.gethostname())
    return address
