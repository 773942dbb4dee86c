"""The API key that a server requires and a client sends."""

from __future__ import annotations

import os
from pathlib import Path

from sinew_client.errors import SinewError

MAX_KEYS = 1 << 16  # largest size of a key file, characters
KEY_VARIABLE = "SINEW_API_KEY"
# A line ``role:key`` of a key file gives the key one of these roles.
ROBOT, METRICS, ADMIN = ROLES = ("robot", "metrics", "admin")


def role_and_key(line: str) -> tuple[str, str]:
    """Split a line of a key file, ``role:key`` or ``key``, into (role, key). A key without a role allows everything."""
    role, colon, key = line.partition(":")
    return (role, key.strip()) if colon and role in ROLES else ("", line)


def key_from_environment() -> str:
    """Return the key in ``SINEW_API_KEY``; "" if the variable is not set."""
    return os.environ.get(KEY_VARIABLE, "")


def api_key_of(path: Path | None) -> str:
    """Choose the API key that a client sends.

    Args:
        path: A key file; None takes the key from the environment variable ``SINEW_API_KEY``.

    Returns:
        The file's first key for robots or without a role, else the first key of the file. "" if there is no key.

    Raises:
        SinewError: See :func:`keys_in`.
    """
    if path is None:
        return key_from_environment()
    pairs = [role_and_key(line) for line in keys_in(path)]
    return next((key for role, key in pairs if role in ("", ROBOT)), pairs[0][1])


def keys_in(path: Path) -> tuple[str, ...]:
    """Read the lines of a key file.

    Args:
        path: A text file with a key or ``role:key`` in each line (:data:`ROLES`).

    Returns:
        The lines that are not empty.

    Raises:
        SinewError: The file cannot be read or is empty, or a role has no key.
    """
    try:
        with open(path, encoding="utf-8") as file:  # own file: named by the person at this machine
            text = file.read(MAX_KEYS)
        keys = tuple(filter(None, map(str.strip, text.splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        # `strerror` is the reason without the path, because the message below already names the path.
        why = getattr(error, "strerror", None) or error
        raise SinewError(f"--api-key-file {path}: {why}") from error
    if not keys:
        raise SinewError(f"--api-key-file {path}: the file is empty; write a key into it")
    for line in keys:
        if not role_and_key(line)[1]:
            raise SinewError(f"--api-key-file {path}: expected ROLE:KEY, got {line} without a key")
    return keys
