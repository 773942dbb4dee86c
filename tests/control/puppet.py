"""A server of the native protocol without a policy, and a proxy for any server, for tests of faults."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from typing import Any

import numpy as np
import zmq
from sinew_client import schema


class Puppet:
    """A server that answers every request after ``delay`` seconds.

    The answer is ``rows`` [H, D], plus 100 times the number of the answer. A test may change the attributes while the
    server runs.

    Attributes:
        silent: True to receive requests and never answer.
        nan: True for answers with NaN.
        metadata: The answer to requests for metadata.
        asked: The requests for actions that have arrived, without frames.
    """

    def __init__(
        self, rows: int = 20, dim: int = 2, delay: float = 0.02, metadata: dict[str, Any] | None = None
    ):
        self.rows, self.dim, self.delay, self.metadata = rows, dim, delay, metadata
        self.silent = self.nan = False
        self.answered = 0
        self.asked: list[Any] = []
        self._end = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            if not self._socket.poll(20):
                continue
            *head, body = self._socket.recv_multipart()
            if self.silent:
                continue
            time.sleep(self.delay)
            request = schema.PredictRequest.FromString(body)
            if request.kind == schema.PredictRequest.METADATA:
                reply = schema.PredictResponse(request_id=request.request_id)
                reply.metadata = json.dumps(self.metadata)
                self._socket.send_multipart([*head, reply.SerializeToString()])
                continue
            request.ClearField("images")
            self.asked.append(request)
            actions = 100.0 * self.answered + np.arange(self.rows)[:, None] + np.zeros(self.dim)
            if self.nan:
                actions[-1] = np.nan
            reply = schema.PredictResponse(request_id=request.request_id, horizon=self.rows, dim=self.dim)
            reply.actions.extend(actions.ravel().tolist())
            self.answered += 1
            self._socket.send_multipart([*head, reply.SerializeToString()])
        self._socket.close(0)
        self._context.term()

    def __enter__(self) -> Puppet:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._end.set()
        self._thread.join()


class Proxy:
    """A proxy that forwards TCP connections to ``port``. A test may change the attributes while the proxy runs.

    Attributes:
        frozen: True to keep connections open without forwarding bytes, as after a cable was unplugged (half-open).
        loss: Probability that a segment is delayed by ``stall`` seconds, as TCP delays a lost packet.
    """

    def __init__(self, port: int, seed: int = 0):
        self.frozen, self.loss, self.stall = False, 0.0, 0.2
        self._to, self._random = port, random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close every connection."""
        for found in self._open:
            _shut(found)
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                _shut(ours)
                continue
            self._open += [ours, theirs]
            for source, target in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._carry, args=(source, target, self.frozen), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, dead: bool) -> None:
        """Forward bytes. After bytes were dropped, a connection forwards nothing more, because its stream has a gap."""
        try:
            while data := source.recv(1400):
                dead = dead or self.frozen
                if dead:
                    continue
                if self._random.random() < self.loss:
                    time.sleep(self.stall)
                target.sendall(data)
        except OSError:
            pass
        finally:
            if not dead:
                _shut(target)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _shut(self._listener)
        self.cut()


def _shut(found: socket.socket) -> None:
    with contextlib.suppress(OSError):
        found.shutdown(socket.SHUT_RDWR)
    found.close()
