"""``sinew convert``: an upstream checkpoint, or a bundle of an older format, becomes one bundle file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from sinew.cli import terminal
from sinew.cli.options import Flag, Texts, json_object, motion_of
from sinew.core import progress


def convert(
    source: str,
    out: Path,
    /,
    *,
    vlm: Path | None = None,
    base: Path | None = None,
    merge: bool = True,
    tokenizer: Path | None = None,
    action_tokenizer: Path | None = None,
    arch: Path | None = None,
    stats: Path | None = None,
    dataset: Path | None = None,
    compat: Literal["lerobot-0.4", "lerobot-0.6", "openpi"] = "lerobot-0.6",
    cameras: str = "",
    rename: Texts = (),
    openpi_config: str = "",
    embodiment: str = "",
    stats_key: str = "",
    settings: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
    control_hz: float | None = None,
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
        vlm: directory of the vision-language model that the checkpoint names: its config.json, tokenizer, processor.
        base: directory of the base model, for checkpoints that hold only what was trained on top of it: a LoRA
            adapter of LeRobot's SmolVLA, pi0, pi0.5 or pi0-FAST, which is merged; some of GR00T's.
        merge: --no-merge writes the adapter alone, a few MB for `sinew serve BASE --adapter NAME=FILE`.
        tokenizer: a tokenizer.json or a directory that has one, instead of the checkpoint's own.
        action_tokenizer: directory of FAST's tokenizer, for policies that say actions in its tokens.
        arch: JSON file with the widths behind a named variant, instead of the language model's config.
        stats: a data set's meta/stats.json, for checkpoints without statistics.
        dataset: directory or hub name of the LeRobot data set: names of joints, actions per second, and statistics
            where the checkpoint has none.
        compat: whose behaviour to follow where upstream versions disagree.
        cameras: names separated by commas, for files that do not say how many a policy takes, as vla.cpp's; notes of a
            conversion say where they were assumed.
        rename: NEW=CAMERA, repeatable: the checkpoint's CAMERA is called NEW by your robot, as front=camera1.
        openpi_config: name of openpi's training config, for its checkpoints (e.g. pi05_droid), or a file with one of
            your own (docs/tutorial-openpi.md).
        embodiment: tag of the robot, for checkpoints of several.
        stats_key: which of several sets of statistics (arm/dataset where there are two levels).
        settings: NAME=VALUE for a choice that the files leave open, such as solver_steps=5; may be given several times.
        control_hz: actions per second at which the chunk is meant to be executed; upstream files do not say it.
        vectors: JSON object, names and units of the numbers of state and action, in their order, where the checkpoint
            does not have them: {"action": {"names": ["pan", "lift"], "units": ["deg", "deg"]}}.
        motion: what actions are measured from: absolute (they are targets), or a JSON object (docs/control.md). Robots
            then take the hand-over that fits by themselves; upstream files do not say it.
        name: the policy's name; the checkpoint directory's if absent.
        force: overwrite an existing file.
    """
    from sinew.bundle.rename import parse_renames, rename_cameras
    from sinew.bundle.seen import renamed
    from sinew.convert import ConvertOptions, is_bundle, read, upgrade
    from sinew.convert.options import parse_motion, parse_settings, parse_vectors
    from sinew.core import ConvertError

    if out.exists() and not force:
        raise ConvertError(f"{out} exists; --force overwrites it")
    names = tuple(name.strip() for name in cameras.split(",") if name.strip())
    start = time.perf_counter()
    options = ConvertOptions(
        vlm=vlm,
        base=base,
        tokenizer=tokenizer,
        action_tokenizer=action_tokenizer,
        arch=arch,
        stats=stats,
        dataset=dataset,
        compat=compat,
        cameras=names,
        openpi_config=openpi_config,
        embodiment=embodiment,
        stats_key=stats_key,
        control_hz=control_hz,
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
