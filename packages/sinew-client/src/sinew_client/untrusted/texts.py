"""Safe readers for JSON, JSON lines, TOML and YAML, with limits for the size, the depth and the number of values."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any, Iterator

from sinew_client.untrusted.files import MAX_BYTES, decode, open_regular, read_bytes, read_text
from sinew_client.untrusted.words import UntrustedError, reason

MAX_DEPTH = 64  # largest depth of lists and objects inside lists and objects
MAX_VALUES = 1 << 20  # largest number of values in a JSON text; lists, objects and keys count as values too
# A tokenizer file has at most this many values. The largest known tokenizer has 2.5 million.
MAX_TOKENIZER_VALUES = 1 << 23
MAX_NODES = 10_000  # largest number of values in a YAML file; each alias counts all values that it repeats
# A YAML value has at most this many characters, because YAML parses text like 1:00:00 of any length as one number.
MAX_SCALAR = 1 << 14
MAX_LINE = 1 << 24  # longest line of a file of JSON lines, bytes
MAX_LINES = 1 << 22  # largest number of lines in a file
# An integer has at most this many digits, as in Python 3.11. Older versions need minutes to read a million digits.
DIGITS = 4300

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_WHOLE = re.compile(r"\d" * 8 + f"{{{DIGITS - 6},}}")
# This pattern matches the texts and comments of a TOML file, in which dots do not separate parts of a key.
_TOML_TEXT = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*(?:"""|\Z)'
    r"|'''(?:[^']|'(?!''))*(?:'''|\Z)"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"?'
    r"|'[^'\n]*'?"
    r"|#[^\n]*",
    re.DOTALL,
)


class TornLineError(UntrustedError):
    """The last line of a file is incomplete, because the writing process was killed or the disk was full."""


def parse_json(
    data: str | bytes | bytearray | memoryview,
    *,
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_VALUES,
    finite: bool = True,
) -> Any:
    """Parse a JSON text.

    Args:
        data: The text, or its bytes in UTF-8. The caller must limit its length.
        max_depth: Largest depth of lists and objects inside lists and objects.
        max_values: Largest number of values; lists, objects and keys count as values too.
        finite: True rejects NaN, Infinity and numbers that are too large for float64.

    Returns:
        The value.

    Raises:
        UntrustedError: The text is not JSON, or exceeds a limit.
    """
    text = data if isinstance(data, str) else decode(data)
    marks = text.count(",") + text.count(":") + text.count("[") + text.count("{")
    # If there are many marks (characters that may separate values), count again, but only marks outside texts.
    if marks >= max_values:
        plain = _STRING.sub("", text)
        if sum(map(plain.count, ",:[{")) >= max_values:
            raise UntrustedError(f"at most {max_values} values", "more")
    if sys.version_info < (3, 11) and _WHOLE.search(text):
        raise UntrustedError(f"numbers of at most {DIGITS} digits", "more")
    try:
        value = json.loads(text)
    except RecursionError:
        raise UntrustedError(f"at most {max_depth} levels of containers", "more") from None
    except ValueError as error:
        raise UntrustedError("JSON", f"text that is not JSON ({reason(error)})") from None
    # An escape such as \ud800 can be a lone surrogate (half a character), which cannot be encoded or printed.
    halves = not text.isascii() or "\\ud" in text or "\\uD" in text
    check_values(value, max_depth=max_depth, finite=finite, texts=halves)
    return value


