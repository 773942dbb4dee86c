"""Read small files of a checkpoint as a whole. Only regular files of a bounded size are read, and every failure raises
ConvertError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinew_client import untrusted
from sinew_client.untrusted import UntrustedError
from sinew_client.untrusted.texts import MAX_TOKENIZER_VALUES

from sinew.core import ConvertError

MAX_JSON_BYTES = 256 << 20  # a tokenizer.json has tens of megabytes


def read_bytes(path: Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes.

    Raises:
        ConvertError: The file is missing, larger, or not a regular file.
    """
    with ConvertError.at(path, OSError, UntrustedError):
        return untrusted.read_bytes(path, limit)


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """Return the content of a UTF-8 file.

    Raises:
        ConvertError: The file cannot be read, or is not UTF-8.
    """
    with ConvertError.at(path, OSError, UntrustedError):
        return untrusted.read_text(path, limit)


# Usual names of files of statistics. If the user passes a folder instead of a file, the error suggests such a file.
STATISTICS = (
    "meta/stats.json",
    "stats.json",
    "dataset_statistics.json",
    "norm_stats.json",
)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. The object may contain infinite numbers, as PyTorch's configs do.

    Raises:
        ConvertError: The file cannot be read, or does not contain a JSON object.
    """
    if path.is_dir():
        inside = [path / name for name in STATISTICS if (path / name).is_file()]
        hint = f"; pass {inside[0]}" if inside else ""
        raise ConvertError(f"{path}: expected a JSON file, got a folder{hint}")
    with ConvertError.at(path, OSError, UntrustedError):
        record = untrusted.read_json(path, MAX_JSON_BYTES, max_values=MAX_TOKENIZER_VALUES, finite=False)
    if not isinstance(record, dict):
        raise ConvertError(f"{path}: expected a JSON object, got {type(record).__name__}")
    return record


def directory_config(path: Path) -> dict[str, Any]:
    """Return the content of a directory's ``config.json``; {} if the file is missing.

    Raises:
        ConvertError: The file is not a JSON object.
    """
    file = path / "config.json"
    return read_json(file) if file.is_file() else {}


@contextmanager
def named(where: object) -> Iterator[None]:
    """Convert errors about invalid model sizes, raised inside the ``with`` block, to ConvertError.

    ``where`` becomes the prefix of the message.
    """
    try:
        yield
    except KeyError as error:
        raise ConvertError(
            f"{where}: {error} is missing; use the complete file of the training run"
        ) from None
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise ConvertError(f"{where}: {error}") from None
