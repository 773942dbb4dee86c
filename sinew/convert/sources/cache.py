"""A cache of checkpoints that were converted on first use. Each entry is a folder
``$XDG_CACHE_HOME/sinew/bundles/<key>/`` with a bundle and a record of the conversion.

The key depends on the content of the source (``identity.py``), so a changed checkpoint is converted again. An entry
appears only when it is complete, by renaming a folder. If two processes convert the same source, the second process
waits for the first.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from sinew_client.untrusted import open_lock, read_json

from sinew.bundle import Bundle
from sinew.convert import ConvertOptions, read
from sinew.convert.lerobot.folder import name_of
from sinew.convert.sources.identity import FileIdentity, NoCheckpointError, converter, digests, files_of, key
from sinew.core import BundleError, SinewError, machine, progress, scratch

__all__ = ["CacheEntry", "NoCheckpointError", "converted", "entries", "find", "folder"]

RECORD = "source.json"
MAX_RECORD = 1 << 24  # largest record, in bytes


class CacheRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The record of a conversion, which is stored next to the bundle.

    Attributes:
        source: The checkpoint's folder, or the source as the user typed it.
        name: The policy's name.
        architecture: The policy's architecture.
        bundle: The name of the bundle's file.
        bytes: Size of the bundle.
        mtime_ns: Modification time of the bundle.
        made: Date and time of the conversion.
        seconds: Duration of the conversion.
        converter: Version of Sinew and digest of its conversion code.
        files: The checkpoint's files.
        outside: Files outside of the checkpoint's folder that the conversion read.
        notes: Notes of the conversion.
    """

    source: str
    name: str
    architecture: str
    bundle: str
    bytes: int
    mtime_ns: int
    made: str
    seconds: float
    converter: str
    files: list[FileIdentity]
    outside: list[FileIdentity]
    notes: list[str]


class CacheEntry:
    """A folder of the cache with one converted checkpoint: its bundle, and the record of the conversion.

    Raises:
        SinewError: The record of the entry cannot be read.
    """

    def __init__(self, home: Path):
        self.home, self.key = home, home.name
        try:
            self.record = msgspec.convert(read_json(home / RECORD, MAX_RECORD), CacheRecord)
        # msgspec's errors are ValueErrors.
        except (OSError, ValueError, OverflowError) as error:
            raise SinewError(
                f"{home / RECORD}: expected the record of a conversion, got {error!s:.300}; remove this folder"
            ) from None
        for field, text in (
            ("bundle", self.record.bundle),
            *(("outside", each.name) for each in self.record.outside),
        ):
            if "\0" in text:
                raise SinewError(
                    f"{home / RECORD}: {field}: expected the name of a file, got {text!r:.80}; remove this folder"
                )
        if Path(self.record.bundle).name != self.record.bundle:
            raise SinewError(
                f"{home / RECORD}: bundle: expected the name of a file, got a path; remove this folder"
            )

    @property
    def bundle(self) -> Path:
        return self.home / self.record.bundle

    @property
    def nbytes(self) -> int:
        """Return the size of all files of the entry: the bundle, and graphs that engines stored next to the bundle."""
        return sum(path.stat().st_size for path in self.home.rglob("*") if path.is_file())

    def damage(self, whole: bool = False) -> str | None:
        """Return a text that states how the bundle was changed after the conversion wrote it; None if it was not
        changed.

        Args:
            whole: Compare every tensor. If False, only the size, the time and the header's hash are compared, and every
                tensor only if the time differs.
        """
        try:
            status = self.bundle.stat()
            if status.st_size != self.record.bytes:
                return f"{self.record.bundle} has {status.st_size} bytes, expected {self.record.bytes}"
            bundle = Bundle(self.bundle)
            if whole or status.st_mtime_ns != self.record.mtime_ns:
                with progress.task(f"comparing {self.bundle} with its hashes"):
                    changed = bundle.verify()
                if changed:
                    return f"{len(changed)} tensors are damaged, {changed[0]} first"
        except OSError as error:
            return f"{self.record.bundle}: {error.strerror}"
        except BundleError as error:
            return str(error)
        return None

    def stale(self) -> str | None:
        """Return a text that names a file outside of the source's folder that has changed since the conversion; None
        if there is none. A file that no longer exists does not count as changed."""
        # os.path.isfile returns False for a name that is too long for a file system. Path.is_file would raise.
        there = [file for file in self.record.outside if os.path.isfile(file.name)]  # noqa: PTH113
        try:
            now = digests([Path(file.name) for file in there], self.home)
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return next(
            (f"{old.name} has changed" for old, new in zip(there, now, strict=True) if old != new), None
        )


def folder() -> Path:
    return machine.cache_folder("bundles")


def entries() -> list[CacheEntry | SinewError]:
    """Return all entries, oldest first. For an entry that cannot be read, the list contains the error."""
    listed: list[CacheEntry | SinewError] = []
    if folder().is_dir():
        homes = [path for path in folder().iterdir() if path.is_dir() and not path.name.startswith(".")]
        for home in sorted(homes, key=lambda path: (path.stat().st_mtime_ns, path.name)):
            try:
                listed.append(CacheEntry(home))
            except SinewError as error:
                listed.append(error)
    return listed


