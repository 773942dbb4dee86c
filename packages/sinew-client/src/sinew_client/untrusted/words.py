"""The error of all safe readers, and functions that print untrusted values shortened."""

from __future__ import annotations

import copyreg
from typing import Any, Iterator

SHOWN = 80  # longest value in an error message, characters
GOT = 300  # longest message of a parser inside an error message, characters


class UntrustedError(ValueError):
    """The content of a file or message is not valid: "WHERE: expected X, got Y".

    Attributes:
        expected: The allowed content.
        got: The received content, already shortened.
    """

    def __init__(self, expected: str, got: str, where: str = ""):
        place = f"{where}: " if where else ""
        super().__init__(f"{place}expected {expected}, got {got}")
        self.expected, self.got = expected, got

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle, as :meth:`sinew_client.errors.SinewError.__reduce__` does."""
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]


def reason(error: BaseException) -> str:
    """Return the message of a parser's error as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) < GOT else text[: GOT - 3] + "..."


def shown(value: Any, most: int = SHOWN) -> str:
    """Return the ``repr`` of a value, cut to ``most`` characters, without computing the rest of a large value."""
    pieces, length = [], 0
    for piece in _pieces(value, most):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            return "".join(pieces)[: most - 3] + "..."
    return "".join(pieces)


def named(value: Any, most: int = SHOWN) -> str:
    """Shorten a text to ``most`` characters and escape unprintable ones.

    For other values, return the short ``repr``.
    """
    return shown(value, most + 2)[1:-1] if isinstance(value, str) else shown(value, most)


def _pieces(value: Any, most: int) -> Iterator[str]:
    if isinstance(value, (str, bytes)):
        yield repr(value[: most + 1])
    elif isinstance(value, bool) or value is None or isinstance(value, float):
        yield repr(value)
    # Print the size of a very long integer and not its digits, because repr() of such an integer raises ValueError.
    elif isinstance(value, int):
        yield repr(value) if value.bit_length() < 4 * most else f"a number of {value.bit_length()} bits"
    elif isinstance(value, (list, tuple)):
        first, last = "[]" if isinstance(value, list) else "()"
        yield from _joined(first, value, last, most)
    elif isinstance(value, dict):
        yield from _joined("{", value, "}", most)
    else:
        yield type(value).__name__


def _joined(first: str, values: list | tuple | dict, last: str, most: int) -> Iterator[str]:
    yield first
    for number, value in enumerate(values):
        if number:
            yield ", "
        yield from _pieces(value, most)
        if isinstance(values, dict):
            yield ": "
            yield from _pieces(values[value], most)
    yield last
