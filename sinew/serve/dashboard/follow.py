"""Follow the events of a server's dashboard from another process, and store the data that ``sinew top`` shows."""

from __future__ import annotations

import http.client
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict
from urllib.parse import urlsplit

import msgspec
from sinew_client.tls import check_key_is_private
from sinew_client.untrusted import parse_json

from sinew.core import SinewError

SILENT_S = 8.0  # seconds without an event before the connection ends; the server sends its health every 2 s
LONGEST = 1 << 22  # largest event, bytes
# Number of answers whose latency is stored, and largest number of sessions.
LAST, MOST_SESSIONS = 240, 32
RATE_S = 10.0  # seconds over which rates are computed


# The shapes of events. These classes have the fields that are shown. A newer server may send more fields, and an
# older server may send fewer.


class _Action(TypedDict, total=False):
    names: list[str] | None
    units: list[str] | None


class _Policy(TypedDict, total=False):
    name: str | None
    architecture: str | None
    action: _Action


class _Identity(TypedDict, total=False):
    hash: str
    source: str
    version: str
    date: str


class _About(TypedDict, total=False):
    server: dict[str, Any]
    policy: _Policy


class _Lost(TypedDict, total=False):
    dropped: int
    failed: int


class _Host(TypedDict, total=False):
    cpu: float | None
    cores: int


class _Robot(TypedDict):
    number: int
    name: str
    state: str
    rows_hz: float
    age_p50_ms: float | None
    age_p95_ms: float | None
    held: dict[str, int]
    steps: int
    clipped_commands: int
    episodes: int | None
    successes: int | None
    reason: str


class _Health(TypedDict, total=False):
    identity: _Identity
    status: str
    problems: list[str]
    uptime_s: float
    memory_bytes: float
    waiting: int
    served: int
    recorder: _Lost
    rerun: _Lost
    host: _Host
    robots: list[_Robot]


class _Answer(TypedDict):
    wire: str
    client: str
    session: str
    missed: bool
    prompt: str
    outcome: str
    ms: float
    text: NotRequired[str]
    timing: NotRequired[dict[str, float]]
    actions: NotRequired[list[list[float | None]]]


_SHAPES: dict[str, Any] = {"about": _About, "health": _Health, "answers": _Answer}


@dataclass
class SessionRow:
    """The answers of one client's episode."""

    wire: str
    client: str
    answers: int = 0
    refused: int = 0
    missed: int = 0
    prompt: str = ""
    text: str = ""  # text of the last answer
    times: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def rate(self, now: float) -> float:
        """Return answers per second over the last ten seconds."""
        return sum(now - when <= RATE_S for when in self.times) / RATE_S