def check_values(value: Any, *, max_depth: int = MAX_DEPTH, finite: bool = True, texts: bool = True) -> None:
    """Check plain values. The check is not recursive, so deeply nested values cannot exhaust the stack.

    Args:
        value: The value.
        max_depth: Largest depth of lists and dicts inside lists and dicts.
        finite: True rejects NaN and infinite numbers.
        texts: True rejects texts with a lone surrogate (half a character).

    Raises:
        UntrustedError: The value does not pass a check.
    """
    level = [value]
    for depth in range(max_depth + 1):
        inner: list[Any] = []
        for each in level:
            kind = type(each)
            if depth == max_depth and (kind is dict or kind is list or kind is tuple):
                raise UntrustedError(f"at most {max_depth} levels of containers", "more")
            if kind is dict:
                inner.extend(each.values())
                if texts:
                    inner.extend(each)
            elif kind is list or kind is tuple:
                inner.extend(each)
            elif kind is float:
                if finite and not math.isfinite(each):
                    raise UntrustedError("finite numbers", str(each))
            elif kind is str and texts:
                try:
                    each.encode("utf-8")
                except UnicodeEncodeError:
                    raise UntrustedError(
                        "Unicode text", "half a character (surrogates not allowed)"
                    ) from None
        if not inner:
            return
        level = inner


def read_json(
    path: Path | str,
    max_bytes: int = MAX_BYTES,
    *,
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_VALUES,
    finite: bool = True,
) -> Any:
    """Read a JSON file.

    Args:
        path: A regular file.
        max_bytes: Largest size of the file.
        max_depth, max_values, finite: As in :func:`parse_json`.

    Returns:
        The value.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is not JSON, or exceeds a limit.
    """
    data = read_bytes(path, max_bytes)
    return parse_json(data, max_depth=max_depth, max_values=max_values, finite=finite)


def read_jsonl(
    path: Path | str,
    max_line: int = MAX_LINE,
    *,
    max_lines: int = MAX_LINES,
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_VALUES,
    finite: bool = True,
) -> Iterator[tuple[int, Any]]:
    """Read a file with one JSON value per line.

    Args:
        path: A regular file.
        max_line: Longest line, bytes.
        max_lines: Largest number of lines.
        max_depth, max_values, finite: Limits of each line, as in :func:`parse_json`.

    Yields:
        The number of each line, from 1, and its value. Empty lines are skipped.

    Raises:
        OSError: The file cannot be read.
        TornLineError: The last line is incomplete.
        UntrustedError: Another line is not JSON, or exceeds a limit.
    """
    with open_regular(path) as file:
        for number in range(1, max_lines + 2):
            line = file.readline(max_line + 1)
            if not line:
                return
            where = f"line {number}"
            if number > max_lines:
                raise UntrustedError(f"at most {max_lines} lines", "more")
            if len(line) > max_line:
                raise UntrustedError(f"at most {max_line} bytes", "more", where)
            if line.isspace():
                continue
            try:
                value = parse_json(line, max_depth=max_depth, max_values=max_values, finite=finite)
            except UntrustedError as error:
                kind = UntrustedError if line.endswith(b"\n") else TornLineError
                raise kind(error.expected, error.got, where) from None
            yield number, value


def parse_toml(text: str, *, max_depth: int = MAX_DEPTH, finite: bool = True) -> dict[str, Any]:
    """Parse a TOML text.

    Args:
        text: The text. The caller must limit its length.
        max_depth: Largest depth of lists and tables inside lists and tables.
        finite: True rejects NaN and infinite numbers.

    Returns:
        The top-level table.

    Raises:
        UntrustedError: The text is not TOML, or exceeds a limit.
        ValueError: Python is older than 3.11, and the package tomli is not installed.
    """
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib  # Python before 3.11 has no tomllib
        except ImportError:
            raise ValueError(
                "TOML needs Python 3.11 or the package tomli; install tomli, or write JSON"
            ) from None
    # Limit the number of parts of a dotted key such as a.b.c, because the parser's time grows with its square. A key of
    # 256 kB would need hours.
    if any(line.count(".") > 4 * max_depth for line in _TOML_TEXT.sub("", text).splitlines()):
        raise UntrustedError(f"keys of at most {4 * max_depth} parts in a line", "more")
    if sys.version_info < (3, 11) and _WHOLE.search(text):
        raise UntrustedError(f"numbers of at most {DIGITS} digits", "more")
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise UntrustedError(f"at most {max_depth} levels of containers", "more") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise UntrustedError("TOML", f"text that is not TOML ({reason(error)})") from None
    check_values(value, max_depth=max_depth, finite=finite)
    return value


