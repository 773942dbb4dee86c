"""Read the tensors of a PyTorch file (``.pt``) with torch's own restricted loader, over a memory map.

``torch.load(weights_only=True)`` runs no code of the file: it supports tensors and containers, and rejects everything
else. Sinew checks the archive first: its entries must be stored without compression, and its pickle must have a
plausible size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from sinew_client.untrusted import UntrustedError, open_archive
from sinew_client.untrusted.archives import STORED, Archive

from sinew.bundle.writer import TensorSource
from sinew.core import ConvertError

MAX_PICKLE_BYTES = 64 << 20
MOST_NAMED = 12  # a note lists at most this many sections of a file
MAX_ENTRIES = 1 << 17
MAX_DIRECTORY = 1 << 26  # largest size of the zip archive's directory (its list of files), in bytes
MAX_BYTES = 1 << 44
MAX_DEPTH = 16
STORAGE = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
    torch.float64: GGMLQuantizationType.F64,
    torch.int64: GGMLQuantizationType.I64,
    torch.int32: GGMLQuantizationType.I32,
}


@dataclass(frozen=True)
class MappedTensor:
    """The bytes of a tensor in the file's memory map. They are copied into contiguous memory on demand."""

    tensor: torch.Tensor

    def blocks(self) -> Iterable[memoryview]:
        flat = self.tensor.detach().contiguous().reshape(-1)
        yield np.ascontiguousarray(flat.view(torch.uint8).numpy()).data


def read_torch(path: Path) -> dict[str, TensorSource]:
    """Return the tensors of a ``.pt`` file by name. A tensor in nested dictionaries is named by its keys, joined with
    dots.

    Raises:
        ConvertError: The file is not a zip archive of tensors and plain containers.
    """
    return _tensors(path, _loaded(path))


def read_torch_record(path: Path, name: str) -> tuple[dict[str, TensorSource], dict[str, Any] | None]:
    """Return the tensors of a ``.pt`` file, and a configuration that is saved with them.

    Args:
        path: The file.
        name: Key of the configuration in the file's dictionary.

    Returns:
        The tensors, as :func:`read_torch` returns them, and the configuration. The configuration is None if the
        file has no such dictionary.

    Raises:
        ConvertError: The file is not a zip archive of tensors and plain containers.
    """
    record = _loaded(path)
    config = record.get(name)
    return _tensors(path, record), dict(config) if isinstance(config, Mapping) else None


def _loaded(path: Path) -> Mapping[Any, Any]:
    """Return the dictionary of a file. Its tensors are memory-mapped."""
    try:
        bounds = {"max_entries": MAX_ENTRIES, "max_unpacked": MAX_BYTES, "max_directory": MAX_DIRECTORY}
        with open_archive(path, methods=(STORED,), **bounds) as archive:
            _check(path, archive)
        record = torch.load(
            path, map_location="cpu", weights_only=True, mmap=True
        )  # bounded: the size of the archive is checked above
    except ConvertError:
        raise
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror or error}") from None
    except UntrustedError as error:
        raise ConvertError(
            f"{path}: {error}; load the file with PyTorch 1.6 or later and save it again with torch.save, which writes"
            " an uncompressed zip archive"
        ) from None
    except Exception as error:  # noqa: BLE001 - torch's unpickler raises whatever the bytes lead it to
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise ConvertError(
            f"{path}: not a file of tensors alone ({reason}); save only the state_dict with torch.save"
        ) from None
    if not isinstance(record, Mapping):
        raise ConvertError(f"{path}: expected a dictionary of tensors, got {type(record).__name__}")
    return record


def _tensors(path: Path, record: Mapping[Any, Any]) -> dict[str, TensorSource]:
    size = path.stat().st_size
    return {name: _source(path, name, tensor, size) for name, tensor in _flat(path, record, "", 0)}


def unread_note(path: Path, names: Iterable[str], section: str) -> tuple[str, ...]:
    """Return a note about the sections of a file that conversion does not read; () if there are none.

    Args:
        path: The file.
        names: Names of the file's tensors. A section is the first part of a name.
        section: The section that conversion reads.
    """
    others = sorted({name.partition(".")[0] for name in names} - {section})
    more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
    return (
        (f"{path.name}: only {section} is read, and not {', '.join(others[:MOST_NAMED])}{more}",)
        if others
        else ()
    )


def _check(path: Path, archive: Archive) -> None:
    for name in archive.names:
        if name.endswith("data.pkl") and archive.size(name) > MAX_PICKLE_BYTES:
            raise ConvertError(
                f"{path}: {name} has {archive.size(name)} bytes, expected at most {MAX_PICKLE_BYTES}; save only the"
                " state_dict"
            )


def _flat(
    path: Path, record: Mapping[Any, Any], prefix: str, depth: int
) -> Iterator[tuple[str, torch.Tensor]]:
    if depth > MAX_DEPTH:
        raise ConvertError(
            f"{path}: dictionaries are nested more than {MAX_DEPTH} deep; save a flat state_dict"
        )
    for key, value in record.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _flat(path, value, f"{prefix}{key}.", depth + 1)


def _source(path: Path, name: str, tensor: torch.Tensor, size: int) -> TensorSource:
    kind = STORAGE.get(tensor.dtype)
    if kind is None or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise ConvertError(
            f"{path}: tensor {name!r}: expected plain numbers, got {tensor.dtype} {tensor.layout}; save the tensor as"
            " a dense float tensor"
        )
    nbytes = tensor.numel() * tensor.element_size()
    # Without this check, a view that repeats its elements (expand) would be written as a huge tensor.
    if nbytes > size:
        raise ConvertError(
            f"{path}: tensor {name!r} needs {nbytes} bytes, but the file has {size}; save a contiguous copy of it"
        )
    return TensorSource(name, tuple(tensor.shape), kind, nbytes, MappedTensor(tensor))
