"""``sinew top``: what a server does, in a terminal: the feed of its dashboard."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Parameter, validators
from rich.live import Live

from sinew.auth import KEY_VARIABLE, api_key_of
from sinew.cli import terminal
from sinew.cli.top_view import ServerSeen, view
from sinew.core import SinewError

SILENT_S = 8.0  # the server tells of its health every two seconds
AGAIN_S = 1.0  # between two attempts to reach it
LONGEST = 1 << 22  # bytes of one event
FRAMES_HZ = 8


def top(
    address: str = "http://127.0.0.1:8000",
    /,
    *,
    api_key_file: Path | None = None,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    answers: Annotated[int | None, Parameter(validator=validators.Number(gte=1))] = None,
) -> int:
    """Show what a server does: latency by stage, deadlines, sessions, the last chunk, and why each choice was made.

    Ends with Ctrl-C; a server that restarts is found again. With --json or in a pipe the last view is all that is
    printed, so give --seconds or --answers. Exit code 1: nothing was heard of the server.

    Args:
        address: of an openpi or http port, http://HOST:PORT; its dashboard must be on.
        api_key_file: a file with the server's key; SINEW_API_KEY in the environment if absent.
        seconds: end after this long.
        answers: end after so many.
    """
    host, port, tls = parse(address)
    key = api_key_of(api_key_file)
    seen = ServerSeen(f"{host}:{port}")
    console = terminal.console()
    end = None if seconds is None else time.monotonic() + seconds
    live = Live(
        get_renderable=lambda: view(seen),  # drawn when it is shown, not when an event comes
        console=console,
        refresh_per_second=FRAMES_HZ,
        screen=console.is_terminal,
        transient=True,
    )
    with live:
        try:
            while not _done(seen, end, answers):
                try:
                    for event, record in events(host, port, tls, key, end):
                        seen.hear(event, record)
                        if _done(seen, end, answers):
                            break
                except (OSError, http.client.HTTPException) as error:
                    seen.lost(str(error) or type(error).__name__)
                    if seconds is not None and not seen.about and end is not None and time.monotonic() >= end:
                        break
                    time.sleep(AGAIN_S if end is None else max(0.0, min(AGAIN_S, end - time.monotonic())))
        except KeyboardInterrupt:  # how one leaves
            pass
    if not seen.about:
        raise SinewError(f"{address}: {seen.problem or 'nothing was heard'}")
    console.print(view(seen))
    terminal.emit(seen.to_dict())
    return 0


def _done(seen: ServerSeen, end: float | None, answers: int | None) -> bool:
    return (end is not None and time.monotonic() >= end) or (answers is not None and seen.count >= answers)


def parse(address: str) -> tuple[str, int, bool]:
    """Return host, port and whether it is encrypted. Raises :class:`SinewError` for anything but a web address."""
    try:
        found = urlsplit(address if "://" in address else f"http://{address}")
        host, port = found.hostname, found.port
    except ValueError as error:
        raise SinewError(f"address: expected http://HOST:PORT, got {address!r} ({error})") from None
    if found.scheme not in ("http", "https") or not host:
        raise SinewError(
            f"address: expected http://HOST:PORT of the openpi or http wire, as http://127.0.0.1:8000, got {address!r}"
        )
    return host, port or (443 if found.scheme == "https" else 80), found.scheme == "https"


def events(
    host: str, port: int, tls: bool, key: str, end: float | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the server's events as they come, until it ends the connection.

    Raises OSError where it cannot be reached or says nothing for too long, and :class:`SinewError` for an answer that
    will not change: no dashboard, or another key.
    """
    kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
    wait = SILENT_S if end is None else max(0.1, min(SILENT_S, end - time.monotonic()))
    connection = kind(host, port, timeout=wait)
    try:
        headers = {"Accept": "text/event-stream", **({"Authorization": f"Bearer {key}"} if key else {})}
        connection.request("GET", "/v1/events", headers=headers)
        reply = connection.getresponse()
        if reply.status == 401:
            raise SinewError(
                f"{host}:{port} wants a key: --api-key-file, or {KEY_VARIABLE} in the environment"
            )
        if "text/event-stream" not in reply.headers.get("Content-Type", ""):
            if reply.status >= 500:
                raise ConnectionError(reply.read(300).decode(errors="replace").strip() or str(reply.status))
            raise SinewError(
                f"{host}:{port}: expected the dashboard's events, got status {reply.status}; `sinew serve --dashboard"
                " on`, and the port of its openpi or http wire"
            )
        name = ""
        while line := reply.readline(LONGEST):
            field, _, text = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = text
            elif field == "data":
                found = json.loads(text)
                for record in found if isinstance(found, list) else [found]:
                    if not isinstance(record, dict):
                        raise SinewError(
                            f"{host}:{port}: expected events of a Sinew server, got {text[:80]!r}"
                        )
                    yield name, record
        raise ConnectionError("the server has ended the connection")
    except ValueError as error:
        raise SinewError(f"{host}:{port}: expected events of a Sinew server, got {error}") from None
    finally:
        connection.close()
