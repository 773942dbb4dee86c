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
    """Split a line of a key file into role and key. A key without a role has the role "" and allows everything."""
    role, colon, key = line.partition(":")
    return (role, key.strip()) if colon and role in ROLES else ("", line)


def key_from_environment() -> str:
    """Return the key in ``SINEW_API_KEY``; "" if the variable is not set."""
    return os.environ.get(KEY_VARIABLE, "")


def api_key_of(path: Path | None) -> str:
    """Return the key that a client sends.

    That is the first key of the file that is for robots or has no role, else the file's first key. Without a file, it
    is the key in the environment.

    Raises the errors of :func:`keys_in`.
    """
    if path is None:
        return key_from_environment()
    pairs = [role_and_key(line) for line in keys_in(path)]
    return next((key for role, key in pairs if role in ("", ROBOT)), pairs[0][1])


def keys_in(path: Path) -> tuple[str, ...]:
    """Return the lines of a key file: a key, or ``role:key`` (:data:`ROLES`).

    Raises :class:`SinewError` for a file that cannot be read or is empty, and for a role without a key.
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
        raise SinewError(f"--api-key-file {path}: the file is empty")
    for line in keys:
        if not role_and_key(line)[1]:
            raise SinewError(f"--api-key-file {path}: expected a key after the role {line}")
    return keys
