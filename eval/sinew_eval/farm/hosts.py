"""Serve the queue of a run over HTTP to hosts that cannot access its folder.

    GET  /plan                  the plan, as in the folder
    GET  /bundle/N              the bundle of variant N
    POST /claim    {worker}     -> {job, over}: name of a group to play, or null if other workers play the rest
    POST /beat     {worker}     a sign of life
    POST /store/NAME?worker=W   the episodes of a group, one line of JSON each

Every request contains the key of the run: the value of ``SINEW_API_KEY``, or a key that the run draws and prints. The
rules for keys, Host and Origin are those of all listeners (:mod:`sinew.serve.access`), so a web page can neither read
the plan nor store an episode.

Leases and episodes are the same files as those of local workers (``files.py``). Therefore an episode counts once,
whichever process is killed. Every request may be repeated. A worker has one group at a time, and gets the same group
again if it repeats its request. Workers repeat requests to a killed run until its next process answers.
"""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from sinew.core import SinewError
from sinew.serve.access import UnauthorizedError, check_key, is_loopback, key_in, refused_page
from sinew.serve.transport.listen import AddressError, Listen
from sinew_client.addresses import ServerAddress, host_and_port
from sinew_client.auth import KEY_VARIABLE, key_from_environment
from sinew_client.tls import check_key_is_private
from sinew_client.untrusted import open_regular, parse_json, read_text

from sinew_eval.episodes.episode_log import line
from sinew_eval.episodes.outside import TypedNames, allowed, own_hashes
from sinew_eval.episodes.policies import file_hash
from sinew_eval.episodes.runner import Episode
from sinew_eval.farm.files import MAX_BYTES, PLAN, EpisodeQueue, FarmPlan, SeedBatch, read_file

logger = logging.getLogger(__name__)

MAX_KEY = 4096  # largest file with a run's key, in bytes
ANSWER_S = 10.0  # a worker sends its request again after this many seconds without an answer
AWAY_S = 60.0  # a worker gives up after this many seconds without any answer
AGAIN_S = 0.2  # a worker waits this many seconds between two attempts
TOLD_S = 3.0  # the server waits this many seconds at the end, so that workers learn that everything is played
BLOCK = 1 << 20  # bytes of a bundle that are copied at once
# One thread serves one connection. The server closes further connections, and their clients try again.
MOST_THREADS = 256
KEY_HEADER = "X-API-Key"
# File in the queue's folder that only this user can read. A run that continues uses the same key.
KEY_FILE = "key"
WORKER = re.compile(r"[\w.-]{1,100}")


