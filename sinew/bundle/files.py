"""Noticing when a file in use is changed."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import BinaryIO

from sinew_client.given import open_regular

EXPORTED = "policy.gguf"  # the bundle without weights in a folder of graphs, as `sinew export` writes it


class InUse:
    """A file that has to stay as it is while somebody reads its memory map.

    It is told by the open file, not by its name: renaming, deleting or replacing by rename leaves the bytes that
    are mapped alone, and so does touching another file under the old name. Writing into it changes what is mapped,
    and truncating it makes reading a fault that ends the process.
    """

    def __init__(self, path: Path | str, file: BinaryIO):
        self.path = Path(path)
        self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        found = os.fstat(self._number)
        self._found = found.st_size, found.st_mtime_ns

    def problem(self) -> str | None:
        """Return a sentence if the file was written to or truncated since it was opened, else None; costs one fstat."""
        found = os.fstat(self._number)
        size, changed = found.st_size, found.st_mtime_ns
        if size < self._found[0]:
            what = f"was truncated from {self._found[0]} to {size} bytes"
        elif size > self._found[0]:
            what = f"grew from {self._found[0]} to {size} bytes"
        elif changed != self._found[1]:
            what = "was written to"
        else:
            return None
        return (
            f"{self.path} {what} while its weights are in use; start again with the file as it is now, and replace"
            " it by renaming another over it"
        )


def watch(path: Path) -> InUse:
    """Return what notices changes of a file from now on."""
    with open_regular(path) as file:
        return InUse(path, file)
