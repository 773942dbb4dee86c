"""Client for Sinew policy servers. Needs numpy and protobuf, and pyzmq for ``aio`` and ``streams``; no torch."""

from sinew_client.client import Client
from sinew_client.errors import (
    ClientError,
    ConnectionLost,
    InvalidObservation,
    RequestTimeout,
    ServerError,
    UnsafeChunk,
)
from sinew_client.protocol import ActionChunk, Timing

__version__ = "0.1.0"

__all__ = [
    "ActionChunk",
    "Client",
    "ClientError",
    "ConnectionLost",
    "InvalidObservation",
    "RequestTimeout",
    "ServerError",
    "Timing",
    "UnsafeChunk",
]
