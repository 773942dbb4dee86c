"""Client for Sinew policy servers. Needs numpy, pyzmq and protobuf; no torch."""

from sinew_client.client import Client
from sinew_client.errors import ClientError, InvalidObservation, RequestTimeout, ServerError
from sinew_client.protocol import ActionChunk, Timing

__version__ = "0.1.0"

__all__ = [
    "ActionChunk",
    "Client",
    "ClientError",
    "InvalidObservation",
    "RequestTimeout",
    "ServerError",
    "Timing",
]
