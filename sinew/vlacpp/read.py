"""Importing vla.cpp's GGUF files: which of its architectures are read, and by whom.

They hold weights and most hyper-parameters, but no tokenizer, no camera names and no prompt rule (token ids are their
client's business); these are given or the family's, and what had to be assumed is in the notes of the bundle.
"""

from __future__ import annotations

from pathlib import Path

from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.core import ConvertError
from sinew.vlacpp import (
    read_bitvla,
    read_eagle,
    read_evo1,
    read_lerobot,
    read_prismatic,
    read_qwen,
)
from sinew.vlacpp.file import VlacppFile

NAMES = ("vla.cpp GGUF",)
PARTS = (read_lerobot, read_prismatic, read_qwen, read_eagle, read_evo1, read_bitvla)
# Of any file; what a file's own part does not read is refused once it is open.
OPTIONS = tuple(dict.fromkeys(option for part in PARTS for option in part.OPTIONS))
SETTINGS = {name: setting for part in PARTS for name, setting in part.SETTINGS.items()}


def recognises(path: Path) -> bool:
    """Return True for a file, which is then read as GGUF: every other layout is a directory."""
    return not path.is_dir()


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a GGUF file of vla.cpp, the weights aside. Raises :class:`ConvertError`."""
    file = VlacppFile(path)
    for part in PARTS:
        if file.architecture in part.ARCHITECTURES:
            return part.read(file, options.for_family(part, path))
    known = ", ".join(name for part in PARTS for name in part.ARCHITECTURES)
    raise ConvertError(f"{path}: vla.cpp architecture {file.architecture!r} is not supported (only {known})")
