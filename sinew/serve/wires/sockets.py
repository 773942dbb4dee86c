"""The wires that are WebSockets, and what differs between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sinew.serve.wires import evo1, openpi

PING_S = 20.0  # between pings; a WebSocket that does not answer is closed
MAX_REASON = 123  # bytes, of RFC 6455's close frame


@dataclass(frozen=True)
class SocketKind:
    """codec: the wire's module. binary: its clients send binary frames, not text. greets: the server speaks first.
    explains: an error is a text frame before the end of the connection. ping_s: between pings, which clients answer;
    None where they may be busy with their robot instead."""

    codec: Any
    binary: bool
    greets: bool
    explains: bool
    ping_s: float | None


SOCKETS = {
    "openpi": SocketKind(openpi, binary=True, greets=True, explains=True, ping_s=PING_S),
    "evo1": SocketKind(evo1, binary=False, greets=False, explains=False, ping_s=None),
}
