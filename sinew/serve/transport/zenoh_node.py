"""One Zenoh session of a server: its address, its certificates, who may send what, and how much it receives.

Zenoh calls back on the threads that receive. So a callback only puts what came into a bounded inbox, and
one thread of the server takes it out. Transports know no wire: keys and rules are arguments.
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

ROUTER_S = 10.0  # how long a router may take to answer
MAX_QUERIES = 64  # most waiting queries
MAX_QUERY = 1 << 20  # bytes of one
USER = "sinew"  # robots send it with the first key; sinew2 with the second, and so on


class ZenohNode:
    """Claims an address when created. :meth:`open` lets robots in.

    Args:
        name: Of the wire.
        listen: The address.
        limit: Bytes of one message. Zenoh drops larger ones while they arrive.

    Attributes:
        address: What a robot connects to, with its scheme.
        endpoint: The same as Zenoh writes it.
        inbox: What came, in its order: the tuples that the callbacks of :meth:`queries` and :meth:`samples` made.
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
        listen.tls()  # rejects unusable files before Zenoh reads them
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
            self._config()  # rejects a wrong --zenoh-config before the port is claimed
            self._socket = listen.tcp_socket()
            host, port = self._socket.getsockname()[:2]
            scheme = "tls" if listen.tls_cert else "tcp"
            place = f"{f'[{host}]' if ':' in host else host}:{port}"
        self.endpoint, self.address = f"{scheme}/{place}", f"{scheme}://{place}"

    def open(self, keys: Sequence[str], rules: Sequence[Mapping[str, Any]]) -> Any:
        """Let robots in, and return Zenoh's session.

        Args:
            keys: One of them is required of each robot; empty for none.
            rules: Of Zenoh's access control: what robots may send and receive. Everything else is rejected.

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
        atexit.register(self.close)  # its threads must not call an interpreter that ends
        return self._session

    def close(self) -> None:
        """End the session and free the address. Also when it was never opened, and twice."""
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

    # ------------------------------------------------------------------------- what comes

    def direct(self, callback: Callable[[Any], None]) -> Any:
        """Return a callback that Zenoh calls on the thread that receives. By default it has a thread for each, which
        keeps the process until the session is closed, and a queue before it. callback: it must not wait."""
        return self.zenoh.handlers.Callback(callback, indirect=False)

    def queries(self, made: Callable[[Any], Any]) -> Any:
        """Return a callback for queries. made: what it puts into the inbox for one. ``answered`` frees its place."""

        def enqueue(query: Any) -> None:
            with self._lock:
                full = self._queries >= MAX_QUERIES or len(query.payload or b"") > MAX_QUERY
                self._queries += not full
            if full:
                query.drop()  # the robot learns at once that nobody answers
                return
            self.inbox.put(made(query))

        return self.direct(enqueue)

    def answered(self) -> None:
        """Free the place of a query that was taken out of the inbox."""
        with self._lock:
            self._queries -= 1

    def samples(self, made: Callable[[Any], Any]) -> Any:
        """Return a callback for samples. made: what it puts into the inbox for one; None drops it. ``taken`` frees its
        bytes."""

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

    # ------------------------------------------------------------------------- settings

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
        """Have Zenoh require a user and a password. It reads them from a file, which this user alone may read."""
        if any(":" in key or "\n" in key for key in keys):
            raise SinewError(f"--api-key-file: for --wire {self._name} a key may not contain a colon")
        handle, name = tempfile.mkstemp(prefix="sinew-zenoh-")  # the file has mode 0600
        self._dictionary = Path(name)
        with os.fdopen(handle, "w") as file:
            for index, key in enumerate(keys):
                file.write(f"{USER}{index + 1 if index else ''}:{key}\n")
        _set(config, "transport/auth/usrpwd", user=USER, password=keys[0], dictionary_file=name)


def _set(config: Any, at: str, **values: Any) -> None:
    """Set several values of one part of the configuration; those of the user's file beside them stay."""
    current: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # Zenoh has no name for a part that is not set
        current = parse_json(config.get_json(at)) or {}
    config.insert_json5(at, json.dumps({**current, **values}))