class QueueServer:
    """Serves a queue until it is closed.

    Args:
        folder: Folder of the queue.
        plan: The plan.
        address: ``HOST:PORT``. Port 0 chooses a free port.

    Attributes:
        drawn: Key that this run has drawn. "" if ``SINEW_API_KEY`` contains one.

    Raises:
        SinewError: The server cannot listen on the address, or other machines could reach it without a key.
    """

    def __init__(self, folder: Path, plan: FarmPlan, address: str):
        host, port = host_and_port(address)
        if not host:
            raise SinewError(f"--listen: expected HOST:PORT, got {address!r}")
        key = key_from_environment()
        if not is_loopback(host) and not key:
            raise SinewError(
                f"--listen {address}: other machines can reach this address, so set a key in {KEY_VARIABLE}"
            )
        self.drawn = "" if key else _drawn_key(folder / KEY_FILE)
        self._keys = (key or self.drawn,)
        self._folder, self._plan = folder, plan
        self._jobs = {job.name: job for job in plan.jobs}
        self._left = dict(self._jobs)
        self._queues: dict[str, EpisodeQueue] = {}
        self._untold: set[str] = set()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Use this short timeout (in seconds) until the key of the request has been checked.
            timeout = ANSWER_S

            def do_GET(self) -> None:
                server.answer(self)

            def do_POST(self) -> None:
                server.answer(self)

            def log_message(self, *_: Any) -> None:
                return

        try:
            self._listen = Listen(host, port)
            self._server = _Server(self._listen, Handler)
        except (AddressError, OverflowError) as error:
            raise SinewError(f"--listen {address}: {error}") from None
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Wait up to TOLD_S seconds until all workers know that everything is played. Then stop the server."""
        until = time.monotonic() + TOLD_S
        while self._waited_for() and time.monotonic() < until:
            time.sleep(0.05)
        self._server.shutdown()
        self._server.server_close()

    def _waited_for(self) -> bool:
        with self._lock:
            return not self._still() and bool(self._untold)

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, or reject it with an HTTP status. The body of a request without the key is not read."""
        # The headers have all methods of a mapping that are used below.
        headers: Any = request.headers
        if refused_page(request.command, request.path, headers, self._listen, keyed=True) is not None:
            request.send_error(403, "requests from web pages are rejected")
            return
        try:
            check_key(key_in(headers), self._keys)
        except UnauthorizedError:
            request.send_error(401, f"set the key of the run in {KEY_VARIABLE}")
            return
        request.connection.settimeout(4 * AWAY_S)
        length = request.headers.get("Content-Length", "0")
        if not length.isdecimal() or int(length) > MAX_BYTES:
            request.send_error(413)
            return
        body, url = request.rfile.read(int(length)), urlsplit(request.path)
        try:
            answer = self._found(request.command, url.path.split("/")[1:], parse_qs(url.query), body)
        except (KeyError, ValueError, TypeError, IndexError, OSError) as error:
            request.send_error(404, f"not found: {type(error).__name__}")
            return
        with answer:
            request.send_response(200)
            request.send_header("Content-Length", str(answer.seek(0, os.SEEK_END)))
            request.end_headers()
            answer.seek(0)
            shutil.copyfileobj(answer, request.wfile, BLOCK)

    def _found(
        self, verb: str, place: Sequence[str], query: Mapping[str, list[str]], body: bytes
    ) -> BinaryIO:
        if verb == "GET" and place[0] == "bundle":
            return open_regular(self._plan.variants[int(place[1])].target)
        return io.BytesIO(self._said(verb, place, query, body))

    def _said(self, verb: str, place: Sequence[str], query: Mapping[str, list[str]], body: bytes) -> bytes:
        if verb == "GET" and place == ["plan"]:
            return read_file(self._folder / PLAN)
        if verb == "POST" and place == ["claim"]:
            return json.dumps(self._claimed(_worker(parse_json(body)["worker"]))).encode()
        if verb == "POST" and place == ["beat"]:
            self._queue(_worker(parse_json(body)["worker"])).beat()
            return b"{}"
        if verb == "POST" and place[0] == "store":
            # If the job is not in this plan, an earlier process of the run has already logged its episodes.
            if job := self._jobs.get(place[1]):
                self._queue(_worker(query["worker"][0])).put(job, body)
            return b"{}"
        raise KeyError(verb)

    def _claimed(self, worker: str) -> dict[str, Any]:
        queue = self._queue(worker)
        with self._lock:
            for name in queue.held:
                if name in self._jobs and not queue.played(self._jobs[name]):
                    # The worker still has the lease of this group, so the previous answer was lost. Send it again.
                    return {"job": name, "over": False}
            left = list(self._still().values())
            job = queue.take(left)
            if not left and job is None:
                self._untold.discard(worker)
            return {"job": None if job is None else job.name, "over": not left and job is None}

    def _still(self) -> dict[str, SeedBatch]:
        queue = EpisodeQueue(self._folder, "")
        for name in [name for name, job in self._left.items() if queue.played(job)]:
            del self._left[name]
        return self._left

    def _queue(self, worker: str) -> EpisodeQueue:
        with self._lock:
            if worker not in self._queues:
                self._queues[worker] = EpisodeQueue(self._folder, worker, self._plan.lease_s)
                # Adopt the leases that this worker got from an earlier process of the run.
                self._queues[worker].adopt()
                self._untold.add(worker)
            return self._queues[worker]


def _drawn_key(path: Path) -> str:
    """Return the key that this run has drawn, from a file that only this user can read.

    Raises:
        SinewError: The file cannot be used.
    """
    try:
        if path.is_file() and (key := read_text(path, MAX_KEY).strip()):
            return key
        key = secrets.token_urlsafe(24)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(key)
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror or error}") from None
    return key


