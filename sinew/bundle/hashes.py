"""Hashes that a bundle carries of itself: of its header, checked whenever it is opened, and of each tensor, on demand.

They find accidents: flipped bits, a copy that broke off, a file that was patched by another tool. Whoever can write
the file can write its hashes too; a signature would be another matter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from sinew.core import BundleError

if TYPE_CHECKING:
    from sinew.bundle.gguf_file import GGUFFile

KEY_HEADER = "sinew.header_sha256"  # of the file up to the data, with this value itself as zeros
KEY_TENSORS = "sinew.tensor_sha256"  # JSON: name -> hash of the tensor's bytes
BLANK = "0" * 64
BLOCK = 1 << 22


def read_hashes(file: GGUFFile) -> dict[str, str] | None:
    """Return name -> SHA-256 of every tensor; None for bundles written before 2026-11-21, which carry none.

    Raises :class:`BundleError` where the header is not the one that was written.
    """
    said, text = file.metadata.get(KEY_HEADER), file.metadata.get(KEY_TENSORS)
    if said is None and text is None:
        return None
    place = file.places.get(KEY_HEADER)
    if said is None or not _is_hash(said) or place is None or not isinstance(text, str):
        raise BundleError(
            f"{KEY_HEADER} and {KEY_TENSORS}: expected both as text, of 64 hexadecimal digits the first"
        )
    if (found := header_hash(memoryview(file.map)[: file.header_bytes], place)) != said:
        raise BundleError(
            f"the header was changed after it was written: {KEY_HEADER} says {said[:16]}..., its bytes give"
            f" {found[:16]}..."
        )
    try:
        hashes: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{KEY_TENSORS} is not JSON: {error}") from None
    if (
        not isinstance(hashes, dict)
        or hashes.keys() != file.tensors.keys()
        or not all(map(_is_hash, hashes.values()))
    ):
        raise BundleError(f"{KEY_TENSORS}: expected one hash for each tensor")
    return hashes


def header_hash(header: Any, place: int) -> str:
    """Return the SHA-256 of a header whose own hash stands at ``place``."""
    digest = hashlib.sha256(header[:place])
    digest.update(BLANK.encode())
    digest.update(header[place + len(BLANK) :])
    return digest.hexdigest()


def changed_tensors(file: GGUFFile, hashes: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of tensors whose bytes are not those that were written. Reads all of the file."""
    view = memoryview(file.map)
    for name, info in file.tensors.items():
        digest = hashlib.sha256()
        for start in range(info.offset, info.offset + info.nbytes, BLOCK):
            digest.update(view[start : min(start + BLOCK, info.offset + info.nbytes)])
        if digest.hexdigest() != hashes[name]:
            yield name


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == len(BLANK) and set(value) <= set("0123456789abcdef")
