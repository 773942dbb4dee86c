"""The key that a server wants, and that clients send."""

from __future__ import annotations

import os
from pathlib import Path

from sinew.core import SinewError

KEY_VARIABLE = "SINEW_API_KEY"


def key_from_environment() -> str:
    """Return the key of ``SINEW_API_KEY``; empty where there is none."""
    return os.environ.get(KEY_VARIABLE, "")


def api_key_of(path: Path | None) -> str:
    """Return the key in a file, or the environment's where none is named.

    Raises :class:`SinewError` for a file that cannot be read or is empty.
    """
    if path is None:
        return key_from_environment()
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error  # without the path, which is said
        raise SinewError(f"--api-key-file {path}: {why}") from error
    if not key:
        raise SinewError(f"--api-key-file {path}: the file is empty")
    return key
