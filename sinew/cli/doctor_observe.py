"""``sinew doctor POLICY --observe ROBOT`` and ``--learn RECORDS``: is a robot wired as in the training data?"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sinew.cli import terminal
from sinew.core import SinewError, progress

if TYPE_CHECKING:
    from sinew.bundle.schema import Manifest
    from sinew.checks.wiring import Finding
    from sinew.cli.run_robot import RobotFlags

MARKS = {
    "wrong": "[bold red]wrong[/]",
    "looks wrong": "[red]looks wrong[/]",
    "cannot tell": "[yellow]cannot tell[/]",
    "more than needed": "more than needed",
}


def observe(policy: Path, on: RobotFlags, seconds: float) -> int:
    """Look at a robot, or at a folder of records, and print what looks wrong. Exit status 1 if something does."""
    from sinew.checks.wiring import observe as looking
    from sinew.policy import open_bundle

    manifest, robot = open_bundle(policy).manifest, on.robot
    if records(robot):
        if on.robot_options is not None or on.rename or on.rename_joint or on.kinematics is not None:
            raise SinewError(
                "--robot-options, --rename, --rename-joint, --kinematics: expected none with records, which are as they"
                " are"
            )
        with progress.task(f"reading {robot}"):
            looks, found = looking.recorded(Path(robot), manifest)
        what = f"{looks} records of {robot}"
    else:
        looks, found = _live(on, manifest, seconds)
        what = f"{robot}: {looks} looks in {seconds:g} s; it was not commanded"
    wrong = sum(each.amiss for each in found)
    untold = sum(each.level == "cannot tell" for each in found)
    console = terminal.console(markup=False)
    if found:
        rows = ((MARKS[each.level], each.subject, each.told, each.advice) for each in found)
        terminal.console().print(terminal.findings(rows))
    compared = manifest.seen.source if manifest.seen else "the statistics of its normalisation alone"
    console.print(f"{what}; {manifest.spec.name} was trained with: {compared}")
    console.print(f"{wrong} wrong, {untold} that nothing here can tell")
    checks = [asdict(each.check()) | asdict(each) for each in found]
    terminal.emit({"ok": not wrong, "observed": robot, "looks": looks, "checks": checks})
    return 1 if wrong else 0


def records(robot: str) -> bool:
    """Return whether what is to be looked at is a folder of records, and no robot."""
    return Path(robot).is_dir()


def _live(on: RobotFlags, manifest: Manifest, seconds: float) -> tuple[int, list[Finding]]:
    from sinew.checks.wiring import observe as looking

    opener = on.opener()
    with (
        looking.closing(opener(manifest.spec.to_dict())) as machine,
        progress.task(f"looking at {on.robot}"),
    ):
        return looking.live(machine, manifest, seconds)


def learn(policy: Path, folder: Path, out: Path) -> int:
    """Write the policy's bundle once more, with what the records of the right robot show of its cameras and joints."""
    from sinew.bundle.writer import rewrite
    from sinew.checks.wiring.observe import learnt
    from sinew.convert.sources import resolve
    from sinew.policy import open_bundle

    source = resolve(policy)
    if source.is_dir() or out.resolve() == source.resolve():
        raise SinewError(
            f"--out {out}: expected another file than the bundle that is read, and a bundle, no folder"
        )
    bundle = open_bundle(source)
    with progress.task(f"reading {folder}"):
        seen = learnt(folder, bundle.manifest)
    rewrite(bundle, replace(bundle.manifest, seen=seen), out)
    terminal.console(markup=False).print(f"{out}: {seen.source}, cameras {', '.join(seen.cameras)}")
    terminal.emit({"ok": True, "out": str(out), "frames": seen.frames, "cameras": list(seen.cameras)})
    return 0
