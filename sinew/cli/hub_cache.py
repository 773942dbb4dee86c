"""``sinew hub cache``: list, show and remove the checkpoints that commands have converted on first use."""

from __future__ import annotations

import shutil
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from sinew.cli import terminal
from sinew.cli.options import Flag
from sinew.convert.sources import cache
from sinew.core import SinewError

KEY = 12  # this many digits of a key are printed; commands accept any unambiguous beginning of a key


def list_entries() -> int:
    """List the checkpoints that were converted on first use, with their keys and sizes."""
    entries = cache.entries()
    good = [entry for entry in entries if isinstance(entry, cache.CacheEntry)]
    bad = [str(entry) for entry in entries if not isinstance(entry, cache.CacheEntry)]
    console = terminal.console(markup=False)
    if entries:
        table = terminal.plain("key", "policy", "architecture", ">size", "converted", "source")
        for entry in good:
            record, size = entry.record, f"{entry.nbytes / 1e6:.1f} MB"
            table.add_row(entry.key[:KEY], record.name, record.architecture, size, record.made, record.source)
        for path in bad:
            table.add_row("damaged", path)
        console.print(table)
    console.print(f"{len(entries)} converted checkpoints in {cache.folder()}")
    terminal.emit({"folder": str(cache.folder()), "entries": [_row(entry) for entry in good], "damaged": bad})
    return 0


def show(entry: str, /, *, verify: Flag = False) -> int:
    """Print the cache entry of a converted checkpoint. The exit status is 1 if it is damaged.

    Args:
        entry: Cache key or policy name, or the beginning of either.
        verify: Read the whole bundle and compare every tensor with its hash.
    """
    cached = cache.find(entry)
    damage, stale = cached.damage(whole=verify), cached.stale()
    compared = "every tensor" if verify else "size and header"
    console, record = terminal.console(markup=False), cached.record
    for name, text in (
        ("policy", f"{record.name} ({record.architecture})"),
        ("bundle", f"{cached.bundle}, {record.bytes / 1e6:.1f} MB"),
        ("source", record.source),
        ("made", f"{record.made} by sinew {record.converter} in {record.seconds:.1f} s"),
        *(
            ("file", f"{file.name}, {file.bytes} bytes, {file.sha256[:16]}")
            for file in [*record.files, *record.outside]
        ),
        *(("note", note) for note in record.notes),
        ("state", damage or stale or f"unchanged ({compared} compared)"),
    ):
        console.print(f"{name:8} {text}")
    terminal.emit({**_row(cached), "record": msgspec.to_builtins(record), "damage": damage, "stale": stale})
    return 1 if damage else 0


def remove(
    *names: Annotated[str, Parameter(name="ENTRY")],
    everything: Annotated[bool, Parameter(name="--all", negative="")] = False,
) -> int:
    """Remove converted checkpoints and their exported graphs. The source checkpoints stay.

    Args:
        names: Cache keys or policy names, or unique beginnings of them.
        everything: Remove all entries, including damaged ones and the remains of interrupted conversions.
    """
    if bool(names) == everything:
        raise SinewError("pass the entries to remove, or --all; `sinew hub cache list` shows them")
    homes = [cache.find(name).home for name in names]
    if everything and cache.folder().is_dir():
        homes = [path for path in cache.folder().iterdir() if path.is_dir()]
    console = terminal.console(markup=False)
    for home in dict.fromkeys(homes):
        shutil.rmtree(home)
        console.print(f"removed {home}")
    terminal.emit({"removed": [str(home) for home in dict.fromkeys(homes)]})
    return 0


def _row(entry: cache.CacheEntry) -> dict[str, Any]:
    record = entry.record
    return {
        "key": entry.key,
        "name": record.name,
        "architecture": record.architecture,
        "bytes": entry.nbytes,
        "made": record.made,
        "source": record.source,
        "bundle": str(entry.bundle),
    }
