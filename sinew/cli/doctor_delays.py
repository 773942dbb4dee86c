"""``sinew doctor POLICY --observe ROBOT --delays``: measure the delays of a robot's cameras and actuators."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew_client.documentation import page

from sinew.cli import terminal
from sinew.core import SinewError, progress

if TYPE_CHECKING:
    from rich.table import Table

    from sinew.bundle.schema import Manifest
    from sinew.checks.delays import Delays
    from sinew.cli.run_robot import RobotFlags

# The default duration of the motion in seconds: six parts of three seconds, and two seconds in which the motion
# starts and ends.
SECONDS = 20.0
LOOK_S = 1.0  # the robot's state is checked for this long before the robot moves
CLOCK_S = 0.01  # a smaller age of frames, or error of the robot's own times, needs no correction (seconds)


def delays(policy: Path, on: RobotFlags, seconds: float | None, out: Path | None = None) -> int:
    """Move a robot a little, measure its delays and print them. The exit status is 1 if no delay could be measured.

    Args:
        policy: The policy's bundle. Its limits and its statistics bound the motion.
        on: The robot.
        seconds: How long the robot moves; None for :data:`SECONDS`.
        out: New settings file for the delays (:func:`settings_of`); None writes none.
    """
    from sinew.checks import wobble
    from sinew.checks.delays import measure
    from sinew.checks.wiring.joints import JointFit
    from sinew.cli.run_robot import drive
    from sinew.policy import open_bundle

    if Path(on.robot).is_dir():
        raise SinewError(
            "--delays: expected a robot, got a folder of records, which cannot be moved; pass a robot"
        )
    if out is not None and (out.suffix != ".toml" or out.exists()):
        raise SinewError(f"--out {out}: expected a new file that ends in .toml; choose another name")
    manifest = open_bundle(policy).manifest
    description = manifest.spec.to_dict()
    opener = on.opener()
    with ExitStack() as stack:
        robot = on.opened(stack, opener, description)
        _check_state(robot, manifest)
        planned = wobble.plan(
            description, robot, on.chosen(description), JointFit.of(manifest).std, seconds or SECONDS
        )
        with planned.run:
            for note in planned.notes:
                terminal.say(note)
            sizes = ", ".join(
                f"{name} {size:.3g}" for name, size in zip(planned.names, planned.size, strict=True)
            )
            terminal.say(f"the robot moves by at most: {sizes}")
            with progress.task(f"moving {on.robot} a little"):
                drive(planned.run, robot, description, None)
    measured = measure(planned.trace)
    terminal.console().print(delays_table(measured))
    console = terminal.console(markup=False)
    for line in advice(measured):
        console.print(line)
    if out is not None and not np.isnan(measured.actuation):
        text = settings_of(measured)
        out.write_text(text)
        tables = [line[1:-1].replace(".", " ") for line in text.splitlines() if line.startswith("[")]
        console.print(f"wrote {out}, for sinew --config {out} with {', '.join(tables)}", soft_wrap=True)
    terminal.emit({"ok": not np.isnan(measured.actuation), "observed": on.robot, **measured.to_dict()})
    return 1 if np.isnan(measured.actuation) else 0


def _check_state(robot: Any, manifest: Manifest) -> None:
    """Observe a robot for a second before it is moved, and check its state.

    Raises:
        SinewError: Its state looks wrong, for example because it is in radians and the policy's is in degrees. A
            motion that is small in one unit may be large in the other.
    """
    from sinew.checks.wiring import observe as looking

    _, findings = looking.live(robot, manifest, LOOK_S)
    if wrong := [each for each in findings if each.amiss and each.subject.startswith(("state", "robot"))]:
        raise SinewError(
            f"--delays: expected a state as in the training data, got: {wrong[0].subject}: {wrong[0].seen}; the robot"
            " was not moved. Run `sinew doctor POLICY --observe ROBOT` to see all findings"
        )


def delays_table(measured: Delays) -> Table:
    """Return the delays as a table for people."""
    rows = [("command to state", name, each.text()) for name, each in measured.joints.items()]
    for name, camera in measured.cameras.items():
        rows.append(("exposure to memory", name, camera.transfer.text()))
        if camera.clock is not None:
            rows.append(("exposure to the stated time", name, camera.clock.text()))
    return terminal.table("delays, with 95 % intervals", "from, to", "of", "delay", rows=rows)


def camera_delay(measured: Delays) -> float | None:
    """Return the age of the frames when they are observed, in seconds. None if the robot states it, if it is too small
    to matter, or if no camera was measured.
    """
    if any(each.clock for each in measured.cameras.values()):
        return None
    oldest = max((each.age for each in measured.cameras.values() if each.transfer.measured), default=0.0)
    return oldest if oldest > CLOCK_S else None


def settings_of(measured: Delays) -> str:
    """Return a settings file (``--config``) with the delays, for the commands that use them.

    Args:
        measured: The delays. At least one joint was measured.

    Returns:
        TOML with seconds for robots and milliseconds for predictions.
    """
    lines = ["# Written by `sinew doctor POLICY --observe ROBOT --delays`."]
    delay = camera_delay(measured)
    if delay is not None:
        lines += [
            "# Remove run and trials if the training data have the same camera delay: the policy has learnt it then.",
            *(f"[{name}]\ncamera_delay = {delay:.4f}  # seconds" for name in ("run", "trials")),
        ]
    camera = 0.0 if np.isnan(measured.transfer) else 1e3 * measured.transfer
    for name in ("perf.scenario", "perf.stream"):
        lines += [f"[{name}]", f"camera_ms = {camera:.1f}", f"actuation_ms = {_actuation_ms(measured):.1f}"]
    return "\n".join(lines) + "\n"


def _actuation_ms(measured: Delays) -> float:
    return max(0.0, 1e3 * measured.actuation)


def advice(measured: Delays) -> list[str]:
    """Return lines with the next steps for the user, computed from the delays."""
    lines = []
    delay = camera_delay(measured)
    if delay is not None:
        lines.append(
            f"frames are {1e3 * delay:.0f} ms old when they are observed, and the robot does not state it; to count"
            f" their age, pass --set camera_delay={delay:.3f} to sinew run"
            f" (read {page('wiring')} before you use it)"
        )
    for name, camera in measured.cameras.items():
        clock = camera.clock
        if clock is not None and abs(clock.seconds) > CLOCK_S and clock.low * clock.high > 0:
            late = clock.seconds
            lines.append(
                f"camera {name}: the robot states times that are {1e3 * abs(late):.0f} ms"
                f" {'after' if late > 0 else 'before'} the exposure; correct `time` in its observe()"
            )
    flags = []
    if not np.isnan(measured.transfer):
        flags.append(f"--camera-ms {1e3 * measured.transfer:.0f}")
    if not np.isnan(measured.actuation):
        flags.append(f"--actuation-ms {_actuation_ms(measured):.0f}")
    if flags:
        lines.append(f"for sinew perf scenario and sinew perf stream: {' '.join(flags)}")
    return lines
