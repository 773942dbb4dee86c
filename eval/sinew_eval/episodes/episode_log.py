"""Read and write finished episodes as lines of JSON, in a folder to which only one run writes at a time."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sinew.core import SinewError
from sinew_client.untrusted import parse_json, read_bytes

from sinew_eval.episodes.runner import Episode

logger = logging.getLogger(__name__)
MAX_LOG = 1 << 31  # largest log that Sinew reads, in bytes


def line(key: str, episode: Episode) -> bytes:
    """Convert an episode to a line of a log.

    Args:
        key: Key of the variant (:func:`sinew_eval.episodes.player.key`).
        episode: The episode.

    Returns:
        A line of JSON with a line end.
    """
    return json.dumps({"key": key, **episode.to_dict()}).encode() + b"\n"


def episodes_of(data: bytes) -> Iterator[tuple[tuple[str, int], Episode]]:
    """Read the episodes in a log. A line that is cut short or contains no episode is skipped.

    Args:
        data: Content of the log.

    Yields:
        (key of the variant, seed) and the episode.
    """
    for text in data.splitlines():
        try:
            values = parse_json(text, finite=False)
            key = values.pop("key")
            episode = Episode.from_dict(values)
        except (ValueError, TypeError, KeyError, AttributeError, SinewError):
            continue
        if isinstance(key, str):
            yield (key, episode.seed), episode


def read_log_file(path: Path) -> bytes:
    """Read a log, which must be a regular file.

    Raises:
        SinewError: The file cannot be read.
    """
    try:
        return read_bytes(path, MAX_LOG)
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SinewError(f"{path}: {error}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: it is replaced by a complete file, or stays unchanged."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            # The OSError of a write does not contain the file name.
            error.filename = str(path)
        raise


def append(file: BinaryIO, data: bytes) -> None:
    """Append data to an unbuffered log.

    Args:
        file: The log.
        data: Complete lines.

    Raises:
        OSError: The data could not be written completely, for example because the disk is full. The error contains
            the file name.
    """
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        error.filename = file.name
        raise


@contextlib.contextmanager
def sole(out: Path, hint: str = "run `sinew eval --join {}` to help it") -> Iterator[None]:
    """Lock the folder of a run, so that only one run writes to it.

    If the file system cannot lock (some network file systems), the run continues with a warning.

    Args:
        out: The folder.
        hint: What the user can do next, for the error message. ``{}`` is replaced by the folder.

    Raises:
        SinewError: Another run has locked the folder.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl
        yield
        return
    folder = os.open(out, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SinewError(f"{out}: another run uses this folder; {hint.format(out)}") from None
        except OSError as error:
            logger.warning(
                "%s: %s, so the folder is not locked; do not start a second run in it", out, error.strerror
            )
        yield
    finally:
        os.close(folder)