def read_toml(
    path: Path | str, max_bytes: int = MAX_BYTES, *, max_depth: int = MAX_DEPTH, finite: bool = True
) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: A regular file.
        max_bytes: Largest size of the file.
        max_depth, finite: As in :func:`parse_toml`.

    Returns:
        The top-level table.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is not TOML, or exceeds a limit.
        ValueError: Python is older than 3.11, and the package tomli is not installed.
    """
    return parse_toml(read_text(path, max_bytes), max_depth=max_depth, finite=finite)


def read_yaml(path: Path | str, max_bytes: int = MAX_BYTES, *, finite: bool = True) -> Any:
    """Read a YAML file with plain values only.

    Args:
        path: A regular file.
        max_bytes: Largest size of the file.
        finite: True rejects NaN and infinite numbers.

    Returns:
        The value.

    Raises:
        OSError: The file cannot be read.
        UntrustedError: The file is not YAML with plain values, or exceeds a limit.
    """
    return parse_yaml(read_text(path, max_bytes), finite=finite)


def parse_yaml(text: str, *, finite: bool = True) -> Any:
    """Parse a YAML text with plain values only.

    The number of values is limited, including the values that aliases repeat: a text of 544 bytes with nested aliases
    can need minutes to print.

    Args:
        text: The text. The caller must limit its length.
        finite: True rejects NaN and infinite numbers.

    Returns:
        The value.

    Raises:
        UntrustedError: The text is not YAML with plain values, or exceeds a limit.
    """
    import yaml

    try:
        value = _load(yaml, text)
    except (MemoryError, UntrustedError):
        raise
    except RecursionError:
        raise UntrustedError(f"at most {MAX_DEPTH} levels of containers", "more") from None
    # For unknown tags, the constructors of PyYAML raise KeyError, AttributeError and other errors.
    except Exception as error:
        raise UntrustedError("YAML with plain values", f"another text ({reason(error)})") from error
    check_values(value, finite=finite)
    return value


def _load(yaml: Any, text: str) -> Any:
    class Loader(yaml.SafeLoader):
        """A YAML loader that stops at too many values or levels, before it reads the rest of the text."""

        count = depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.count, self.depth = self.count + 1, self.depth + 1
            if self.count > MAX_NODES:
                raise UntrustedError(f"at most {MAX_NODES} values", "more")
            # The plain values inside the deepest list or map are one level deeper than their container.
            if self.depth > MAX_DEPTH + 1:
                raise UntrustedError(f"at most {MAX_DEPTH} levels of containers", "more")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        # Check flow collections such as [[[ here too, because the scanner reads them before `compose_node` is called.
        def fetch_flow_collection_start(self, kind: Any) -> None:
            if self.flow_level >= MAX_DEPTH:
                raise UntrustedError(f"at most {MAX_DEPTH} levels of containers", "more")
            super().fetch_flow_collection_start(kind)

    loader = Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(yaml, root, {}) > MAX_NODES:
            raise UntrustedError(f"at most {MAX_NODES} values with all aliases", "more")
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _size(yaml: Any, node: Any, known: dict[int, int]) -> int:
    """Count the values of a YAML node, including the values that its aliases repeat.

    Args:
        yaml: The module yaml.
        node: The node.
        known: Sizes of the nodes that were counted already, by their id. 0 means that a node is being counted.

    Raises:
        UntrustedError: A node contains itself, or a value is too long.
    """
    size = known.get(id(node))
    if size == 0:
        raise UntrustedError("aliases outside their own value", "an alias inside its own value")
    if size is None:
        known[id(node)] = 0
        parts: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        else:
            if len(node.value) > MAX_SCALAR:
                raise UntrustedError(f"values of at most {MAX_SCALAR} characters", str(len(node.value)))
            # This raises UnicodeEncodeError for a lone surrogate (half a character), which cannot be printed.
            node.value.encode()
        size = known[id(node)] = 1 + sum(_size(yaml, part, known) for part in parts)
    return size
