"""Compute a key that identifies a checkpoint's content and the code that converts it.

The key is a hash over the names and the SHA-256 of the checkpoint's files and of the code.
"""

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

# Files that trainers write next to the weights to resume the training. Conversion does not read them.
TRAINING = "optimizer* scheduler* rng_state* training_args.bin training_state global_step* events.out* wandb *.md *.log"
# Every layout of a checkpoint contains one of these names. openpi's layout contains the last two.
CHECKPOINT = ("config.json", "params", "assets")
# File names of weights end with one of these suffixes. Checkpoints of orbax have a folder params/ instead.
WEIGHTS = (".safetensors", ".pt", ".gguf")
MAX_FILES = 10_000
LONG = 1 << 28  # hashing a file with this many bytes or more shows a progress bar
# These packages, and the family's reader, decide the content of a bundle.
CODE = ("convert", "bundle", "models")
# The code in this folder only chooses which files are converted, so it is not part of the key.
HERE = Path(__file__).parent


class NoCheckpointError(SinewError):
    """Error for a folder that does not contain a checkpoint."""


@dataclass(frozen=True)
class FileIdentity:
    """One file of a checkpoint.

    Attributes:
        name: Its path relative to the checkpoint's folder, or its absolute path if it is outside of the folder.
        bytes: Its size.
        sha256: Its SHA-256 as hexadecimal digits.
    """

    name: str
    bytes: int
    sha256: str


def files_of(folder: Path) -> list[Path]:
    """Return the regular files of a folder that a conversion may read, sorted by name.

    Raises:
        NoCheckpointError: The folder has no such files, or more files than a checkpoint has.
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
    """Return the name, size and SHA-256 of files. The name of a file in ``root`` is relative to ``root``."""
    memo = DigestCache(root, machine.cache_folder("digests"), sha256)
    identities = [FileIdentity(_name(path, root), path.stat().st_size, memo.digest(path)) for path in paths]
    memo.keep()
    return identities


def key(files: list[FileIdentity], name: str) -> str:
    """Return 32 hexadecimal digits that change if a file, the policy's name or the converter's code changes."""
    record = {"files": [[f.name, f.bytes, f.sha256] for f in files], "name": name, "code": converter()}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


@cache
def converter() -> str:
    """Return the version of Sinew, with a digest of the code that determines the content of a converted bundle."""
    digest = hashlib.sha256()
    home = Path(sinew.__file__).parent
    folders = {package: home / package for package in CODE} | readers()
    for name, folder in folders.items():
        for path in sorted(path for path in folder.rglob("*.py") if path.parent != HERE):
            code = path.read_bytes()  # own file: in an installed package
            digest.update(f"{name}/{path.relative_to(folder)}".encode() + code)
    return f"{sinew.__version__}+{digest.hexdigest()[:12]}"


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def sha256(path: Path, size: int) -> str:
    """Return the SHA-256 of a regular file of ``size`` bytes as hexadecimal digits. Hashing a large file shows a
    progress bar."""
    if size < LONG:
        return digest(path, size)
    with progress.task(f"reading {path.name}", -(-size // BLOCK)) as advance:
        return digest(path, size, advance)
