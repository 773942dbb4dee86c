"""Files of text that may come from elsewhere, read within bounds: contracts, fleets, limits, journals.

Each reader ends in plain values, or in a ValueError or OSError that its caller turns into an error of its own; none
hangs, takes memory out of proportion to the file, or prints what it was given at length.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, Iterator

MAX_TEXT = 1 << 18  # bytes of a file
MAX_NODES = 10_000  # values of a YAML file, each alias counted with all that it stands for
MAX_SCALAR = 1 << 14  # characters of one value; YAML reads 1:00:00 and so on as one number
SHOWN = 80  # characters of a value in a message
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path | str) -> io.FileIO:
    """Open a regular file for reading, unbuffered; links to one are followed.

    Raises OSError for anything else: a FIFO would wait for a writer, and a device has no end.
    """
    flags = (
        getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY")
    )  # as this system has them
    try:
        number = os.open(path, os.O_RDONLY | sum(flags))
    except ValueError as error:  # a NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
            raise OSError(errno.EINVAL, f"expected a regular file, got {kind}", str(path))
        return open(number, "rb", buffering=0)
    except BaseException:
        os.close(number)
        raise


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file to read bytes. Raises OSError for anything else."""
    return io.BufferedReader(open_regular(path))


def read_text(path: Path, most: int = MAX_TEXT) -> str:
    """Return the text of a file in UTF-8. Raises OSError, or ValueError for more than ``most`` bytes or other text."""
    with opened(path) as file:
        data: bytes = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"expected at most {most} bytes, got more")
    return data.decode("utf-8")


def read_yaml(path: Path) -> Any:
    """Return the plain values of a YAML file. Raises OSError, or ValueError that says what is wrong in one line."""
    return parse_yaml(read_text(path))


def parse_yaml(text: str) -> Any:
    """Return the plain values of a YAML text, its aliases bounded. Raises ValueError.

    An alias costs one word and stands for as much as one likes: 544 bytes of them took minutes to print.
    """
    import yaml

    try:
        return _load(yaml, text)
    except MemoryError:
        raise
    except (
        Exception
    ) as error:  # its constructors end in KeyError, AttributeError and more for tags of their own
        said = " ".join(str(error).split())
        raise ValueError(said if len(said) < 300 else said[:297] + "...") from error


def _load(yaml: Any, text: str) -> Any:
    class Loader(yaml.SafeLoader):
        """Stops where there are too many values, before they are all read."""

        count = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.count += 1
            if self.count > MAX_NODES:
                raise ValueError(f"expected at most {MAX_NODES} values, got more")
            return super().compose_node(parent, index)

    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(yaml, root, {}) > MAX_NODES:
            raise ValueError(f"expected at most {MAX_NODES} values with all aliases, got more")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _size(yaml: Any, node: Any, known: dict[int, int]) -> int:
    """Return how many values a node stands for. known: of nodes that were seen; 0 while one is being looked at."""
    size = known.get(id(node))
    if size == 0:
        raise ValueError("expected no alias inside of what it stands for")
    if size is None:
        known[id(node)] = 0
        parts: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        else:
            if len(node.value) > MAX_SCALAR:
                raise ValueError(f"expected values of at most {MAX_SCALAR} characters, got {len(node.value)}")
            node.value.encode()  # lone surrogates are no text, and end whoever prints them
        size = known[id(node)] = 1 + sum(_size(yaml, part, known) for part in parts)
    return size


def shown(value: Any, most: int = SHOWN) -> str:
    """Return what ``repr`` says of a value, cut to ``most`` characters; what is cut off is never written out."""
    found, length = [], 0
    for piece in _pieces(value, most):
        found.append(piece)
        length += len(piece)
        if length > most:
            return "".join(found)[: most - 3] + "..."
    return "".join(found)


def named(value: Any, most: int = SHOWN) -> str:
    """Return a text as it stands, cut to ``most`` characters and what cannot be printed escaped; else its ``repr``."""
    return shown(value, most + 2)[1:-1] if isinstance(value, str) else shown(value, most)


def _pieces(value: Any, most: int) -> Iterator[str]:
    if isinstance(value, (str, bytes)):
        yield repr(value[: most + 1])
    elif isinstance(value, bool) or value is None or isinstance(value, float):
        yield repr(value)
    elif isinstance(value, int):  # Python refuses to write long ones
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
