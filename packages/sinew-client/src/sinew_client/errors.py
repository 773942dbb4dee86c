"""What can go wrong, on a robot, in a server and between them; each error says it once, for all who meet it."""

from __future__ import annotations

import difflib
import re
from contextlib import contextmanager
from typing import Collection, Iterable, Iterator

ONE_WORD = (
    0.6  # similarity of two words from which one may be the other misspelt; difflib's own default for names
)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'camera1'?`` where ``name`` is a known name with a slip of the keyboard, else nothing.

    A name that is only similar is no slip: ``pi0_fast_libero`` is another model than ``pi0_libero``, and ``camera4``
    another camera than ``camera1``.
    """
    names = list(known)
    words = {word for each in names for word in _words(each)}
    close = difflib.get_close_matches(name, names, n=3)
    near = next((each for each in close if _is_slip(name, each, words)), None)
    return f"; did you mean {near!r}?" if near else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _is_slip(name: str, known: str, words: Collection[str]) -> bool:
    """Return whether every word of ``name`` is the word of ``known`` at its place, or that word misspelt.

    words: of all known names. One of them is not another one misspelt, and neither is one with another number.
    """
    left, right = _words(name), _words(known)
    if "".join(left) == "".join(right):
        return True  # the separators differ
    return len(left) == len(right) and all(
        a == b
        or (
            a not in words
            and re.findall(r"\d", a) == re.findall(r"\d", b)
            and difflib.SequenceMatcher(None, a, b).ratio() >= ONE_WORD
        )
        for a, b in zip(left, right)
    )


class SinewError(Exception):
    """Base of every error a user can cause or meet. ``code`` is stable and travels on the wires."""

    code = "internal"

    @classmethod
    @contextmanager
    def at(cls, where: object, *errors: type[BaseException]) -> Iterator[None]:
        """Raise this error for ``errors`` inside, with where they were met: "WHERE: expected X, got Y"."""
        try:
            yield
        except errors as error:
            raise cls(f"{where}: {getattr(error, 'strerror', None) or error}") from error


class ObservationError(SinewError):
    """One field of an observation is not what the policy expects."""

    code = "bad_observation"

    def __init__(self, name: str, expected: str, got: str):
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.field, self.expected, self.got = name, expected, got

    @classmethod
    def unknown(cls, key: object, known: Iterable[str], expected: str = "") -> ObservationError:
        """Return the error of a key that is not among those that are known. expected: these in other words."""
        # A key of another type may be as long as it likes, so only short numbers are written out.
        short = isinstance(key, int) and key.bit_length() < 64
        name = key[:100] if isinstance(key, str) else str(key) if short else type(key).__name__
        names = list(known)
        return cls(
            name, expected or f"one of {', '.join(names)}", f"an unknown key{did_you_mean(name, names)}"
        )


class RequestError(SinewError):
    """Bytes that are not a request, or a request that asks for something this server cannot do."""

    code = "bad_request"


class BusyError(SinewError):
    """The request queue is full; nothing was computed."""

    code = "busy"


class CancelledError(SinewError):
    """The inference was abandoned between two stages: the server is stopping or the client left."""

    code = "cancelled"


class ClientError(SinewError):
    """Base of every error that a client of a server raises on purpose. Without a code of its own: it is met on the
    robot, and does not travel."""

    code = ""


class InvalidObservation(ClientError, ObservationError, ValueError):  # noqa: N818 - reads as the sentence it is
    """The observation cannot be put into a message; nothing was sent."""

    code = "bad_observation"


class RequestTimeout(ClientError, TimeoutError):  # noqa: N818
    """No answer in time: no server at the address, one that is still loading, or one too slow."""


class ConnectionLost(ClientError, ConnectionError):  # noqa: N818
    """The connection broke while an answer was awaited: the server has ended, was ended, or the network failed."""


class UnsafeChunk(ClientError, ValueError):  # noqa: N818
    """The server's answer must not be executed: numbers that are not finite, out of the limits, or too old."""


class LateChunk(UnsafeChunk):
    """The answer belongs to an observation that is older than the caller wants to act on."""


class ClosedError(ClientError):
    """The policy, or the client of it, was closed before it was asked."""


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
