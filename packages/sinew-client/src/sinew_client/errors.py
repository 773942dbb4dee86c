"""The exceptions that the client, the control loop and the robot classes raise."""

from __future__ import annotations

import copyreg
import difflib
import re
from contextlib import contextmanager
from typing import Collection, Iterable, Iterator

ONE_WORD = 0.6  # smallest similarity (0 to 1) between a word and its misspelling, the default of difflib


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that the user probably meant, for the end of an error message.

    Only misspellings get a suggestion. ``pi0_fast_libero`` is not a misspelling of ``pi0_libero``, and ``camera4`` is
    not a misspelling of ``camera1``.

    Args:
        name: The unknown name.
        known: The known names.

    Returns:
        A text such as ``; did you mean 'camera1'?``; "" without a suggestion.

    Example:
        >>> did_you_mean("camra1", ["camera1", "state"])
        "; did you mean 'camera1'?"
    """
    names = list(known)
    words = {word for each in names for word in _words(each)}
    close = difflib.get_close_matches(name, names, n=3)
    near = next((each for each in close if _is_slip(name, each, words)), None)
    return f"; did you mean {near!r}?" if near else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[^\W_]+", name.lower())


def _is_slip(name: str, known: str, words: Collection[str]) -> bool:
    """Check whether a name is a misspelling of a known name, word by word.

    Args:
        name: The unknown name.
        known: A known name.
        words: All words of all known names. A known word is never a misspelling of another word.

    Returns:
        True if each word of ``name`` equals the word of ``known`` in the same position, or misspells it. Words with
        different digits are different words.
    """
    left, right = _words(name), _words(known)
    if "".join(left) == "".join(right):
        return True  # the names differ only in their separators
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
    """Base class of all errors that Sinew raises for users.

    Servers send ``code``, which is the same in all versions.
    """

    code = "internal"

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickle for errors whose constructor takes more than the message.

        Worker processes send their errors to their parent by pickle. An error that cannot be rebuilt there looks like
        a crash of the worker.
        """
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]

    @classmethod
    @contextmanager
    def at(cls, where: object, *errors: type[BaseException]) -> Iterator[None]:
        """Convert exceptions inside a ``with`` block to this error, with a prefix in the message.

        Args:
            where: The prefix, such as the name of a file: "WHERE: expected X, got Y".
            *errors: The types of exceptions to convert.
        """
        try:
            yield
        except errors as error:
            raise cls(f"{where}: {getattr(error, 'strerror', None) or error}") from error


class ObservationError(SinewError):
    """A field of an observation does not fit the policy.

    Attributes:
        field: Name of the field.
        expected: What the policy accepts.
        got: What the observation has.
    """

    code = "bad_observation"

    def __init__(self, name: str, expected: str, got: str):
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.field, self.expected, self.got = name, expected, got

    @classmethod
    def unknown(cls, key: object, known: Iterable[str], expected: str = "") -> ObservationError:
        """Create the error for an unknown key of an observation.

        Args:
            key: The key.
            known: The keys that are allowed.
            expected: Text of the message for the allowed keys; "" lists all of them.

        Returns:
            The error, with a suggestion if the key is misspelled.
        """
        # The key may be an object of any size. Print it only if it is a text or a short number.
        short = isinstance(key, int) and key.bit_length() < 64
        name = key[:100] if isinstance(key, str) else str(key) if short else type(key).__name__
        names = list(known)
        return cls(
            name, expected or f"one of {', '.join(names)}", f"an unknown key{did_you_mean(name, names)}"
        )


class RequestError(SinewError):
    """The message is not a valid request, or the server does not support what it requests."""

    code = "bad_request"


class BusyError(SinewError):
    """The request queue is full. Nothing was computed; send the request again later."""

    code = "busy"


class CancelledError(SinewError):
    """The inference was cancelled, because the server stops or the client has disconnected."""

    code = "cancelled"


class ClientError(SinewError):
    """Base class of all errors that a client raises. ``code`` is "", because these errors are not sent to a server."""

    code = ""


class InvalidObservation(ClientError, ObservationError, ValueError):  # noqa: N818 - the public name
    """The observation cannot be encoded into a message. Nothing was sent."""

    code = "bad_observation"


class RequestTimeout(ClientError, TimeoutError):  # noqa: N818
    """No answer arrived in time: there is no server at the address, or the server still loads, or it is too slow."""


class ConnectionLost(ClientError, ConnectionError):  # noqa: N818
    """The connection broke before the answer came: the server has stopped, or the network failed."""


class UnsafeChunk(ClientError, ValueError):  # noqa: N818
    """The actions must not be executed: a number is not finite or is outside the limits, or the answer is too old."""


class LateChunk(UnsafeChunk):
    """The observation of this answer is older than ``max_age``, so the actions must not be executed."""


class ClosedError(ClientError):
    """A method was called after ``close()`` of the policy or the client."""


class Refused(ClientError):  # noqa: N818
    """The policy rejected the first observation of a run with a permanent error, so the robot has not moved."""


class ServerError(ClientError):
    """The server answered with an error.

    Attributes:
        code: Short code that is the same in all versions: bad_request, bad_observation, busy, shutting_down,
            cancelled, internal ...
        message: Text for people. It names the field, the expected value and the received value.
    """

    def __init__(self, code: str, message: str):
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message
