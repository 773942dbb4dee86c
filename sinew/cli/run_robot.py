"""The robot of ``sinew run``: its flags, its instruction, its episodes and its cameras."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclopts import Group, Parameter
from sinew_client import ClientError
from sinew_client.control import Limits, Loop, SettingsError
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.rest import read_poses
from sinew_client.control.robots import Dry, find_class, open_class, open_lerobot, ordered
from sinew_client.control.run import Run, RunPlan
from sinew_client.errors import Refused
from sinew_client.signals import handled

from sinew.bundle.rename import parse_renames, renames_for
from sinew.cli import terminal
from sinew.cli.options import CountIfAny, PositiveIfAny, Setting, Texts, json_object, motion_of
from sinew.core import SinewError, providers
from sinew.core.hints import pairs
from sinew.core.registry import place_of
from sinew.core.statistics import wilson


@Parameter(name="*", group=Group("Robot", sort_key=-1))
@dataclass(frozen=True)
class RobotFlags:
    """The robot, and how it is driven.

    Attributes:
        robot: Robot to drive: dry (no hardware), blocks, pen or egg (built-in tasks), gym:ENV, lerobot:TYPE
            (TYPE+TYPE for two arms), an installed robot package, or module:Class with the methods observe, act and
            hold. The current folder is searched first.
        robot_options: JSON object: arguments of the robot's constructor, or fields of LeRobot's configuration.
        rename: Camera name of your robot, as NEW=CAMERA, for example front=camera1. Repeatable.
        rename_joint: Joint name of your robot, as NEW=JOINT. If robot and policy both have joint names, Sinew matches
            them by name in any order.
        kinematics: Robot description (URDF or MJCF) for a robot that takes joints and a policy that acts in poses.
            Sinew computes the joints, or holds the robot. With a policy of joints, it only draws the arm.
        kinematics_options: JSON object with tip, base, action ("xyz,rotvec,gripper"), state, unit, velocity and
            others. You may omit what the names and units of the bundle state.
        prompt: Instruction for all episodes. Default: each episode's own for gym:ENV, otherwise the policy's.
        hz: Control rate in Hz. Default: the policy's rate, or the environment's.
        motion: Reference of the actions: absolute (they are targets), a JSON object that describes delta actions,
            or "as is" to send actions unchanged. Default: as the policy states.
        limits: .toml or .json file with low, high, velocity, acceleration, jerk, jump, workspace_low, workspace_high
            and still for each joint. Default: the policy's limits.
        rest: Where the robot goes at the end: first (its pose at the beginning), hold (it stays where it is), or a
            pose in the table [poses] of the limits file. Default: first for a real robot with joint positions as
            commands, otherwise hold. A second signal stops it at once.
        stale: Maximum age of a frame, in seconds. The robot holds if its frames are older.
        camera_delay: Age of a frame when the robot is observed, in seconds, for a robot that does not state it.
            `sinew doctor POLICY --observe ROBOT --delays` measures it. Use it if the training data have no such
            delay.
        watchdog: Hold the robot from a second thread while its own methods block. Set it to false if the robot must
            not be held during observe.
        seconds: End after this many seconds. A trial of `sinew trials` then fails.
        episodes: Number of episodes to play in gym:ENV.
        record: New file for the decision log, or a folder with one file for each trial. `sinew recording replay
            FILE` repeats its decisions.
        report: Send the state of the run to the server's dashboard once a second.
        adapter: Adapter for a gym:ENV of another project: a .json mapping or module:Class.
    """

    robot: str = "dry"
    robot_options: str | None = None
    rename: Texts = ()
    rename_joint: Setting[Texts] = ()
    kinematics: Setting[Path | None] = None
    kinematics_options: Setting[str | None] = None
    prompt: str = ""
    hz: PositiveIfAny = None
    motion: str | None = None
    limits: Path | None = None
    rest: str | None = None
    stale: Setting[float] = 0.5
    camera_delay: Setting[float] = 0.0
    watchdog: Setting[bool] = True
    seconds: PositiveIfAny = None
    episodes: CountIfAny = None
    record: Path | None = None
    report: Setting[bool] = True
    adapter: Setting[str] = ""

    def opener(self, substeps: int = 1) -> Callable[[dict[str, Any]], Any]:
        """Return a function that opens the robot, given a policy's description.

        Args:
            substeps: Commands in each control step.

        Raises:
            SinewError: An option is wrong for every policy.
        """
        options = json_object("--robot-options", self.robot_options) or {}
        cameras = _of_policy("--rename", "camera", parse_renames(self.rename))
        places = _of_policy("rename_joint", "joint", pairs("rename_joint", "NEW=JOINT", self.rename_joint))
        text = EMBEDDED.get(self.robot) or (
            self.robot if self.robot == SIMULATED else place_of(GROUP, self.robot)
        )
        kind, _, rest = text.partition(":")
        if kind != "gym" and (self.adapter or self.episodes is not None):
            raise SinewError(
                f"{'adapter' if self.adapter else '--episodes'} needs --robot gym:ENV; pass a Gymnasium"
                " environment, or omit the option"
            )
        if self.kinematics is not None:
            return self._posed(text, self.kinematics, places, substeps)
        if self.kinematics_options is not None:
            raise SinewError("kinematics_options needs kinematics")
        if places and (kind in ("gym", "dry") or text == "dry"):
            raise SinewError(
                f"rename_joint: expected none with --robot {text}, which has no names of its own"
            )
        if kind == "gym" and rest:
            open_task = providers.required(GROUP, f"sinew run --robot {self.robot}", SIMULATED)
            opener: Callable[[dict[str, Any]], Any] = open_task(
                rest, self.adapter, options, cameras, self.episodes
            )
            return opener
        if kind == "lerobot" and rest:
            return lambda policy: open_lerobot(rest, options, policy, cameras, places)
        if text == "dry":
            if cameras:
                raise SinewError("--rename: expected none with --robot dry, which has the policy's own")
            return Dry
        if rest:
            find_class(text)
            return lambda policy: ordered(open_class(text, options, cameras), policy, places)
        raise SinewError(
            f"--robot: expected dry, blocks, pen, egg, gym:ENV, module:Class or lerobot:TYPE, got {text!r}"
        )

    def _posed(
        self, text: str, kinematics: Path, joints: Mapping[str, str], substeps: int
    ) -> Callable[[dict[str, Any]], Any]:
        """Return a function that opens a robot of joints for a policy of poses, by means of its kinematics.

        With a policy of joints, the kinematics are used only to show the arm.
        """
        from sinew_client.arm.end_effector import (
            EndEffector,
            KinematicsOptions,
            KnownArm,
            moves_joints,
            numbers_of,
        )
        from sinew_client.arm.kinematics import read_chain

        if text.startswith("gym:"):
            raise SinewError(f"kinematics: expected a robot that takes joints, got --robot {text}")
        opener = RobotFlags(text, self.robot_options, self.rename).opener()
        with SinewError.at("kinematics", ClientError):
            chosen = KinematicsOptions.parse(json_object("kinematics_options", self.kinematics_options))
            chain = read_chain(kinematics, chosen.tip, chosen.base)

        def posed(policy: dict[str, Any]) -> Any:
            if not chosen.action and moves_joints(policy, chain, joints):
                machine = opener(policy)
                about = policy["state"]
                units = about.get("units") or ()
                arm = KnownArm(machine, chain, about["names"], chosen.unit, joints, units=units)
                terminal.say(arm.text())
                return arm
            own: dict[str, Any] = {}
            if text == "dry":
                names = numbers_of(chain, chosen.parts(policy, "action"))
                own = {"dim": len(names), "names": names}
            machine = opener({**policy, "state": own, "action": own})
            if text == "dry":
                machine.state[: len(chain.joints)] = chain.ready()
            hz = self.hz or facts_of(machine).hz or policy.get("control_hz") or 1.0
            commands_hz = substeps * float(hz)
            robot = EndEffector(machine, chain, chosen, policy, commands_hz, joints)
            terminal.say(robot.text())
            return robot

        return posed

    def opened(
        self, stack: ExitStack, open_robot: Callable[[dict[str, Any]], Any], policy: dict[str, Any]
    ) -> Any:
        """Open the robot, and return it. The stack closes it."""
        robot = open_robot(policy)
        if (close := facts_of(robot).close) is not None:
            stack.callback(close)
        return robot

    def chosen(self, policy: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that these flags choose, for :meth:`RunPlan.of`."""
        settings: dict[str, Any] = {
            "hz": self.hz,
            "motion": motion_of(self.motion),
            "rest": self.rest,
            "stale": self.stale,
            "camera_delay": self.camera_delay,
            "watchdog": self.watchdog,
        }
        if self.limits is not None:
            settings["limits"] = Limits.read(self.limits, int(policy["action"]["dim"]))
            poses = read_poses(self.limits)
            settings["rest"] = poses.get(self.rest or "", self.rest)
        return settings

    def follow(self, run: Run, target: str, **head: Any) -> None:
        """Write the decision log of a run, if the user requests it.

        Args:
            run: The run.
            target: The policy, as the user named it.
            **head: Further entries of the log's first line.
        """
        if self.record is not None:
            run.journal(self.record, robot=self.robot, target=target, **head)

    def reports(self, run: Run, server: Any, key: str, session: str = "") -> None:
        """Let a run send its state to its server. A policy that computes here has no server."""
        if self.report and hasattr(server, "present"):
            run.report_to(server, self.robot, key, session)

    def ticks(self, rate: float) -> int | None:
        """Return the number of control steps after which the run ends; None if no duration was requested."""
        return None if self.seconds is None else max(1, round(self.seconds * rate))