def find(text: str) -> CacheEntry:
    """Return one entry of the cache by its key or by the name of its policy.

    Args:
        text: A key or the beginning of a key, or the name of a policy. If neither matches, the beginning of a name.

    Raises:
        SinewError: No entry matches, or several entries match.
    """
    readable = [entry for entry in entries() if isinstance(entry, CacheEntry)]
    matches = [entry for entry in readable if entry.key == text] or [
        entry for entry in readable if entry.record.name == text or (text and entry.key.startswith(text))
    ]
    matches = matches or [entry for entry in readable if text and entry.record.name.startswith(text)]
    if len(matches) != 1:
        which = ", ".join(entry.key[:12] for entry in matches) or "no entry"
        raise SinewError(
            f"{text}: expected the name or the key of one entry of {folder()}, got {which}; list them with"
            " `sinew hub cache list`"
        )
    return matches[0]


def converted(checkpoint: Path, source: str, name: str = "") -> Path:
    """Return the bundle of a checkpoint folder. The checkpoint is converted if the cache has no bundle of it.

    Args:
        checkpoint: The checkpoint's folder.
        source: The checkpoint as the user typed it, for messages.
        name: The policy's name; "" takes the name in the checkpoint.

    Raises:
        NoCheckpointError: The folder is not a checkpoint.
        ConvertError: The checkpoint cannot be converted.
        SinewError: The cache cannot be written.
    """
    files = digests(files_of(checkpoint), checkpoint)
    home = folder() / key(files, name or name_of(checkpoint))
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with _locked(home):
            reason = _unfit(home)
            if reason is None:
                entry = CacheEntry(home)
                progress.say(f"{source}: converted {entry.record.made}, {entry.bundle}")
                return entry.bundle
            progress.say(f"converting {source}: {reason}")
            return _convert(checkpoint, source, name, files, home)
    except OSError as error:
        raise SinewError(
            f"{error.filename or home}: expected to write a converted checkpoint there, got"
            f" {error.strerror or error}; set XDG_CACHE_HOME to another folder"
        ) from None


def _unfit(home: Path) -> str | None:
    """Return the reason why an entry of the cache cannot be used; None if it can be used."""
    if not home.exists():
        return f"the cache {home.parent} has no bundle of these files"
    try:
        entry = CacheEntry(home)
    except SinewError as error:
        return f"damaged entry: {error}"
    if damage := entry.damage():
        return f"damaged entry {home}: {damage}"
    return entry.stale()


def _convert(checkpoint: Path, source_text: str, name: str, files: list[FileIdentity], home: Path) -> Path:
    # A leftover folder is from a killed process, because no other process can have the lock now.
    for leftover in home.parent.glob(f".{home.name}.*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
    started = time.perf_counter()
    options = ConvertOptions()
    with progress.task(f"reading {source_text}"):
        conversion = read(checkpoint, options)
    name = name or conversion.spec.name
    with scratch.beside(home) as partial:
        bundle = partial / f"{re.sub(r'[^A-Za-z0-9._-]', '-', name).lstrip('.-')[:80] or 'policy'}.gguf"
        with _percent(f"converting {source_text}", conversion.nbytes) as written:
            conversion.write(bundle, name, options, written)
        inside = {(checkpoint / file.name).resolve() for file in files}
        outside = sorted({path.resolve() for path in conversion.sources} - inside)
        again = digests([checkpoint / file.name for file in files], checkpoint)
        if again != files:
            raise SinewError(f"{source_text}: its files changed during the conversion; run the command again")
        status = bundle.stat()
        record = CacheRecord(
            source=str(checkpoint.resolve()) if Path(source_text).exists() else source_text,
            name=name,
            architecture=conversion.spec.architecture,
            bundle=bundle.name,
            bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            made=datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 - Python 3.10
            seconds=round(time.perf_counter() - started, 3),
            converter=converter(),
            files=files,
            outside=digests(outside, partial),
            notes=list(conversion.notes),
        )
        (partial / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        if home.exists():
            # The entry is damaged or old. A process that has this bundle open keeps its memory map.
            shutil.rmtree(home)
        partial.rename(home)
    for note in conversion.notes:
        progress.say(f"note: {note}")
    progress.say(f"wrote {home / bundle.name}: {status.st_size / 1e6:.1f} MB, {record.seconds:.1f} s")
    return home / bundle.name


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Lock an entry of the cache inside the ``with`` block. The lock's file is empty, and is not removed.

    On a system without ``fcntl``, two processes may convert the same checkpoint. The later entry then replaces the
    earlier one.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open_lock(home.with_name(f".{home.name}.lock")) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"another process is converting the same checkpoint; waiting for {home}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _percent(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show in percent how many of ``total`` bytes are written.

    The ``with`` block receives a function, and calls it with the number of bytes that it has just written.
    """
    done = 0
    with progress.task(text, 100) as advance:

        def written(count: int) -> None:
            nonlocal done
            before, done = done, done + count
            for _ in range(100 * done // max(total, 1) - 100 * before // max(total, 1)):
                advance("")

        yield written
