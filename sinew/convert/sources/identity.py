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

# What trainers leave beside the weights to go on with; no conversion reads it.
TRAINING = "optimizer* scheduler* rng_state* training_args.bin training_state global_step* events.out* wandb *.md *.log"
# Every layout that converts has one of these; openpi's the last two
CHECKPOINT = ("config.json", "params", "assets")
WEIGHTS = (".safetensors", ".pt", ".gguf")  # and orbax's folder params/
MAX_FILES = 10_000
LONG = 1 << 28
CODE = ("convert", "bundle", "models")  # rooms that decide what a conversion writes, beside its reader
HERE = Path(__file__).parent  # and which files it is given, but not what it writes


class NoCheckpointError(SinewError):
    """A folder that holds no file of a checkpoint."""


@dataclass(frozen=True)
class FileIdentity:
    """One file of a checkpoint: its name in the folder (or its whole path), bytes, and SHA-256."""

    name: str
    bytes: int
    sha256: str


def files_of(folder: Path) -> list[Path]:
    """Return the regular files of a folder that a conversion may read, sorted by name.

    Raises :class:`NoCheckpointError` for a folder without any, and for one of too many to be a checkpoint.
    """
    if not any((folder / name).exists() for name in CHECKPOINT):
        raise NoCheckpointError(f"a folder with none of {', '.join(CHECKPOINT)}")
    found = []
    for parent, folders, names in os.walk(folder, followlinks=False):
        here = Path(parent)
        folders[:] = sorted(name for name in folders if _counts(here / name))
        found += [here / name for name in sorted(names) if _counts(here / name) and (here / name).is_file()]
        if len(found) > MAX_FILES:
            raise NoCheckpointError(f"a folder of more than {MAX_FILES} files")
    if not found:
        raise NoCheckpointError("a folder without files")
    parts = [path.relative_to(folder).parts for path in found]
    if not any(path.suffix in WEIGHTS or "params" in names for path, names in zip(found, parts, strict=True)):
        raise NoCheckpointError("a folder without weights")
    return found


def _counts(path: Path) -> bool:
    return not path.name.startswith(".") and not any(path.match(pattern) for pattern in TRAINING.split())


def digests(paths: list[Path], root: Path) -> list[FileIdentity]:
    """Return name, size and SHA-256 of files. Names are relative to ``root`` if the files are in it."""
    memo = DigestCache(root, machine.cache_folder("digests"), sha256)
    found = [FileIdentity(_name(path, root), path.stat().st_size, memo.digest(path)) for path in paths]
    memo.keep()
    return found


def key(files: list[FileIdentity], name: str) -> str:
    """Return 32 hexadecimal digits that change with any file, with the policy's name, and with the converter."""
    record = {"files": [[f.name, f.bytes, f.sha256] for f in files], "name": name, "code": converter()}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


@cache
def converter() -> str:
    """Return the version of Sinew with a digest of the code that decides what is written."""
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
    """Return the SHA-256 of a regular file of ``size`` bytes in hexadecimal digits; a big one is a task of blocks."""
    if size < LONG:  # A smaller file is read too fast for a progress bar.
        return digest(path, size)
    with progress.task(f"reading {path.name}", -(-size // BLOCK)) as advance:
        return digest(path, size, advance)
