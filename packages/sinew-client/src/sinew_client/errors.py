"""What can go wrong between a robot and its server."""

from __future__ import annotations


class ClientError(Exception):
    """Base of every error that :class:`sinew_client.Client` raises on purpose."""


class InvalidObservation(ClientError, ValueError):  # noqa: N818 - reads as the sentence it is
    """The observation cannot be put into a message; nothing was sent."""


class RequestTimeout(ClientError, TimeoutError):  # noqa: N818
    """No answer in time: no server at the address, one that is still loading, or one too slow."""


class ConnectionLost(ClientError, ConnectionError):  # noqa: N818
    """The connection broke while an answer was awaited: the server has ended, was ended, or the network failed."""


class UnsafeChunk(ClientError, ValueError):  # noqa: N818
    """The server's answer must not be executed: numbers that are not finite, out of the limits, or too old."""


class LateChunk(UnsafeChunk):
    """The answer belongs to an observation that is older than the caller wants to act on."""


class Refused(ClientError):  # noqa: N818
    """The policy does not take what the robot shows it, and did not before the robot first moved."""


class ServerError(ClientError):
    """The server answered with an error.

    code: stable and short: bad_request, bad_observation, busy, shutting_down, cancelled, internal ...
    message: for people; names the field, what was expected and what came.
    """

    def __init__(self, code: str, message: str):
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message
