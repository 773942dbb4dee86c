"""``sinew convert``: convert a checkpoint, or a bundle in an older format, to one bundle file."""

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
    """Convert a checkpoint into one bundle file.

    The weights are streamed, so the checkpoint may be larger than the memory. A bundle in an older format gets a
    header in the present format, and every tensor stays as it is, byte for byte. Sinew also reads older formats
    directly. Rewrite a bundle if you keep it, or if other programs read it.

    Args:
        source: Checkpoint folder or training run of LeRobot, openpi checkpoint, hub name (ORG/NAME, needs the
            hub extra), vla.cpp GGUF file, or a bundle in an older format.
        out: Bundle to write. With --force it may be the old bundle itself.
        merge: Merge a LoRA adapter into its base. --no-merge writes the adapter alone, a few MB, for `sinew
            serve BASE --adapter NAME=FILE`.
        cameras: Camera names, separated by commas, for files that do not state the number of cameras, such as
            vla.cpp's. The conversion's notes name the cameras that it assumed.
        rename: Camera names of your robot, as NEW=CAMERA, for example front=camera1. Repeatable.
        settings: Setting that the files leave open, as NAME=VALUE, for example solver_steps=5. Repeatable.
        vectors: Names and units of the state and action values in their order, as a JSON object, if the
            checkpoint lacks them: {"action": {"names": ["pan", "lift"], "units": ["deg", "deg"]}}.
        motion: Reference of the actions: absolute (they are targets), or a JSON object that describes delta
            actions. Robots then choose the right chunk merging. Upstream files do not state this.
        name: Name of the policy. Default: the name of the checkpoint folder.
        force: Overwrite an existing file.
    """
    from sinew.bundle.rename import parse_renames, rename_cameras, renamed

    if out.exists() and not force:
        raise ConvertError(f"{out} exists; pass --force to overwrite it, or choose another name")
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
            bundle, notes = upgrade(Path(source), out, options, rename=renames, name=name, no_merge=not merge)
        return _ended(out, bundle.manifest.architecture, notes, start)
    with progress.task(f"reading {source}"):
        conversion = read(source, options)
    if renames:
        renaming = (f"camera {new} is the checkpoint's {old}" for new, old in renames.items())
        spec = rename_cameras(conversion.spec, renames)
        seen = renamed(conversion.seen, conversion.spec, spec)
        conversion = replace(conversion, spec=spec, seen=seen, notes=(*conversion.notes, *renaming))
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
