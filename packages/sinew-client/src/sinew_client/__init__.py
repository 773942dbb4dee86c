"""The client of Sinew's policy servers, and the types that client and server share.

The package needs numpy and protobuf. It does not need torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sinew_client.errors import (
    ClientError,
    ClosedError,
    ConnectionLost,
    InvalidObservation,
    ObservationError,
    RequestTimeout,
    ServerError,
    SinewError,
    UnsafeChunk,
)
from sinew_client.policy import Policy
from sinew_client.target import connect
from sinew_client.types import ActionChunk, Observation, PolicySpec, Timing

if TYPE_CHECKING:
    from sinew_client.client import Client
    from sinew_client.episode import ActionQueue

__version__ = "0.1.0"

__all__ = [
    "ActionChunk",
    "ActionQueue",
    "Client",
    "ClientError",
    "ClosedError",
    "ConnectionLost",
    "InvalidObservation",
    "Observation",
    "ObservationError",
    "Policy",
    "PolicySpec",
    "RequestTimeout",
    "ServerError",
    "SinewError",
    "Timing",
    "UnsafeChunk",
    "connect",
]

# These names are imported at first use, because a program that needs only the types does not need protobuf.
_LATER = {
    "Client": "sinew_client.client",
    "ActionQueue": "sinew_client.episode",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        member = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
        return member
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