def _worker(name: str) -> str:
    if not isinstance(name, str) or not WORKER.fullmatch(name):
        raise ValueError(name)
    return name


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listen: Listen, handler: type[BaseHTTPRequestHandler]):
        super().__init__(("", 0), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen.tcp_socket()
        self.server_address = self.socket.getsockname()

    def verify_request(self, *_: Any) -> bool:
        return threading.active_count() < MOST_THREADS

    def handle_error(self, *_: Any) -> None:
        """Print nothing if a client disconnects, because it repeats its request."""
        logger.debug("a request ended early: %s", sys.exception())


class RemoteQueue:
    """Client of a queue on another host, with the interface of :class:`sinew_eval.farm.files.EpisodeQueue`.

    Args:
        address: Address of the run.
        worker: Name of this worker.
        lease_s: A lease expires after this many seconds without a sign of life.

    Raises:
        SinewError: The run has not answered for AWAY_S seconds, or has rejected a request.
        ClientError: The key would travel unencrypted to another machine.
    """

    def __init__(self, address: str, worker: str, lease_s: float):
        check_key_is_private(
            [ServerAddress.parse(address, web=True)], key_from_environment(), serves_tls=False
        )
        self.address, self.worker, self.lease_s = address, worker, lease_s
        self.over = False
        self._local = threading.local()

    @property
    def goes_on(self) -> bool:
        return not self.over

    def take(self, open_groups: list[SeedBatch]) -> SeedBatch | None:
        try:
            answer = parse_json(self.ask("POST", "/claim", {"worker": self.worker}))
            name, self.over = answer["job"], bool(answer["over"])
        except (ValueError, TypeError, KeyError) as error:
            raise SinewError(
                f"{self.address}: expected a group to play, got an invalid answer ({error})"
            ) from None
        job = next((job for job in open_groups if job.name == name), None)
        if job is None and name is not None:
            raise SinewError(
                f"{self.address}: another evaluation has started here; run `sinew eval --join` again"
            )
        return job

    def store(self, job: SeedBatch, key: str, episodes: Sequence[Episode]) -> None:
        lines = b"".join(line(key, episode) for episode in episodes)
        self.ask("POST", f"/store/{job.name}?worker={self.worker}", lines)

    def beat(self) -> None:
        self.ask("POST", "/beat", {"worker": self.worker})

    def ask(
        self, verb: str, path: str, data: Mapping[str, Any] | bytes | None = None, into: Path | None = None
    ) -> bytes:
        """Send a request, and repeat it until an answer arrives.

        Args:
            verb: HTTP method.
            path: Path of the request.
            data: Body: bytes, or an object for JSON.
            into: File for an answer that may be larger than memory. None to return the answer.

        Returns:
            Body of the answer. Empty if it was written to ``into``.

        Raises:
            SinewError: The run has not answered for AWAY_S seconds, or has rejected the request.
        """
        body = data if isinstance(data, bytes | None) else json.dumps(data).encode()
        began = time.monotonic()
        while True:
            try:
                connection = getattr(self._local, "connection", None)
                if connection is None:
                    host = urlsplit(self.address).netloc
                    connection = self._local.connection = http.client.HTTPConnection(host, timeout=ANSWER_S)
                connection.request(verb, path, body, {KEY_HEADER: key_from_environment()})
                answer, content = connection.getresponse(), b""
                if into is None or answer.status != 200:
                    content = answer.read(MAX_BYTES + 1)
                    if len(content) > MAX_BYTES:
                        raise SinewError(f"{self.address}: expected at most {MAX_BYTES} bytes, got more")
                else:
                    with into.open("wb") as file:
                        shutil.copyfileobj(answer, file, BLOCK)
                        if answer.length:
                            raise http.client.IncompleteRead(b"", answer.length)
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                if time.monotonic() - began > AWAY_S:
                    why = f"no answer for {AWAY_S:g} s ({error}); if the run was killed, start it again"
                    raise SinewError(f"{self.address}: {why}") from None
                time.sleep(AGAIN_S)
                continue
            if answer.status != 200:
                raise SinewError(
                    f"{self.address}: the run rejected a request ({answer.status} {answer.reason})"
                )
            return content


def fetch(address: str, folder: Path, typed: TypedNames) -> TypedNames:
    """Download the plan of a run on another host, and the bundles that this machine lacks.

    A downloaded bundle is only data. It is stored under a name that this process chooses, and must have the SHA-256
    in the plan.

    Args:
        address: Address of the run.
        folder: Folder for the plan and the bundles.
        typed: Names that were typed on this machine.

    Returns:
        The typed names, with the downloaded bundles as further policies.

    Raises:
        UntypedNameError: The plan uses a name that is neither built in nor typed.
        SinewError: The run does not answer, or a bundle has another SHA-256.
    """
    queue = RemoteQueue(address, "", 0.0)
    data = queue.ask("GET", "/plan")
    plan = FarmPlan.parse(data, address)
    facts = plan.facts()
    here = own_hashes(typed)
    # Check all other names first, so that nothing is downloaded for a plan that may not be played.
    allowed(address, plan.task, plan.variants, facts, typed, bundles=False)
    pending: dict[str, int] = {}
    for index, about in enumerate(facts):
        if about.kind == "bundle" and about.sha256 not in here:
            pending.setdefault(about.sha256, index)
    files = []
    for sha256, index in pending.items():
        path = folder / f"{index}.gguf"
        queue.ask("GET", f"/bundle/{index}", into=path)
        if (got := file_hash(str(path))) != sha256:
            raise SinewError(
                f"{address}: expected a bundle with SHA-256 {sha256[:16]}, got {got[:16]}; join again"
            )
        files.append(str(path))
    (folder / PLAN).write_bytes(data)
    return replace(typed, policies=(*typed.policies, *files))