@dataclass
class ServerSeen:
    """All data that was received from a server.

    Attributes:
        address: Address of the server.
        about: The last description of the server and the policy.
        health: The last health of the server.
        last: The last answer with actions; None before the first one.
        problem: The reason why no events arrive at present; "" if events arrive.
        count: Number of answers.
        missed: Number of answers after their deadline.
        refused: Error code -> number of rejected requests.
        milliseconds: Latencies of the last answers.
        sessions: (protocol, client, session) -> answers of the session.
    """

    address: str
    about: dict[str, Any] = field(default_factory=dict)
    health: dict[str, Any] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    problem: str = "connecting"
    count: int = 0
    missed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    milliseconds: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    sessions: dict[tuple[str, str, str], SessionRow] = field(default_factory=dict)

    def hear(
        self, event: str, record: dict[str, Any], show: Callable[[ServerSeen], object] = lambda _: None
    ) -> None:
        """Process one event of the server: about, health or an answer.

        Args:
            event: Name of the event.
            record: Data of the event.
            show: Draws all data after the event.

        Raises:
            SinewError: The event is invalid or cannot be drawn.
        """
        if event not in _SHAPES:
            return  # a newer server may send other events
        try:
            msgspec.convert(record, _SHAPES[event])
            self.problem = ""
            if event == "about":
                self.about = record
            elif event == "health":
                self.health = record
                # A hot-swap may have replaced the policy, so update its description.
                if "engine" in record and self.about.get("server"):
                    now = {
                        name: record[name]
                        for name in ("identity", "engine", "engine_reason")
                        if name in record
                    }
                    self.about = {**self.about, "server": {**self.about["server"], **now}}
            else:
                self._answer(record)
            # Draw inside the try block, so that a missing field becomes a SinewError.
            show(self)
        except (ValueError, ArithmeticError) as error:
            # msgspec raises ValueError, and so does numpy for a chunk whose rows have different lengths.
            raise SinewError(
                f"{self.address}: expected {event} of a Sinew server, got {error!s:.300}"
            ) from None

    def lost(self, why: str) -> None:
        """Store the reason why no events arrive from the server."""
        self.problem = why

    def _answer(self, record: dict[str, Any]) -> None:
        self.count += 1
        self.missed += bool(record["missed"])
        key = record["wire"], record["client"], record["session"]
        session = self.sessions.pop(key, None) or SessionRow(*key[:2])
        # Move the session to the end, so that the oldest session is removed first.
        self.sessions[key] = session
        while len(self.sessions) > MOST_SESSIONS:
            del self.sessions[next(iter(self.sessions))]
        session.times.append(time.monotonic())
        session.prompt = record["prompt"] or session.prompt
        session.text = record.get("text") or session.text
        session.missed += bool(record["missed"])
        if record["outcome"] == "ok":
            session.answers += 1
            # A message contains the numbers of only one chunk.
            self.last = record if "actions" in record else self.last
            self.milliseconds.append(record["ms"])
        else:
            session.refused += 1
            self.refused[record["outcome"]] = self.refused.get(record["outcome"], 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Return all data that was received, ready for JSON."""
        return {
            "address": self.address,
            "server": self.about.get("server", {}),
            "policy": self.about.get("policy", {}).get("name"),
            "identity": self.about.get("server", {}).get("identity", {}),
            "health": self.health,
            "answers": self.count,
            "missed": self.missed,
            "refused": self.refused,
            "sessions": len(self.sessions),
        }


def parse_address(address: str) -> tuple[str, int, bool]:
    """Return the host, the port, and True for TLS. Raises :class:`SinewError` if ``address`` is not a web address."""
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise SinewError(f"address: expected http://HOST:PORT, got {address!r} ({error})") from None
    if parts.scheme not in ("http", "https") or not host:
        raise SinewError(
            "address: expected http://HOST:PORT of the openpi or http protocol, such as http://127.0.0.1:8000,"
            f" got {address!r}"
        )
    return host, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https"


def events(
    host: str, port: int, tls: bool, key: str, end: float | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the server's events until it closes the connection.

    Args:
        host: Host of the server.
        port: Port of the server.
        tls: True to use TLS.
        key: Key of the server; "" for no key.
        end: Time on the clock ``time.monotonic()`` at which the events end; None for no end.

    Raises:
        OSError: The server cannot be reached, or is silent for too long.
        SinewError: A permanent error: the server has no dashboard, or the key is wrong.
    """
    place = f"[{host}]" if ":" in host else host
    check_key_is_private([f"{'https' if tls else 'http'}://{place}:{port}"], key)
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    wait = SILENT_S if end is None else max(0.1, min(SILENT_S, end - time.monotonic()))
    connection = kind(host, port, timeout=wait)
    try:
        headers = {"Accept": "text/event-stream", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request("GET", "/v1/events", headers=headers)
        reply = connection.getresponse()
        if reply.status == 401:
            raise SinewError(
                f"{host}:{port} requires a key; pass --api-key-file, or set SINEW_API_KEY in the environment"
            )
        if "text/event-stream" not in reply.headers.get("Content-Type", ""):
            if reply.status >= 500:
                raise ConnectionError(reply.read(300).decode(errors="replace").strip() or str(reply.status))
            raise SinewError(
                f"{host}:{port}: expected the dashboard's events, got status {reply.status}; start"
                " `sinew serve --dashboard on`, and use the port of its openpi or http protocol"
            )
        name = ""
        while line := reply.readline(LONGEST):
            field, _, text = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = text
            elif field == "data":
                content = parse_json(text)
                for record in content if isinstance(content, list) else [content]:
                    if not isinstance(record, dict):
                        raise SinewError(
                            f"{host}:{port}: expected events of a Sinew server, got {text[:80]!r}"
                        )
                    yield name, record
        raise ConnectionError("the server has closed the connection")
    except ssl.SSLCertVerificationError as error:
        own = "to trust your own certificate, set SSL_CERT_FILE=CERT.pem in the environment"
        raise SinewError(
            f"{host}:{port}: expected a trusted certificate, got {error.verify_message}; {own}"
        ) from None
    except ValueError as error:
        raise SinewError(f"{host}:{port}: expected events of a Sinew server, got {error!s:.300}") from None
    finally:
        connection.close()
