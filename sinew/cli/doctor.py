"""``sinew doctor``: check whether this installation can run a policy, and how well.

Every check prints why it passed, or the next step for the user. The exit status is 1 if a check failed. Warnings are
not failures.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from sinew.cli import terminal
from sinew.cli.options import RUNS, SETTING_FLAGS, Flag, Runs, Setting, SettingFlags, Texts
from sinew.core import SinewError, progress
from sinew.engine.backend import AUTO, BACKENDS

if TYPE_CHECKING:
    from sinew.checks import Check

SECONDS = 3.0  # --observe watches a robot this long by default
MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


def doctor(
    bundle: Path | None = None,
    /,
    *,
    verify: Flag = False,
    observe: str | None = None,
    robot_options: str | None = None,
    rename: Texts = (),
    rename_joint: Setting[Texts] = (),
    kinematics: Setting[Path | None] = None,
    kinematics_options: Setting[str | None] = None,
    seconds: Annotated[float | None, Parameter(validator=validators.Number(gt=0, lte=600))] = None,
    learn: Path | None = None,
    out: Path | None = None,
    effects: bool = True,
    delays: Flag = False,
    limits: Path | None = None,
    motion: str | None = None,
    runs: Runs = RUNS,
    _settings: SettingFlags = SETTING_FLAGS,
) -> int:
    """Check the installation and this machine.

    `sinew doctor --settings` lists the settings of --observe that have no flag.

    Args:
        bundle: Policy to load and run once: a bundle, a folder of `sinew export`, a checkpoint or a hub name.
        verify: Read the whole bundle and compare every tensor with its stored hash.
        observe: Robot to watch, as for `sinew run --robot`, or a folder of `sinew serve --record`. The robot
            gets no commands. Sinew reports what is wired differently from the training data, and which inputs
            the policy ignores.
        robot_options: Options of the robot that --observe watches, as for `sinew run`.
        rename: Camera names for --observe, as NEW=CAMERA. Repeatable.
        rename_joint: Joint names for --observe, as NEW=JOINT. Repeatable.
        kinematics: Robot description (URDF or MJCF) for --observe. Sinew uses it to check units and frames of
            a policy that acts in poses.
        kinematics_options: JSON object with options of kinematics, as for `sinew run`.
        seconds: How long --observe watches the robot, in seconds. Default: 3, with --delays 20.
        learn: Folder of `sinew serve --record` from the correctly wired robot. Sinew writes the bundle to
            --out with the appearance of its cameras and joints, for --observe to compare with.
        out: Bundle that --learn writes. With --delays: a new settings file (.toml) with the measured delays, for
            `sinew --config FILE run`, `trials`, `perf scenario` and `perf stream`.
        effects: With --observe, load the policy and measure by how much its actions change if one input changes:
            the instruction, each camera, the state. --no-effects loads no policy.
        delays: With --observe, move the robot a little inside all limits, and measure the delays of its cameras
            and actuators. The amplitude is a tenth of the standard deviation of each joint in the training data.
        limits: Limits of the robot for --delays, as for `sinew run`. Default: the policy's limits.
        motion: Reference of the actions for --delays, as for `sinew run`. Default: as the policy states.
    """
    if observe is not None or learn is not None:
        from sinew.cli import doctor_observe as wiring

        if bundle is None:
            raise SinewError(
                "--observe, --learn: expected a policy, as in `sinew doctor POLICY --observe ROBOT`"
            )
        if verify or (observe is not None and learn is not None):
            raise SinewError(
                "--observe, --learn: expected one of them, without --verify; omit the other flags"
            )
        if runs != RUNS and (learn is not None or delays or not effects):
            raise SinewError(
                "flags of engines: expected none with --learn, --delays and --no-effects, because these load no policy"
            )
        if observe is not None:
            from sinew.cli.run_robot import RobotFlags

            on = RobotFlags(
                observe,
                robot_options,
                rename,
                rename_joint,
                kinematics,
                kinematics_options,
                motion=motion,
                limits=limits,
            )
            if delays:
                from sinew.cli.doctor_delays import delays as measure_delays

                return measure_delays(bundle, on, seconds, out)
            if limits is not None or motion is not None or out is not None:
                raise SinewError(
                    "--limits, --motion, --out: expected --delays with --observe and these flags; pass --delays too, or"
                    " omit them"
                )
            return wiring.observe(bundle, on, seconds or SECONDS, runs if effects else None)
        if delays:
            raise SinewError("--delays: pass --observe ROBOT too")
        if out is None:
            raise SinewError("--learn: pass --out FILE too, the bundle to write")
        assert learn is not None
        return wiring.learn(bundle, learn, out)
    if delays or limits is not None or motion is not None:
        raise SinewError(
            "--delays, --limits, --motion: expected a policy and a robot, as in"
            " `sinew doctor POLICY --observe ROBOT --delays`"
        )
    from sinew import checks
    from sinew.convert.sources import resolve
    from sinew.memory import loaded_memory

    results: list[Check] = []
    if bundle is not None:
        try:
            bundle = resolve(bundle)
        except SinewError as error:
            results.append(
                checks.Check("bundle", "fail", str(error), "correct the path or name that the message shows")
            )
            bundle = None
    engine: str = runs.engine
    # A folder is an export with graphs only, so the checks use the engine that runs graphs.
    if engine == AUTO and bundle is not None and bundle.is_dir():
        engine = next(name for name, backend in BACKENDS.items() if backend.runs_graphs)
    results[:0] = checks.installation(engine)
    if bundle is not None and verify:
        with progress.task(f"reading {bundle}"):
            results.append(checks.hashes(bundle))
    if bundle is not None:
        with progress.task(f"checking {bundle}"):
            results += checks.bundle(bundle, runs.keywords(), loaded_memory)
    failed = [check for check in results if check.status == "fail"]

    console = terminal.console()
    rows = ((MARKS[check.status], check.name, check.detail, check.advice) for check in results)
    console.print(terminal.findings(rows))
    warned = sum(check.status == "warn" for check in results)
    console.print(f"{len(results)} checks, {len(failed)} failed, {warned} with a warning")
    terminal.emit({"ok": not failed, "checks": [check.to_dict() for check in results]})
    return 1 if failed else 0
