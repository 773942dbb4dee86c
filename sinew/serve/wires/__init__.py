"""One codec per client protocol, and the names under which ``sinew serve --wire`` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sinew.core import SinewError
from sinew.serve.service import Wire
from sinew.serve.transport.listen import Listen


@dataclass(frozen=True, slots=True)
class WireKind:
    """port: where the field's clients expect it. web: shares one HTTP server with the others of its port."""

    port: int
    about: str
    web: bool = False


WIRES = {
    "native": WireKind(5555, "ZeroMQ and Protobuf: sinew_client, and vla.cpp's clients"),
    "openpi": WireKind(8000, "WebSocket and msgpack: openpi-client, vLLM-Omni's dialect", web=True),
    "evo1": WireKind(9000, "WebSocket and JSON: the clients of Evo-1's repository", web=True),
    "http": WireKind(8000, "POST /v1/actions, POST /act (OpenVLA, OpenVLA-OFT)", web=True),
    "groot": WireKind(5555, "ZeroMQ and msgpack: Isaac-GR00T's PolicyClient"),
    "lerobot": WireKind(8080, "gRPC: LeRobot's asynchronous RobotClient; reads pickle, restricted"),
}
SOCKETS = {"openpi", "evo1"}  # WebSockets, each on any path of its port
DEFAULT = ("native", "openpi")
NATIVE_BESIDE_GROOT = 5556


def parse(names: Sequence[str]) -> dict[str, int]:
    """``["native", "openpi:9000"]`` -> {wire: port}; port 0 picks a free one. Raises SinewError."""
    found: dict[str, int] = {}
    for name in names or DEFAULT:
        wire, colon, port = name.partition(":")
        if wire not in WIRES:
            raise SinewError(f"--wire {name}: expected one of {', '.join(WIRES)}")
        if wire in found:
            raise SinewError(f"--wire {wire}: given twice")
        if colon and not (port.isdigit() and int(port) <= 65535):
            raise SinewError(f"--wire {name}: expected a port from 0 to 65535 after the colon, got {port!r}")
        moved = wire == "native" and any(other.split(":")[0] == "groot" for other in names)
        found[wire] = int(port) if colon else NATIVE_BESIDE_GROOT if moved else WIRES[wire].port
    return found


def servers(ports: dict[str, int]) -> int:
    """Return how many servers these wires are: those of one web port share it, and its connections."""
    return len({port if WIRES[name].web else name for name, port in ports.items()})


def open_wires(ports: dict[str, int], listen: Listen) -> list[Wire]:
    """Claim the addresses. Raises AddressError, and then leaves none claimed."""
    opened: list[Wire] = []
    web: dict[int, list[str]] = {}
    for name, port in ports.items():
        if WIRES[name].web:
            if name in SOCKETS and (other := SOCKETS & set(web.get(port, []))):
                raise SinewError(f"--wire {name}: port {port} has {other.pop()}; WebSockets share no port")
            web.setdefault(port, []).append(name)
    try:
        for name, port in ports.items():
            here = replace(listen, port=port)
            if name in ("native", "groot"):
                from sinew.serve.transport.zeromq import ZeroMQWire

                opened.append(ZeroMQWire(_codec(name), here))
            elif name == "lerobot":
                from sinew.serve.wires.lerobot.wire import LeRobotWire

                opened.append(LeRobotWire(here))
            elif names := web.pop(port, []):
                from sinew.serve.transport.web import WebServer

                opened.append(WebServer(names, here))
    except BaseException:
        for wire in opened:
            wire.stop()
        raise
    return opened


def _codec(name: str) -> Any:
    if name == "native":
        from sinew.serve.wires.native import NativeCodec

        return NativeCodec()
    from sinew.serve.wires.groot.codec import GrootCodec

    return GrootCodec()