ROBOT = RobotFlags()


def plan_run(
    policy: Mapping[str, Any], robot: Any, settings: Mapping[str, Any], prompt: str, **more: Any
) -> RunPlan:
    """Return the plan of a run, and print its notes for the user before the robot moves.

    Raises:
        SinewError: A flag is missing, or does not fit the policy or the robot.
    """
    try:
        plan = RunPlan.of(policy, robot, settings, prompt=prompt, **more)
    except SettingsError as error:
        flag = str(error).partition(":")[0]
        if flag not in ("hz", "prompt", "handover", "rest"):
            raise
        raise SinewError(f"--{error}") from error
    for note in plan.notes:
        terminal.say(note)
    return plan


def drive(driving: Run | Loop, robot: Any, policy: Mapping[str, Any], ticks: int | None) -> None:
    """Drive a robot until a signal arrives, ``ticks`` control steps have passed, or the robot ends the run.

    The first signal ends the run after the present control step, and a :class:`Run` returns the robot to its rest
    pose. The second signal stops the robot where it is. The third signal interrupts a robot that does not return from
    one of its methods.
    """
    signals = 0

    def ends(*_: Any) -> None:
        nonlocal signals
        signals += 1
        driving.stop()
        if signals > 2:
            raise KeyboardInterrupt

    with handled((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), ends), of_robot():
        try:
            driving.run(ticks)
        except KeyboardInterrupt:  # the loop has already held the robot
            driving.stop()
        except Refused as error:
            raise SinewError(refusal(str(error), robot, policy)) from error


