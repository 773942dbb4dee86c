"""What a wire is: one protocol of clients, and the server that answers it on one address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Protocol

from sinew.core import PolicySpec
from sinew.serve.service import Service


@dataclass(frozen=True, slots=True)
class Wire:
    """port: where the field's clients expect it. transport: what moves its bytes.

    codec: ``module:name`` of what translates them: over zeromq the class of a codec, over websocket a ``Dialect``, over
    http ``Routes``, which share one server with the others of their port; over grpc and zenoh the class of the whole
    server.
    """

    name: str
    port: int
    about: str
    transport: Literal["zeromq", "websocket", "http", "grpc", "zenoh"]
    codec: str

    @property
    def web(self) -> bool:
        """Return True if it shares one HTTP server with the others of its port."""
        return self.transport in ("websocket", "http")

    def load(self) -> Any:
        """Import what ``codec`` names. Nothing of a wire is imported before it is wanted."""
        module, _, name = self.codec.partition(":")
        return getattr(import_module(module), name)


class Listener(Protocol):
    """One or more wires on one address. The constructor claims the address (AddressError if it is taken), so that a
    mistake shows before the model is loaded; until ``start`` clients wait."""

    name: str
    address: str  # what a client connects to, with its scheme
    dashboard: str  # what a browser opens; "" where there is no page

    def start(self, service: Service) -> None:
        """Begin to answer, on threads of its own. Returns at once."""

    def stop(self) -> None:
        """Hand over the answers that are there, close and free the port. Also when never started."""

    def guide(self, spec: PolicySpec) -> Sequence[str]:
        """A program in lines that runs as it is and asks this server for one chunk, with the field's own client."""
