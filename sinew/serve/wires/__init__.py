"""The protocols of the server, with the names of ``sinew serve --wire``. Each protocol has a codec, the code that
reads and writes its messages.

Other Python packages can add protocols with an entry point ``sinew.wires``: NAME = "module:WIRE", whose value is a
:class:`Wire`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from sinew_client.addresses import split_scheme

from sinew.core import SinewError
from sinew.core.registry import loaded
from sinew.serve.transport.listen import AddressError, Listen
from sinew.serve.wire import Listener, Wire

if TYPE_CHECKING:
    from sinew.serve.service import Service
    from sinew.serve.transport.routes import Guard, Page


WIRES = {
    wire.name: wire
    for wire in (
        Wire(
            "native",
            5555,
            "ZeroMQ and Protobuf: sinew_client, and vla.cpp's clients",
            "zeromq",
            f"{__name__}.native:NativeCodec",
        ),
        Wire(
            "openpi",
            8000,
            "WebSocket and msgpack: openpi-client, vLLM-Omni's dialect",
            "websocket",
            f"{__name__}.openpi:DIALECT",
        ),
        Wire(
            "evo1",
            9000,
            "WebSocket and JSON: the clients of Evo-1's repository",
            "websocket",
            f"{__name__}.evo1:DIALECT",
        ),
        Wire(
            "vla-eval",
            8000,
            "WebSocket and msgpack: vla-eval's benchmarks",
            "websocket",
            f"{__name__}.vla_eval:DIALECT",
        ),
        Wire(
            "http",
            8000,
            "POST /v1/actions, POST /act (OpenVLA, OpenVLA-OFT)",
            "http",
            f"{__name__}.actions:ROUTES",
        ),
        Wire(
            "groot",
            5555,
            "ZeroMQ and msgpack: Isaac-GR00T's PolicyClient",
            "zeromq",
            f"{__name__}.groot.codec:GrootCodec",
        ),
        Wire(
            "lerobot",
            8080,
            "gRPC: LeRobot's asynchronous RobotClient; reads pickle, restricted",
            "grpc",
            f"{__name__}.lerobot.wire:LeRobotWire",
        ),
        Wire(
            "lerobot-remote",
            7447,
            "Zenoh and MessagePack: lerobot-rollout --inference.type=remote of LeRobot 0.7",
            "zenoh",
            f"{__name__}.lerobot_remote.wire:LeRobotRemoteWire",
        ),
    )
}
GROUP = "sinew.wires"
DEFAULT = ("native", "openpi")
NATIVE_BESIDE_GROOT = 5556


def parse(names: Sequence[str]) -> dict[str, int | str]:
    """Read the protocols of ``sinew serve --wire``.

    Args:
        names: Names such as ``["native", "openpi:9000"]``. Port 0 picks a free port. ``native:ipc:///path`` has
            the path of a Unix socket in place of a port.

    Returns:
        Protocol -> port or path.

    Raises:
        SinewError: A protocol is unknown, or a port is invalid.
    """
    ports: dict[str, int | str] = {}
    for name in names or DEFAULT:
        wire, colon, port = name.partition(":")
        if wire not in WIRES:
            _add()
        if wire not in WIRES:
            raise SinewError(f"--wire {name}: expected one of {', '.join(WIRES)}")
        if wire in ports:
            raise SinewError(f"--wire {wire}: listed twice; list it once")
        scheme, path = split_scheme(port)
        if scheme == "ipc":
            if not path.startswith("/") or "#" in path:
                raise SinewError(f"--wire {name}: expected ipc:///PATH without a #, got {port!r}")
            # Only native supports Unix sockets: the clients of groot, the other ZeroMQ protocol, need a host and a
            # port.
            if wire != "native":
                raise SinewError(
                    f"--wire {name}: expected a port, because only the protocol native supports a Unix socket"
                )
            ports[wire] = path
            continue
        if colon and not (port.isdigit() and int(port) <= 65535):
            raise SinewError(
                f"--wire {name}: expected a port from 0 to 65535, or ipc:///PATH, after the colon, got {port!r}"
            )
        beside_groot = wire == "native" and any(other.split(":")[0] == "groot" for other in names)
        ports[wire] = int(port) if colon else NATIVE_BESIDE_GROOT if beside_groot else WIRES[wire].port
    return ports


def _add() -> None:
    """Add the protocols of other Python packages, except protocols that have the name of a protocol of Sinew."""
    for point in entry_points(group=GROUP):
        if point.name not in WIRES:
            WIRES[point.name] = replace(loaded(GROUP, point.name, point.value, "Wire"), name=point.name)


def servers(ports: Mapping[str, int | str]) -> int:
    """Return the number of servers that these protocols need. Protocols of one web port share a server and its
    connections.

    Args:
        ports: Protocol -> port or path.
    """
    return len({port if WIRES[name].web else name for name, port in ports.items()})


def open_wires(ports: Mapping[str, int | str], listen: Listen) -> list[Listener]:
    """Claim the addresses of the protocols, and return their servers.

    Args:
        ports: Protocol -> port or path.
        listen: The settings of all servers.

    Raises:
        AddressError: An address cannot be claimed. All claimed addresses are freed.
        SinewError: Two protocols cannot share a port.
    """
    listeners: list[Listener] = []
    web: dict[int | str, list[Wire]] = {}
    for name, port in ports.items():
        wire = WIRES[name]
        if wire.web:
            there = web.setdefault(port, [])
            # A WebSocket protocol uses all paths of its port, so two of them cannot share a port.
            if wire.transport == "websocket":
                for other in there:
                    if other.transport == "websocket":
                        raise SinewError(
                            f"--wire {name}: {other.name} already uses port {port}, and WebSockets cannot share"
                            " a port; choose another port"
                        )
            there.append(wire)
    page = _page() if web and listen.dashboard else None
    try:
        for name, port in ports.items():
            wire, here = WIRES[name], listen.at(port)
            if wire.transport == "zeromq":
                from sinew.serve.transport.zeromq import ZeroMQWire

                listeners.append(ZeroMQWire(wire.load()(), here))
            elif wire.transport in ("grpc", "zenoh"):
                listeners.append(wire.load()(here))
            elif wires := web.pop(port, []):
                from sinew.serve.transport.web import WebServer

                listeners.append(WebServer([each.load() for each in wires], here, page))
    except BaseException as error:
        for listener in listeners:
            listener.stop()
        if isinstance(error, AddressError) and getattr(error.__cause__, "errno", 0) == errno.EADDRINUSE:
            others = " ".join(
                f"--wire {name}:{port + 1}" for name, port in ports.items() if isinstance(port, int)
            )
            raise AddressError(f"{error}; to use other ports, pass {others}") from error
        raise
    return listeners


def _page() -> Callable[[Service, Guard], Page]:
    """Return a function that creates the dashboard of a port. The dashboards of all ports show the same answers."""
    from sinew.serve.dashboard.feed import Feed
    from sinew.serve.dashboard.routes import Dashboard
    from sinew.serve.wires.actions import Actions

    feed = Feed()
    return lambda service, guarded: Dashboard(service, guarded, Actions(service).actions, feed)
