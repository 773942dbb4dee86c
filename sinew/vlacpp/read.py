"""Read vla.cpp's GGUF files. Each architecture has a reader in this package.

The files contain weights and most hyper-parameters, but no tokenizer, no camera names and no prompt, because vla.cpp's
client has them. The user passes these facts, or the family provides them. The notes of the bundle state what was
assumed.
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
# The options of all readers. An option that the file's own reader does not support is rejected when the file is open.
OPTIONS = tuple(dict.fromkeys(option for part in PARTS for option in part.OPTIONS))
SETTINGS = {name: setting for part in PARTS for name, setting in part.SETTINGS.items()}


def recognises(path: Path) -> bool:
    """Return True if the path is a file. Every file is treated as GGUF, because all other checkpoint formats are
    folders."""
    return not path.is_dir()


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read all of a vla.cpp file except the weights.

    Raises:
        ConvertError: The file is not supported, or an option is missing.
    """
    file = VlacppFile(path)
    for part in PARTS:
        if file.architecture in part.ARCHITECTURES:
            return part.read(file, options.for_family(part, path))
    supported = ", ".join(name for part in PARTS for name in part.ARCHITECTURES)
    raise ConvertError(
        f"{path}: vla.cpp architecture {file.architecture!r} is not supported (only {supported}); convert the original"
        " checkpoint instead"
    )
