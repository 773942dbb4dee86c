"""``sinew doctor POLICY --observe ROBOT`` and ``--learn RECORDS``: compare a robot's wiring with the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sinew_client.control.facts import facts_of

from sinew.cli import terminal
from sinew.core import ObservationError, SinewError, progress

if TYPE_CHECKING:
    from rich.table import Table

    from sinew.bundle.schema import Manifest
    from sinew.checks.effects import Effects
    from sinew.checks.wiring import Finding
    from sinew.cli.options import Runs
    from sinew.cli.run_robot import RobotFlags
    from sinew.core import Observation

OBSERVATIONS = 3  # The effects of the inputs are measured on this many recorded observations.
PROMPT = "pick up the object"  # used if neither the robot nor the policy has an instruction
MARKS = {
    "wrong": "[bold red]wrong[/]",
    "looks wrong": "[red]looks wrong[/]",
    "cannot tell": "[yellow]cannot tell[/]",
    "more than needed": "more than needed",
}


def observe(policy: Path, on: RobotFlags, seconds: float, runs: Runs | None) -> int:
    """Observe a robot, or read a folder of records, and print what looks wrong. Return 1 if there is a problem.

    Args:
        policy: The policy's bundle.
        on: The robot.
        seconds: Duration of the observation.
        runs: Options to load the policy, which measures the effects of its inputs; None measures no effects.
    """
    from sinew.checks.wiring import observe as looking
    from sinew.policy import open_bundle
    from sinew.records.recorder import read_records

    manifest, robot = open_bundle(policy).manifest, on.robot
    if records(robot):
        if on.robot_options is not None or on.rename or on.rename_joint or on.kinematics is not None:
            raise SinewError(
                "--robot-options, --rename, rename_joint, kinematics: expected a robot, got a folder of records;"
                " omit these options"
            )
        with progress.task(f"reading {robot}"):
            looks, findings = looking.recorded(Path(robot), manifest)
            seen = list(islice((each.observation for each in read_records(Path(robot))), OBSERVATIONS))
        what = f"{looks} records of {robot}"
    else:
        looks, findings, seen = _live(on, manifest, seconds)
        what = f"{robot}: {looks} observations in {seconds:g} s; it was not commanded"
    wrong = sum(each.amiss for each in findings)
    undecided = sum(each.level == "cannot tell" for each in findings)
    console = terminal.console(markup=False)
    if findings:
        rows = ((MARKS[each.level], each.subject, each.told, each.advice) for each in findings)
        terminal.console().print(terminal.findings(rows))
    compared = manifest.seen.source if manifest.seen else "an unknown record; compared with its statistics"
    console.print(f"{what}; {manifest.spec.name} was trained with: {compared}")
    console.print(f"{wrong} wrong, {undecided} that cannot be decided")
    checks = [asdict(each.check()) | asdict(each) for each in findings]
    result = {"ok": not wrong, "observed": robot, "looks": looks, "checks": checks}
    if runs is not None:
        measured = _effects(policy, seen, runs)
        result["effects"] = None if measured is None else measured.to_dict()
    terminal.emit(result)
    return 1 if wrong else 0


def _effects(policy: Path, seen: Sequence[Observation], runs: Runs) -> Effects | None:
    """Measure and print the effects of the policy's inputs. Return None if the policy accepts no observation.

    Args:
        policy: The policy's bundle.
        seen: The observations.
        runs: Options to load the policy.
    """
    import sinew
    from sinew.checks.effects import measure

    console = terminal.console(markup=False)
    with sinew.load(policy, **runs.keywords()) as loaded:
        usable = []
        for each in seen:
            try:
                loaded.check(each)
                usable.append(each)
            except ObservationError as error:
                reason = str(error)
        if not usable:
            why = reason if seen else "the robot sent no observation"
            console.print(f"effects of the inputs: not measured, because {why}")
            return None
        with progress.task("measuring the effects of the inputs"):
            effects = measure(loaded, usable)
    terminal.console().print(effects_table(effects))
    console.print(effects.text())
    return effects


def effects_table(effects: Effects) -> Table:
    """Return a table with the effects of the inputs."""
    rows = [(each.input, each.change, f"{100 * each.share:.3g} %", each.verdict) for each in effects.effects]
    return terminal.table(
        "actions change by, in % of their spread", "input", "change", "actions", "verdict", rows=rows
    )


def records(robot: str) -> bool:
    """Return True if the text names a folder of records, and not a robot."""
    return Path(robot).is_dir()


def _live(on: RobotFlags, manifest: Manifest, seconds: float) -> tuple[int, list[Finding], list[Observation]]:
    from sinew.checks.wiring import observe as looking

    opener = on.opener()
    with (
        looking.closing(opener(manifest.spec.to_dict())) as machine,
        progress.task(f"looking at {on.robot}"),
    ):
        seen: list[Observation] = []
        looks, results = looking.live(machine, manifest, seconds, kept=seen)
        prompt = facts_of(machine).task() or manifest.spec.default_prompt or PROMPT
        return looks, results, [each if each.prompt else replace(each, prompt=prompt) for each in seen]


def learn(policy: Path, folder: Path, out: Path) -> int:
    """Write a copy of the policy's bundle with a record of the robot's cameras and joints.

    Args:
        policy: The policy's bundle.
        folder: Records of `sinew serve --record` from the correctly wired robot.
        out: The bundle to write.
    """
    from sinew.bundle.writer import rewrite
    from sinew.checks.wiring.observe import learnt
    from sinew.convert.sources import resolve
    from sinew.policy import open_bundle

    source = resolve(policy)
    if source.is_dir() or out.resolve() == source.resolve():
        raise SinewError(
            f"--out {out}: expected a new bundle file, and a bundle as the source, got the same file or a folder"
        )
    bundle = open_bundle(source)
    with progress.task(f"reading {folder}"):
        seen = learnt(folder, bundle.manifest)
    rewrite(bundle, replace(bundle.manifest, seen=seen), out)
    terminal.console(markup=False).print(f"{out}: {seen.source}, cameras {', '.join(seen.cameras)}")
    terminal.emit({"ok": True, "out": str(out), "frames": seen.frames, "cameras": list(seen.cameras)})
    return 0
