"""One Zenoh session of a server: its address, its certificates, its access rules, and its memory limits.

Zenoh runs callbacks on the threads that receive data. So a callback only puts the data into a bounded inbox, and
one thread of the server reads the inbox. This module is independent of the protocol: keys and rules are
arguments.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinew_client.untrusted import parse_json

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew.serve.transport.ledger import HELD_REQUESTS
from sinew.serve.transport.listen import AddressError, Listen, is_authority

logger = logging.getLogger(__name__)

ROUTER_S = 10.0  # seconds within which a router must answer
MAX_QUERIES = 64  # largest number of waiting queries
MAX_QUERY = 1 << 20  # largest query, bytes
USER = "sinew"  # user name of the first key; the second key has the user name sinew2, and so on


class ZenohNode:
    """One session of the network protocol Zenoh. The constructor claims the address. Robots are accepted after
    :meth:`open`.

    Args:
        name: Name of the protocol.
        listen: The address.
        limit: Largest message in bytes. Zenoh drops larger messages while they arrive.

    Attributes:
        address: The address that a robot connects to, with its scheme.
        endpoint: The same address as Zenoh writes it.
        inbox: The received entries in order: the tuples that the functions of :meth:`queries` and :meth:`samples`
            created.
    """

    def __init__(self, name: str, listen: Listen, limit: int):
        try:
            import zenoh
        except ImportError as error:
            raise MissingPackageError(f"--wire {name}", "zenoh", f" ({error})") from error
        self.zenoh = zenoh
        zenoh.init_log_from_env_or("error")
        self._name, self._listen, self._router = name, listen, listen.remote.router
        self.limit = limit
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queries = self._held = 0
        self._session: Any = None
        self._dictionary: Path | None = None
        # Reject unusable files before Zenoh reads them.
        listen.tls()
        if listen.tls_cert is not None and is_authority(listen.tls_cert):
            raise SinewError(
                f"--tls-cert {listen.tls_cert}: this is the certificate of an authority, which Zenoh's clients reject;"
                " make it with `openssl req -x509 ... -addext basicConstraints=critical,CA:FALSE`"
            )
        self._socket: socket.socket | None = None
        if self._router:
            scheme, slash, place = self._router.partition("/")
            if not slash or scheme not in ("tcp", "tls", "quic") or ":" not in place:
                raise SinewError(f"--router: expected tcp/HOST:PORT or tls/HOST:PORT, got {self._router!r}")
            self.endpoint = self._router
            self._config()
        else:
            self.endpoint = "tcp/127.0.0.1:0"
            # Reject a wrong --zenoh-config before the port is claimed.
            self._config()
            self._socket = listen.tcp_socket()
            host, port = self._socket.getsockname()[:2]
            scheme = "tls" if listen.tls_cert else "tcp"
            place = f"{f'[{host}]' if ':' in host else host}:{port}"
        self.endpoint, self.address = f"{scheme}/{place}", f"{scheme}://{place}"

    def open(self, keys: Sequence[str], rules: Sequence[Mapping[str, Any]]) -> Any:
        """Accept robots, and return Zenoh's session.

        Args:
            keys: The keys, one of which each robot must have; () if no key is required.
            rules: Rules of Zenoh's access control: the messages that robots may send and receive. All others are
                rejected.

        Raises:
            SinewError: The router does not answer, or a key cannot be checked.
            AddressError: The address is in use.
        """
        if keys and self._router and self._listen.remote.zenoh_config is None:
            raise SinewError(
                f"--wire {self._name}: a router authenticates the robots, so --api-key-file has no effect there;"
                " pass --zenoh-config with the router's certificates, or omit --router"
            )
        config = self._config()
        if not self._router:
            if keys:
                self._require_key(config, keys)
            subjects = [{"id": "robots"}]
            policies = [{"rules": [rule["id"] for rule in rules], "subjects": ["robots"]}]
            _set(
                config, "access_control", enabled=True, default_permission="deny",
                rules=list(rules), subjects=subjects, policies=policies,
            )  # fmt: skip
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        try:
            self._session = self.zenoh.open(config)
        except self.zenoh.ZError as error:
            where = f"--router {self._router}" if self._router else f"{self._listen.host}: {self.endpoint}"
            raise AddressError(f"--wire {self._name}: cannot use {where}: {str(error)[:200]}") from error
        # Close the session at exit, because Zenoh's threads must not run callbacks while the interpreter ends.
        atexit.register(self.close)
        return self._session

    def close(self) -> None:
        """End the session and free the address. The method may be called before :meth:`open`, and twice."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._session is not None:
            self._session.close()
            self._session = None
            atexit.unregister(self.close)
        if self._dictionary is not None:
            self._dictionary.unlink(missing_ok=True)
            self._dictionary = None

    def direct(self, callback: Callable[[Any], None]) -> Any:
        """Return a handler that calls ``callback`` on the thread that receives data. ``callback`` must not wait.

        By default, Zenoh starts a thread with a queue for each callback. This thread would keep the process
        alive until the session is closed.
        """
        return self.zenoh.handlers.Callback(callback, indirect=False)

    def queries(self, made: Callable[[Any], Any]) -> Any:
        """Return a callback that puts Zenoh's queries (requests that expect an answer) into the inbox. ``made`` creates
        the inbox entry of a query. :meth:`answered` frees the query's place.
        """

        def enqueue(query: Any) -> None:
            with self._lock:
                full = self._queries >= MAX_QUERIES or len(query.payload or b"") > MAX_QUERY
                self._queries += not full
            if full:
                # Drop the query, so that the robot learns at once that no answer will come.
                query.drop()
                return
            self.inbox.put(made(query))

        return self.direct(enqueue)

    def answered(self) -> None:
        """Free the place of a query that was taken out of the inbox."""
        with self._lock:
            self._queries -= 1

    def samples(self, made: Callable[[Any], Any]) -> Any:
        """Return a callback that puts Zenoh's samples (messages without an answer) into the inbox. :meth:`taken` frees
        the bytes of a sample.

        Args:
            made: Creates the inbox entry of a sample; None drops the sample.
        """

        def enqueue(sample: Any) -> None:
            size = len(sample.payload)
            with self._lock:
                if size > self.limit or self._held + size > HELD_REQUESTS * self.limit:
                    return
                if (entry := made(sample)) is None:
                    return
                self._held += size
            self.inbox.put(entry)

        return self.direct(enqueue)

    def taken(self, size: int) -> None:
        """Free the bytes of a sample that was taken out of the inbox."""
        with self._lock:
            self._held -= size

    def _config(self) -> Any:
        listen, file = self._listen, self._listen.remote.zenoh_config
        try:
            config = self.zenoh.Config() if file is None else self.zenoh.Config.from_file(str(file))
        except self.zenoh.ZError as error:
            raise SinewError(
                f"--zenoh-config {file}: expected a configuration of Zenoh: {str(error)[:200]}"
            ) from error
        for key, value in (
            ("scouting/multicast/enabled", False),
            ("scouting/gossip/enabled", False),
            ("transport/shared_memory/enabled", False),
            ("adminspace/enabled", False),
            ("transport/link/rx/max_message_size", self.limit),
            ("transport/unicast/max_sessions", listen.max_connections),
            ("mode", "client" if self._router else "peer"),
            ("listen/endpoints", [] if self._router else [self.endpoint]),
            ("connect/endpoints", [self._router] if self._router else []),
            ("connect/exit_on_failure", True),
            ("connect/timeout_ms", int(1e3 * ROUTER_S)),
        ):
            config.insert_json5(key, json.dumps(value))
        if listen.tls_cert is not None and not self._router:
            _set(
                config, "transport/link/tls", listen_certificate=str(listen.tls_cert),
                listen_private_key=str(listen.tls_key or listen.tls_cert),
            )  # fmt: skip
        return config

    def _require_key(self, config: Any, keys: Sequence[str]) -> None:
        """Make Zenoh require a user and a password from each robot. Only this user may read the file with the
        passwords.
        """
        if any(":" in key or "\n" in key for key in keys):
            raise SinewError(
                f"--api-key-file: for --wire {self._name} a key may not contain a colon; choose another key"
            )
        handle, name = tempfile.mkstemp(prefix="sinew-zenoh-")  # mkstemp creates the file with mode 0600
        self._dictionary = Path(name)
        with os.fdopen(handle, "w") as file:
            for index, key in enumerate(keys):
                file.write(f"{USER}{index + 1 if index else ''}:{key}\n")
        _set(config, "transport/auth/usrpwd", user=USER, password=keys[0], dictionary_file=name)


def _set(config: Any, at: str, **values: Any) -> None:
    """Set several values in one part of the configuration. Other values in this part, from the user's file, stay."""
    current: dict[str, Any] = {}
    # get_json() raises an error for a part that is not set.
    with contextlib.suppress(Exception):
        current = parse_json(config.get_json(at)) or {}
    config.insert_json5(at, json.dumps({**current, **values}))
