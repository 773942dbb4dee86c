"""Options of ``sinew run`` for other drivers (a person with a leader arm), and for the filters and limits of actions
and sensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter, validators
from sinew_client import ClientError
from sinew_client.control import Command, Limits, ShadowListener
from sinew_client.control.defaults import stated
from sinew_client.control.motion import parse_motion
from sinew_client.control.run import RunPlan
from sinew_client.target import EXPERT

from sinew.cli import terminal
from sinew.cli.options import Flag, PositiveIfAny, Setting, Texts, json_object
from sinew.core import ActionChunk, Observation, SinewError
from sinew.core.hints import pairs

if TYPE_CHECKING:
    from sinew_client.arm.takeover import Takeover

SPARE_BYTES = 1 << 30  # bytes that stay free on the disk


@Parameter(name="*", group="Take-over")
@dataclass(frozen=True)
class LeaderFlags:
    """Drivers that may replace the policy, and what is recorded.

    Attributes:
        takeover: Leader arm with which a person drives after pressing t: lerobot:TYPE (a LeRobot teleoperator),
            expert (for simulated tasks), or module:Class with a method read.
        takeover_options: JSON object: arguments of the leader's constructor, or fields of LeRobot's configuration.
            For expert, {"after": STEPS} takes over by itself after that number of control steps.
        takeover_key: Key that takes over and gives back. A pedal can send it.
        align: Distance of each leader value from the robot that is allowed when taking over. Default: a twentieth of
            the range that the limits allow.
        shadow: Let the policy compute while a person drives, with the leader of --takeover or directly at the robot.
            The report states how well both agree.
        frames: Folder for each executed control step: observation, command and driver, uncompressed (55 MB a second
            for two cameras). `sinew recording dataset` makes a LeRobot data set of it.
    """

    takeover: str | None = None
    takeover_options: Setting[str | None] = None
    takeover_key: Setting[str] = "t"
    align: Setting[PositiveIfAny] = None
    shadow: Setting[Flag] = False
    frames: Path | None = None

    @property
    def wanted(self) -> bool:
        """True if the options allow another driver, such as a person, to replace the policy."""
        return self.takeover is not None or self.shadow

    def check(self) -> None:
        """Raise :class:`SinewError` if flags cannot be combined. Called before the policy is loaded."""
        if len(self.takeover_key) != 1 or self.takeover_key in " pq\x1b\r\n":
            raise SinewError(
                f"takeover_key: expected one character other than space, p and q, got {self.takeover_key!r}"
            )
        if self.takeover_options is not None and self.takeover is None:
            raise SinewError("takeover_options needs --takeover")
        if self.align is not None and not self.wanted:
            raise SinewError("align needs --takeover or shadow; pass one of them, or omit align")

    def opened(self, stack: ExitStack, plan: RunPlan) -> tuple[Any, Takeover | None]:
        """Return the robot that the loop drives, and the take-over or None. The stack closes the take-over."""
        robot = plan.robot
        if not self.wanted:
            return robot, None
        from sinew_client.arm.takeover import Takeover

        motion = parse_motion(plan.settings.motion or stated(plan.policy) or plan.facts.motion)
        limits = None if plan.settings.limits is None else Limits.parse(plan.settings.limits, plan.dim)
        machine: Any = robot
        if self.takeover is None:
            if plan.facts.episodes is not None:
                raise SinewError(
                    "shadow needs --takeover with a simulated robot, because no other driver commands it; pass"
                    " --takeover, or omit shadow"
                )
            machine = leader = ShadowListener(robot, motion, plan.dim)
        else:
            leader = self._leader(plan)
        takeover = Takeover(leader, motion, plan.dim, limits, self.align, self.shadow)
        stack.callback(takeover.close if machine is not leader else (lambda: None))
        if self.takeover is not None and limits is not None and not self.shadow:
            terminal.say(_bounds(limits))
        return machine, takeover

    def _leader(self, plan: RunPlan) -> Any:
        from sinew_client.arm.leaders import open_leader, open_lerobot_leader

        assert self.takeover is not None
        options = json_object("takeover_options", self.takeover_options) or {}
        kind, _, rest = self.takeover.partition(":")
        if self.takeover == EXPERT:
            if plan.facts.leader is None:
                raise SinewError("--takeover expert: expected a simulated robot, whose state it reads")
            with SinewError.at("takeover_options", TypeError):
                return plan.facts.leader(**options)
        if kind == "lerobot" and rest:
            names = plan.facts.names("action") or plan.policy["action"].get("names")
            if not names:
                raise SinewError(
                    "--takeover lerobot: expected a policy or a robot that names its joints, got neither"
                )
            return open_lerobot_leader(rest, options, names, plan.settings.hz)
        if rest:
            return open_leader(self.takeover, options)
        raise SinewError(f"--takeover: expected lerobot:TYPE, expert or module:Class, got {self.takeover!r}")


class FrameKeeper:
    """Stores each control step with a command (observation, command and driver) in a folder, until the disk has less
    than a gigabyte of free space.
    """

    def __init__(self, folder: Path, plan: RunPlan, stack: ExitStack):
        from sinew.records.recorder import Recorder

        self._folder, self._hz, self._episodes = folder, plan.settings.hz, plan.facts.episodes
        self.episode = ""  # name of the episode; "" takes the robot's own count
        folder.mkdir(parents=True, exist_ok=True)
        free = max(0, shutil.disk_usage(folder).free - SPARE_BYTES)
        self._recorder = Recorder(folder, free, plan.names)
        stack.callback(self._recorder.close)

    def __call__(self, seen: Mapping[str, Any], prompt: str, command: Command) -> None:
        images = {name: _pixels(name, frame) for name, frame in seen["images"].items()}
        prompt = prompt or str(seen.get("prompt", ""))
        moment = Observation(images, _copied(seen["state"]), prompt=prompt, time=command.step / self._hz)
        assert command.row is not None
        episode = self.episode or f"episode {0 if self._episodes is None else self._episodes.finished}"
        self._recorder.put("run", episode, moment, ActionChunk(command.row[None]), by=command.by)

    def row(self) -> tuple[str, str]:
        text = f"{self._recorder.stats()['written']} steps in {self._folder}"
        return "kept", f"{text}; sinew recording dataset {self._folder} OUT makes a data set of them"


LEADER = LeaderFlags()


@Parameter(name="*", group="Envelope")
@dataclass(frozen=True)
class EnvelopeFlags:
    """Filters and speed of actions, and the allowed age of each sensor.

    Attributes:
        filter: Filter for actions before they are sent: ema:SHARE or lowpass:HZ, optionally followed by :COLUMNS. The
            report states its delay. Sinew compensates the delay by looking ahead.
        speed: Speed at which chunks are played, above 0 and at most 1.
        stale_of: Maximum age of one camera, or of the state, as CAMERA=SECONDS. The robot must report when it
            captured each.
        skew: Maximum time between the frames of two cameras, in seconds.
    """

    filter: Setting[str] = ""
    speed: Setting[Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))]] = 1.0
    stale_of: Setting[Texts] = ()
    skew: Setting[PositiveIfAny] = None

    def settings(self) -> dict[str, Any]:
        return {
            "filter": self.filter,
            "speed": self.speed,
            "stale_of": _seconds(self.stale_of),
            "skew": self.skew,
        }


ENVELOPE = EnvelopeFlags()


def _seconds(texts: Iterable[str]) -> dict[str, float]:
    texts_by_camera = pairs("stale_of", "CAMERA=SECONDS", texts)
    try:
        return {name: float(value) for name, value in texts_by_camera.items()}
    except ValueError as error:
        raise SinewError(f"stale_of: expected CAMERA=SECONDS, {error}") from error


def _bounds(limits: Limits) -> str:
    """Return a note about the limits that bound the robot's step when the driver changes."""
    if not (free := limits.unpaced()):
        return "take-over: limits of velocity, acceleration, jerk or jump bound the step at each hand-over"
    return (
        f"take-over: no limit bounds the step of {', '.join(free)} at a hand-over; set one with --limits. The report"
        " has the largest step"
    )


def _pixels(name: str, frame: Any) -> Any:
    pixels = _copied(frame)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ClientError(f"images.{name}: expected [height, width, 3], got {list(pixels.shape)}")
    return pixels


def _copied(values: Any) -> Any:
    return np.array(values)