@contextmanager
def of_robot() -> Iterator[None]:
    """Inside the ``with`` block, replace an error of the robot's own code by :class:`SinewError` with the place of
    the error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SinewError) or not (where := _elsewhere(error)):
            raise
        message = f"the robot raised {type(error).__name__}: {error} ({where}; `--debug` shows more)"
        raise SinewError(message) from error


def _elsewhere(error: Exception) -> str:
    """Return the first place in an error's traceback outside this program; "" if there is none."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals["__name__"].partition(".")[0] not in ("sinew", "sinew_client", "sinew_eval"):
            return f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{line}"
    return ""


EMBEDDED = {"dry": "dry"} | {name: f"gym:sinew/{name.capitalize()}-v0" for name in ("blocks", "pen", "egg")}
GROUP = "sinew.robots"  # entry points of other distributions: name -> "module:Class"
SIMULATED = "gym"  # the entry point whose name is followed by an environment, as in gym:ENV


def _of_policy(flag: str, what: str, names: Mapping[str, str]) -> dict[str, str]:
    """Invert a mapping from the robot's names to the policy's names."""
    names_of_robot = {old: own for own, old in names.items()}
    if len(names_of_robot) < len(names):
        texts = ", ".join(f"{own}={old}" for own, old in names.items())
        raise SinewError(f"{flag}: expected each {what} once, got {texts}")
    return names_of_robot


# ----------------------------------------------------------------------------- episodes


def episodes_of(facts: RobotFacts) -> dict[str, int]:
    """Return the numbers of finished and of successful episodes; {} if the robot has no episodes."""
    if facts.episodes is None:
        return {}
    return {"episodes": facts.episodes.finished, "successes": facts.episodes.successes}


def episodes_text(facts: RobotFacts) -> str:
    """Return the successes as text, with the interval of the success rate; "" if the robot has no episodes."""
    if not (counts := episodes_of(facts)):
        return ""
    played, won = counts["episodes"], counts["successes"]
    if not played:
        return "none finished yet"
    low, high = wilson(won, played)
    return f"{won} of {played} succeeded, {100 * won / played:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def episodes_row(facts: RobotFacts) -> list[tuple[str, str]]:
    return [("episodes", text)] if (text := episodes_text(facts)) else []


# ----------------------------------------------------------------------------- rejected observations

_HINT = re.compile(
    r" \([^()]*(?:maps it|runs without)\)"
)  # hint in a policy's message, which may come from a server


def refusal(text: str, machine: Any, policy: Mapping[str, Any]) -> str:
    """Return the message that a policy rejected the robot's first observation, with the reason and the flags that may
    fix it.
    """
    text = _HINT.sub("", text)
    needed = [camera["name"] for camera in policy["cameras"]]
    shown = list(_shown(machine))
    if "images" not in text or sorted(needed) == sorted(shown):
        return f"the policy rejected the robot's first observation: {text}"
    example = renames_for(needed, shown)
    hint = f"; say which is which: {example}" if example else ""
    return (
        f"the policy rejected the robot's first observation: {text}; the policy has the cameras"
        f" {', '.join(needed)}, the robot {', '.join(shown) or 'none'}{hint}"
    )


def _shown(machine: Any) -> Iterable[str]:
    try:
        return machine.observe()["images"]
    except (ClientError, KeyError, TypeError):
        return ()
