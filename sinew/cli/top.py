"""``sinew top``: show the state of a server in a terminal, from the data of its dashboard."""

from __future__ import annotations

import http.client
import ssl
import time
from pathlib import Path

from rich.live import Live
from sinew_client.auth import api_key_of

from sinew.cli import terminal
from sinew.cli.options import CountIfAny, PositiveIfAny
from sinew.cli.top_view import view
from sinew.core import SinewError
from sinew.core.statistics import summarize
from sinew.serve.dashboard.follow import ServerSeen, events, parse_address

AGAIN_S = 1.0  # seconds between two attempts to connect to the server
FRAMES_HZ = 8


def top(
    address: str = "http://127.0.0.1:8000",
    /,
    *,
    api_key_file: Path | None = None,
    seconds: PositiveIfAny = None,
    answers: CountIfAny = None,
) -> int:
    """Show the state of a server: latency by stage, deadlines, sessions, the last chunk, and the reason for each
    choice.

    In a terminal, press Ctrl-C to end. It reconnects to a server that restarts. With --json or in a pipe, it prints
    one view and ends. With --seconds or --answers, it prints the last view of that time. The exit status is 1 if
    the server does not answer.

    Args:
        address: Address of an openpi or http port (http://HOST:PORT). The server's dashboard must be on.
        api_key_file: File with the server's key. Default: SINEW_API_KEY in the environment.
        seconds: End after this many seconds.
        answers: End after this many answers.
    """
    host, port, tls = parse_address(address)
    key = api_key_of(api_key_file)
    seen = ServerSeen(f"{host}:{port}")
    console = terminal.console()
    once = seconds is None and answers is None and (terminal.output.json or not console.is_terminal)
    live = Live(
        get_renderable=lambda: view(seen),  # the view is computed at the refresh rate, and not for each event
        console=console,
        refresh_per_second=FRAMES_HZ,
        screen=console.is_terminal,
        transient=True,
    )
    with live:
        end = None if seconds is None else time.monotonic() + seconds
        try:
            while not _done(seen, end, answers, once):
                try:
                    for event, record in events(host, port, tls, key, end):
                        seen.hear(event, record, view)
                        if _done(seen, end, answers, once):
                            break
                except (OSError, http.client.HTTPException) as error:
                    over = end is not None and time.monotonic() >= end
                    # The connection was closed because the time of --seconds is over.
                    if over and (seen.about or seen.problem != "connecting"):
                        break
                    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    why += _other_scheme(error, tls)
                    if once:
                        seen.lost(why)
                        break
                    # On a terminal, the view shows the problem.
                    if not console.is_terminal and why != seen.problem:
                        terminal.say(f"{address}: {why}; trying again every second until it answers")
                    seen.lost(why)
                    time.sleep(AGAIN_S if end is None else max(0.0, min(AGAIN_S, end - time.monotonic())))
        # The user ends the command with Ctrl-C.
        except KeyboardInterrupt:
            pass
    if not seen.about:
        raise SinewError(
            f"{address}: {seen.problem or 'the server sent nothing'}; check the address, and that the server runs with"
            " a dashboard"
        )
    console.print(view(seen))
    latency = summarize(list(seen.milliseconds)) if seen.milliseconds else None
    terminal.emit(seen.to_dict() | {"latency_ms": latency})
    return 0


def _other_scheme(error: Exception, tls: bool) -> str:
    """Return a hint to use the other scheme, http:// or https://, if the error suggests it; else ""."""
    if isinstance(error, ssl.SSLError) if tls else isinstance(error, http.client.RemoteDisconnected):
        return f" ({'http' if tls else 'https'}:// if the port is {'not ' if tls else ''}encrypted)"
    return ""


def _done(seen: ServerSeen, end: float | None, answers: int | None, once: bool) -> bool:
    if once and seen.about and seen.health:
        return True
    return (end is not None and time.monotonic() >= end) or (answers is not None and seen.count >= answers)
