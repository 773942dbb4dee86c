"""Finished episodes as lines of JSON, in a folder that one run at a time writes to."""

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
    """Return an episode as a line of JSON, as logs and queues have it."""
    return json.dumps({"key": key, **episode.to_dict()}).encode() + b"\n"


def episodes_of(data: bytes) -> Iterator[tuple[tuple[str, int], Episode]]:
    """Yield (key, seed) and the episode of each line. A line that a kill cut short, or that is no episode, is left
    out."""
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
    """Return the bytes of a log, a regular file. Raises :class:`SinewError`."""
    try:
        return read_bytes(path, MAX_LOG)
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise SinewError(f"{path}: {error}") from None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
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
    """Write all of ``data`` to an unbuffered log. Raises OSError that names it, also where a full disk takes a part."""
    try:
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        error.filename = file.name
        raise


@contextlib.contextmanager
def sole(out: Path, hint: str = "`sinew eval --join {}` helps it") -> Iterator[None]:
    """Hold the folder of a run: one head writes there. Raises :class:`SinewError` while another one does, with a hint.

    A disk that cannot hold anything (some network file systems) is taken at its word.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no fcntl
        yield
        return
    held = os.open(out, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SinewError(f"{out}: another run plays here; {hint.format(out)}") from None
        except OSError as error:
            logger.warning("%s: %s, so nothing keeps a second run from this folder", out, error.strerror)
        yield
    finally:
        os.close(held)
