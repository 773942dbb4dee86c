"""``sinew hub cache``: the checkpoints that verbs have converted on first use."""

from __future__ import annotations

import shutil
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from sinew.cli import terminal
from sinew.cli.options import Flag
from sinew.convert.sources import cache
from sinew.core import SinewError

KEY = 12  # digits of a key that are shown; any unambiguous beginning is understood


def list_entries() -> int:
    """List the checkpoints that were converted on first use, with their keys and sizes."""
    found = cache.entries()
    good = [entry for entry in found if isinstance(entry, cache.CacheEntry)]
    bad = [str(entry) for entry in found if not isinstance(entry, cache.CacheEntry)]
    console = terminal.console(markup=False)
    if found:
        table = terminal.plain("key", "policy", "architecture", ">size", "converted", "source")
        for entry in good:
            said, size = entry.record, f"{entry.nbytes / 1e6:.1f} MB"
            table.add_row(entry.key[:KEY], said.name, said.architecture, size, said.made, said.source)
        for path in bad:
            table.add_row("damaged", path)
        console.print(table)
    console.print(f"{len(found)} in {cache.folder()}")
    terminal.emit({"folder": str(cache.folder()), "entries": [_row(entry) for entry in good], "damaged": bad})
    return 0


def show(entry: str, /, *, verify: Flag = False) -> int:
    """Print the cache entry of a converted checkpoint. The exit status is 1 if it is damaged.

    Args:
        entry: Cache key or policy name, or the beginning of either.
        verify: Read the whole bundle and compare every tensor with its hash.
    """
    found = cache.find(entry)
    damage, stale = found.damage(whole=verify), found.stale()
    compared = "every tensor" if verify else "size and header"
    console, said = terminal.console(markup=False), found.record
    for name, text in (
        ("policy", f"{said.name} ({said.architecture})"),
        ("bundle", f"{found.bundle}, {said.bytes / 1e6:.1f} MB"),
        ("source", said.source),
        ("made", f"{said.made} by sinew {said.converter} in {said.seconds:.1f} s"),
        *(
            ("file", f"{file.name}, {file.bytes} bytes, {file.sha256[:16]}")
            for file in [*said.files, *said.outside]
        ),
        *(("note", note) for note in said.notes),
        ("state", damage or stale or f"as it was written ({compared} compared)"),
    ):
        console.print(f"{name:8} {text}")
    terminal.emit({**_row(found), "record": msgspec.to_builtins(said), "damage": damage, "stale": stale})
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
        raise SinewError("expected the entries to remove, or --all")
    chosen = [cache.find(name).home for name in names]
    if everything and cache.folder().is_dir():
        chosen = [path for path in cache.folder().iterdir() if path.is_dir()]
    console = terminal.console(markup=False)
    for home in dict.fromkeys(chosen):
        shutil.rmtree(home)
        console.print(f"removed {home}")
    terminal.emit({"removed": [str(home) for home in dict.fromkeys(chosen)]})
    return 0


def _row(entry: cache.CacheEntry) -> dict[str, Any]:
    said = entry.record
    return {
        "key": entry.key,
        "name": said.name,
        "architecture": said.architecture,
        "bytes": entry.nbytes,
        "made": said.made,
        "source": said.source,
        "bundle": str(entry.bundle),
    }
