"""``sinew convert``: an upstream checkpoint, or a bundle of an older format, becomes one bundle file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from sinew.cli import terminal
from sinew.cli.options import Flag, Texts, json_object, motion_of
from sinew.convert import ConvertOptions, is_bundle, read, upgrade
from sinew.convert.options import CheckpointFlags, parse_motion, parse_settings, parse_vectors
from sinew.core import ConvertError, progress

FACTS = CheckpointFlags()


def convert(
    source: str,
    out: Path,
    /,
    *,
    facts: Annotated[CheckpointFlags, Parameter(name="*")] = FACTS,
    merge: bool = True,
    cameras: str = "",
    rename: Texts = (),
    settings: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    motion: str | None = None,
    vectors: str | None = None,
    name: str | None = None,
    force: Flag = False,
) -> int:
    """Turn an upstream checkpoint into one bundle file, streaming the weights.

    A bundle of an older format is rewritten in the present one: the header anew, every tensor byte for byte. Verbs read
    older formats as they are; this is for files that other programs shall read, or that are kept.

    Args:
        source: checkpoint directory or training folder of LeRobot, openpi checkpoint, hub name (ORG/NAME, with the
            hub extra), a vla.cpp GGUF file, or a bundle of an older format.
        out: the bundle to write; with --force also the old bundle itself.
        merge: --no-merge writes the adapter alone, a few MB for `sinew serve BASE --adapter NAME=FILE`.
        cameras: names separated by commas, for files that do not say how many a policy takes, as vla.cpp's; notes of a
            conversion say where they were assumed.
        rename: NEW=CAMERA, repeatable: the checkpoint's CAMERA is called NEW by your robot, as front=camera1.
        settings: NAME=VALUE for a choice that the files leave open, such as solver_steps=5; may be given several times.
        vectors: JSON object, names and units of the numbers of state and action, in their order, where the checkpoint
            does not have them: {"action": {"names": ["pan", "lift"], "units": ["deg", "deg"]}}.
        motion: what actions are measured from: absolute (they are targets), or a JSON object (docs/control.md). Robots
            then take the hand-over that fits by themselves; upstream files do not say it.
        name: the policy's name; the checkpoint directory's if absent.
        force: overwrite an existing file.
    """
    from sinew.bundle.rename import parse_renames, rename_cameras, renamed

    if out.exists() and not force:
        raise ConvertError(f"{out} exists; --force overwrites it")
    names = tuple(name.strip() for name in cameras.split(",") if name.strip())
    start = time.perf_counter()
    options = ConvertOptions(
        **vars(facts),
        cameras=names,
        motion=parse_motion(motion_of(motion)),
        vectors=parse_vectors(json_object("--vectors", vectors)),
        settings=parse_settings(settings or []),
    )
    renames = parse_renames(rename)
    if is_bundle(Path(source)):
        with progress.task(f"rewriting {source}"):
            made, notes = upgrade(Path(source), out, options, rename=renames, name=name, no_merge=not merge)
        return _ended(out, made.manifest.architecture, notes, start)
    with progress.task(f"reading {source}"):
        conversion = read(source, options)
    if renames:
        said = (f"camera {new} is the checkpoint's {old}" for new, old in renames.items())
        spec = rename_cameras(conversion.spec, renames)
        seen = renamed(conversion.seen, conversion.spec, spec)
        conversion = replace(conversion, spec=spec, seen=seen, notes=(*conversion.notes, *said))
    columns = ("converting", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with terminal.bars(*columns) as bars:
        task = bars.add_task("", total=conversion.nbytes)
        conversion.write(out, name or conversion.spec.name, options, lambda n: bars.advance(task, n), merge)
    return _ended(out, conversion.spec.architecture, conversion.notes, start)


def _ended(out: Path, architecture: str, notes: tuple[str, ...], start: float) -> int:
    size, console = out.stat().st_size, terminal.console(markup=False)
    for note in notes:
        console.print(f"note: {note}")
    console.print(f"{out}: {architecture}, {size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s")
    terminal.emit({"out": str(out), "architecture": architecture, "bytes": size, "notes": list(notes)})
    return 0
