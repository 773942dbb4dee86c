"""The key that a server wants, and that clients send."""

from __future__ import annotations

import os
from pathlib import Path

from sinew_client.errors import SinewError

MAX_KEYS = 1 << 16  # characters
KEY_VARIABLE = "SINEW_API_KEY"


def key_from_environment() -> str:
    """Return the key of ``SINEW_API_KEY``; empty where there is none."""
    return os.environ.get(KEY_VARIABLE, "")


def api_key_of(path: Path | None) -> str:
    """Return the first key in a file, or the environment's where none is named. Raises as :func:`keys_in`."""
    return key_from_environment() if path is None else keys_in(path)[0]


def keys_in(path: Path) -> tuple[str, ...]:
    """Return the keys in a file, one a line.

    Raises :class:`SinewError` for a file that cannot be read or is empty.
    """
    try:
        with open(path, encoding="utf-8") as file:  # own file: named by the person at this machine
            text = file.read(MAX_KEYS)
        keys = tuple(filter(None, map(str.strip, text.splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error  # without the path, which is said
        raise SinewError(f"--api-key-file {path}: {why}") from error
    if not keys:
        raise SinewError(f"--api-key-file {path}: the file is empty")
    return keys
