"""The content of a checkpoint as one key: its files' names and SHA-256, and the code that would convert them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import sinew
from sinew.bundle.digests import BLOCK, DigestCache
from sinew.bundle.digests import sha256 as digest
from sinew.convert import readers
from sinew.core import SinewError, machine, progress

# Files that trainers write beside the weights to resume the training. No conversion reads them.
TRAINING = "optimizer* scheduler* rng_state* training_args.bin training_state global_step* events.out* wandb *.md *.log"
# Every layout that can be converted has one of these; openpi's layout has the last two.
CHECKPOINT = ("config.json", "params", "assets")
WEIGHTS = (".safetensors", ".pt", ".gguf")  # endings of files of weights; orbax has a folder params/ instead
MAX_FILES = 10_000
LONG = 1 << 28  # bytes of a file from which a progress bar is shown
CODE = (
    "convert",
    "bundle",
    "models",
)  # packages that, with a family's reader, decide the content of a bundle
HERE = Path(
    __file__
).parent  # this package decides which files are converted, but not the content of the bundle


class NoCheckpointError(SinewError):
    """A folder is not a checkpoint."""


@dataclass(frozen=True)
class FileIdentity:
    """One file of a checkpoint: its name in the folder (or its whole path), bytes, and SHA-256."""

    name: str
    bytes: int
    sha256: str


def files_of(folder: Path) -> list[Path]:
    """Return the regular files of a folder that a conversion may read, sorted by name.

    Raises :class:`NoCheckpointError` for a folder without such files, and for a folder of more files than a checkpoint
    has.
    """
    if not any((folder / name).exists() for name in CHECKPOINT):
        raise NoCheckpointError(f"a folder with none of {', '.join(CHECKPOINT)}")
    files = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        here = Path(parent)
        folders[:] = sorted(name for name in folders if _counts(here / name))
        files += [here / name for name in sorted(names) if _counts(here / name) and (here / name).is_file()]
        if len(files) > MAX_FILES:
            raise NoCheckpointError(f"a folder of more than {MAX_FILES} files")
    if not files:
        raise NoCheckpointError("a folder without files")
    parts = [path.relative_to(folder).parts for path in files]
    if not any(path.suffix in WEIGHTS or "params" in names for path, names in zip(files, parts, strict=True)):
        raise NoCheckpointError("a folder without weights")
    return files


def _counts(path: Path) -> bool:
    return not path.name.startswith(".") and not any(path.match(pattern) for pattern in TRAINING.split())


def digests(paths: list[Path], root: Path) -> list[FileIdentity]:
    """Return the name, size and SHA-256 of files. The names of files in ``root`` are relative to it."""
    memo = DigestCache(root, machine.cache_folder("digests"), sha256)
    identities = [FileIdentity(_name(path, root), path.stat().st_size, memo.digest(path)) for path in paths]
    memo.keep()
    return identities


def key(files: list[FileIdentity], name: str) -> str:
    """Return 32 hexadecimal digits that change with every file, with the policy's name, and with the converter."""
    record = {"files": [[f.name, f.bytes, f.sha256] for f in files], "name": name, "code": converter()}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


@cache
def converter() -> str:
    """Return the version of Sinew with a digest of the code that decides the content of a bundle."""
    digest = hashlib.sha256()
    home = Path(sinew.__file__).parent
    folders = {room: home / room for room in CODE} | readers()
    for name, folder in folders.items():
        for path in sorted(path for path in folder.rglob("*.py") if path.parent != HERE):
            code = path.read_bytes()  # own file: in an installed package
            digest.update(f"{name}/{path.relative_to(folder)}".encode() + code)
    return f"{sinew.__version__}+{digest.hexdigest()[:12]}"


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def sha256(path: Path, size: int) -> str:
    """Return the SHA-256 of a regular file of ``size`` bytes as hexadecimal digits. A large file has a progress bar."""
    if size < LONG:  # a small file is read too fast for a progress bar
        return digest(path, size)
    with progress.task(f"reading {path.name}", -(-size // BLOCK)) as advance:
        return digest(path, size, advance)
