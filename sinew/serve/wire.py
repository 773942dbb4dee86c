"""The description of a protocol, and the interface of its server at one address. The code calls a network protocol
for robots' clients a "wire".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

from sinew.core import PolicySpec
from sinew.serve.service import Service


@dataclass(frozen=True, slots=True)
class Wire:
    """The description of a protocol.

    Attributes:
        name: Name of the protocol.
        port: Port that clients of other projects expect.
        about: One line about the protocol.
        transport: The transport of its messages.
        codec: ``module:name`` of the object that encodes and decodes messages. For zeromq it is the class of a codec,
            for websocket a ``Dialect``, and for http ``Routes``. Protocols over websocket and http on one port share
            one server. For grpc and zenoh it is the class of the whole server.
    """

    name: str
    port: int
    about: str
    transport: Literal["zeromq", "websocket", "http", "grpc", "zenoh"]
    codec: str

    @property
    def web(self) -> bool:
        """True if the protocol shares one HTTP server with other protocols on its port."""
        return self.transport in ("websocket", "http")

    def load(self) -> Any:
        """Import the object that ``codec`` names. No module of a protocol is imported before it is used."""
        module, _, name = self.codec.partition(":")
        return getattr(import_module(module), name)


class Listener(Protocol):
    """Interface of a server for one or more protocols at one address.

    The constructor opens the port, so that an error shows before the model is loaded. The constructor raises
    AddressError if the port is in use. Until ``start``, clients wait.
    """

    name: str
    address: str  # address for clients, with its scheme
    dashboard: str  # address for browsers; "" without a page

    def start(self, service: Service) -> None:
        """Begin to answer requests on the listener's own threads. Return at once."""

    def stop(self) -> None:
        """Send the finished answers and close the port. You may call this without ``start``."""

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        """Return the lines of a complete program that requests one chunk from this server.

        The program uses the protocol's own client library.
        """
