"""Small files of a checkpoint, read whole: regular files of a bounded size, and every failure a ConvertError."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinew_client.untrusted import open_regular

from sinew.core import ConvertError

MAX_JSON_BYTES = 256 << 20  # tokenizers reach tens of megabytes, an index of shards a few


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes. Raises :class:`ConvertError`."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise ConvertError(f"{path}: expected at most {limit} bytes, got more")
            pieces, left = [], limit + 1
            while left and (piece := file.read(min(left, 1 << 24))):
                pieces.append(piece)
                left -= len(piece)
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the name
        raise ConvertError(f"{str(path)!r}: {error}") from None
    if not left:
        raise ConvertError(f"{path}: expected at most {limit} bytes, got more")
    return b"".join(pieces)


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """Return the content of a UTF-8 file. Raises :class:`ConvertError`."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConvertError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises :class:`ConvertError`."""
    text = read_text(path)
    try:
        record = json.loads(text)
        if "\\ud" in text.lower():  # escapes can spell half a character, which nothing can print
            json.dumps(record, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ConvertError(f"{path}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ConvertError(f"{path}: expected a JSON object, got {type(record).__name__}")
    return record


def directory_config(path: Path) -> dict[str, Any]:
    """Return a directory's ``config.json``; nothing where there is none. Raises :class:`ConvertError`."""
    file = path / "config.json"
    return read_json(file) if file.is_file() else {}


@contextmanager
def named(where: object) -> Iterator[None]:
    """Let errors of sizes that describe no model, which say the field, say the place too, as ConvertError."""
    try:
        yield
    except KeyError as error:
        raise ConvertError(f"{where}: {error} is missing") from None
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ConvertError(f"{where}: {error}") from None
