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
from sinew.eval.runner import Episode

logger = logging.getLogger(__name__)


def line(key: str, episode: Episode) -> bytes:
    """Return an episode as a line of JSON, as logs and queues have it."""
    return json.dumps({"key": key, **episode.to_dict()}).encode() + b"\n"


def episodes_of(text: str) -> Iterator[tuple[tuple[str, int], Episode]]:
    """Yield (key, seed) and the episode of each line. A line that a kill cut short is left out."""
    for line in text.splitlines():
        try:
            values = json.loads(line)
            key = values.pop("key")
            yield (key, values["seed"]), Episode(**values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there as a whole or not at all."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # which a write does not say
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
    except ImportError:  # Windows
        yield
        return
    held = os.open(out, os.O_RDONLY)
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
