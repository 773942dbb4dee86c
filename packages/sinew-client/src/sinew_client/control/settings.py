"""All settings of a controller as plain values, for the command line, the decision log, and a replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import Any, Mapping, Sequence

import numpy as np

from sinew_client.control.blend import parse_fusion
from sinew_client.control.controller import BaseController, Controller
from sinew_client.control.defaults import HANDOVER, REPLAN, Choice, choose
from sinew_client.control.handover import parse_handover
from sinew_client.control.motion import Absolute, Motion, Relative, parse_motion
from sinew_client.control.player import Player
from sinew_client.control.replan import Disagreement, parse_rule
from sinew_client.control.safety import RATES, Guard, Limits
from sinew_client.control.smoothing import Smoothing, parse_filter
from sinew_client.control.windows import StreamController
from sinew_client.errors import ClientError
from sinew_client.protocol import MAX_ROWS
from sinew_client.untrusted import named, shown

# A lower speed would stretch a chunk over more than 100 times its steps, and a decision log from outside could name
# any speed.
LEAST_SPEED = 0.01
LARGEST_CHUNK = 8192  # largest number of actions in a chunk, the same limit as in bundles
_KINDS: Mapping[str, tuple] = {
    **dict.fromkeys(("handover", "replan", "fusion", "filter"), (str,)),
    **dict.fromkeys(("motion", "limits"), (Mapping, type(None))),
    "stale_of": (Mapping,),
    "rest": (str, list, tuple, type(None)),
    **dict.fromkeys(("finish", "future", "watchdog"), (bool,)),
    **dict.fromkeys(("substeps", "committed_rows", "refine", "chunk_size"), (Integral,)),
}
# These settings are only for requested chunks. They are rejected for a stream, which does not request chunks.
_OF_CHUNKS = (
    "handover", "replan", "max_age", "finish", "future", "substeps", "committed_rows", "refine", "filter", "speed"
)  # fmt: skip


class SettingsError(ClientError, ValueError):
    """A setting of the controller is not valid. The message names the setting."""


@dataclass(frozen=True)
class Settings:
    """The settings of a controller.

    Attributes:
        hz: Control steps per second. The actions of a chunk are one control step apart.
        handover: How chunks are merged (:func:`~sinew_client.control.handover.parse_handover`). ``auto`` chooses by
            the motion (:func:`~sinew_client.control.defaults.choose`).
        replan: When the next chunk is requested (:func:`~sinew_client.control.replan.parse_rule`).
        motion: What actions are relative to. {"kind": "as is"} sends them unchanged, as None does. {"kind": "absolute"}
            is for targets; add "action" and "state" (lists of indices) if the state has other values too. {"kind":
            "relative", "action": [...], "state": [...]} is for actions relative to the state at the chunk's
            observation. {"kind": "offsets", "action": [...], "state": [...], "scale": 1, "low": ..., "high": ...} is
            for delta actions.
        limits: Limits of the commands (:meth:`~sinew_client.control.safety.Limits.parse`); None sets no limits.
        max_age: Largest age of an executed action, in seconds since the chunk's observation. None sets no limit.
        deadline: Seconds to wait for an answer.
        stale: Largest age of a frame for a request, in seconds.
        finish: True executes the remaining actions after a failed request. False holds the robot at once.
        future: True sends the policy the predicted state at the time when the answer arrives.
        substeps: Commands per control step, for actuators that need a higher rate.
        committed_rows: Longest action prefix that the policy was trained to continue, from its metadata. 0 if the
            policy was not trained so, or if the number is unknown. Trained real-time chunking never sends a longer
            prefix, and the robot stands still for the rest of the delay.
        refine: Largest age of a chunk, in control steps, at which an edge adapter refines it; 0 without an adapter.
        chunk_size: Number of actions in a chunk, from the policy's metadata. Longer chunks are rejected. 0 if unknown,
            which allows :data:`~sinew_client.protocol.MAX_ROWS` actions.
        watchdog: True holds the robot from another thread while its loop is late, for example because ``observe``
            blocks.
        fusion: How the windows of a stream are mixed with the old waypoints
            (:func:`~sinew_client.control.blend.parse_fusion`); "" requests chunks. For a stream, ``hz`` is the rate of
            its waypoints, ``stale`` is the largest age of the frame from which a waypoint was computed, and
            ``chunk_size`` is the largest number of waypoints in a window. ``motion`` then gives only the position
            before the first command, because waypoints are sent unchanged.
        filter: Filter of the actions before they are sent (:func:`~sinew_client.control.smoothing.parse_filter`); ""
            applies no filter.
        speed: Speed at which chunks are played, 0.01 to 1.
        stale_of: For a camera or "state", its largest age in seconds, if it differs from ``stale``.
        camera_delay: Seconds from the exposure of a frame to its observation. Set it for a robot that states neither
            ``time``, ``age`` nor ``times``. `sinew doctor POLICY --observe ROBOT --delays` measures it. It is added to
            the age of each frame, for ``stale`` and for chunk merging.
        skew: Largest time between the newest frames of two cameras, seconds; None allows any. ``stale_of`` and
            ``skew`` need the exposure time of each frame (``times`` of the robot's observations).
        rest: Pose to which the robot returns at the end of a run (:mod:`~sinew_client.control.rest`): "first", the
            values of a pose, or the name of one of the robot's poses. "hold" holds the robot where it is. None lets
            :class:`~sinew_client.control.run.RunPlan` choose.

    Raises:
        SettingsError: A value is out of its range, or two settings contradict each other.

    Example:
        >>> settings = Settings(hz=30, motion={"kind": "absolute"}, limits={"velocity": 1.5})
    """

    hz: float
    handover: str = HANDOVER
    replan: str = REPLAN
    motion: Mapping[str, Any] | None = None
    limits: Mapping[str, Any] | None = None
    max_age: float | None = None
    deadline: float = 2.0
    stale: float = 0.5
    finish: bool = False
    future: bool = False
    substeps: int = 1
    committed_rows: int = 0
    refine: int = 0
    chunk_size: int = 0
    watchdog: bool = True
    fusion: str = ""
    filter: str = ""
    speed: float = 1.0
    stale_of: Mapping[str, float] = field(default_factory=dict)
    camera_delay: float = 0.0
    skew: float | None = None
    rest: str | Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("hz", "deadline", "stale", "max_age", "speed", "skew"):
            value = getattr(self, name)
            if not (value is None and name in ("max_age", "skew")):
                _above_zero(name, value)
                # Convert numpy numbers to float, because JSON cannot write numpy numbers into the decision log.
                object.__setattr__(self, name, float(value))
        delay = self.camera_delay
        if isinstance(delay, bool) or not isinstance(delay, Real) or not 0 <= delay < self.stale:
            raise SettingsError(
                f"camera_delay: expected 0 to less than stale ({self.stale:g} s), got {shown(delay)}"
            )
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                words = " or ".join(kind.__name__ for kind in kinds)
                raise SettingsError(f"{name}: expected {words}, got {shown(value)}")
        for name, value in self.stale_of.items():
            _above_zero(f"stale_of.{named(name)}", value)
        if not 1e-3 <= self.hz <= 1e5:
            raise SettingsError(f"hz: expected 0.001 to 100000, got {self.hz:g}")
        if not LEAST_SPEED <= self.speed <= 1.0:
            raise SettingsError(
                f"speed: expected {LEAST_SPEED:g} to 1 (the speed of training), got {self.speed:g}"
            )
        if not 1 <= self.substeps <= 100:
            raise SettingsError(f"substeps: expected 1 to 100, got {self.substeps}")
        if self.committed_rows < 0:
            raise SettingsError(f"committed_rows: expected 0 or more, got {self.committed_rows}")
        if self.refine < 0:
            raise SettingsError(f"refine: expected 0 or more control steps, got {self.refine}")
        if not 0 <= self.chunk_size <= LARGEST_CHUNK:
            raise SettingsError(f"chunk_size: expected 0 to {LARGEST_CHUNK} actions, got {self.chunk_size}")
        for name in _OF_CHUNKS if self.fusion else ():
            if getattr(self, name) != getattr(Settings, name):
                raise SettingsError(
                    f"{name}: cannot be combined with fusion, got {shown(getattr(self, name))}; omit one of them"
                )

    @property
    def period(self) -> float:
        """Seconds between two control steps."""
        return 1.0 / self.hz

    @property
    def choice(self) -> Choice:
        """The method of chunk merging, and the reason for it.

        Raises:
            SettingsError: The method is unknown.
        """
        try:
            return choose(self.handover, self.motion, refined=bool(self.refine))
        except ValueError as error:
            raise SettingsError(str(error)) from error

    def controller(self, dim: int) -> BaseController:
        """Create a controller with these settings.

        Args:
            dim: Number of values in a command (D).

        Returns:
            A controller for a stream if ``fusion`` is set, else a controller for requested chunks.

        Raises:
            ClientError: A setting does not fit. The message names it.
        """
        return self.of_stream(dim) if self.fusion else self.of_chunks(dim)

    def of_stream(self, dim: int) -> StreamController:
        """Create a controller for a stream.

        Args:
            dim: Number of values in a command (D).

        Raises:
            ClientError: A setting does not fit.
        """
        try:
            fusion = parse_fusion(self.fusion)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        motion = self.parse_motion()
        limits = self._limits(dim)
        if limits is not None and limits.boxed.any():
            raise SettingsError(
                "limits.workspace_low, limits.workspace_high: cannot be combined with fusion; omit one of them"
            )
        guard = Guard(limits, self.period, motion.still(dim))
        return StreamController(fusion, self.hz, self.stale, motion, guard, dim, self.chunk_size or MAX_ROWS)

    def of_chunks(self, dim: int) -> Controller:
        """Create a controller for requested chunks.

        Args:
            dim: Number of values in a command (D).

        Raises:
            ClientError: A setting does not fit.
        """
        try:
            player = Player(
                parse_handover(self.choice.handover),
                parse_rule(self.replan),
                self.parse_motion(),
                self.future,
                self.committed_rows,
                self.refine,
                self.speed,
            )
            design = parse_filter(self.filter, self.hz)
            smoothing = None if design is None else Smoothing(design, player.motion.posed(dim))
        except ValueError as error:
            raise SettingsError(str(error)) from error
        if isinstance(player.rule, Disagreement) and player.handover.stops:
            raise SettingsError(
                "replan: disagreement needs chunk merging with overlapping chunks (--handover aligned, ensemble, ...),"
                f" got {self.choice.handover}, which waits for the next chunk; choose another --handover or --replan"
            )
        if self.future and type(player.motion) is Motion:
            raise SettingsError(
                "future: needs a motion (absolute, relative or offsets), got none; set --motion, or omit future"
            )
        if self.refine and player.handover.method == "rtc":
            raise SettingsError(
                f"handover: {self.handover} cannot be combined with an edge adapter, because the adapter changes the"
                " actions that the server continues; choose a --handover without real-time chunking"
            )
        if self.substeps > 1 and not isinstance(player.motion, (Absolute, Relative)):
            raise SettingsError(
                "substeps: expected motion absolute or relative; other actions cannot be interpolated. Set --motion, or"
                " use substeps 1"
            )
        self._check_speed(player)
        max_age = None if self.max_age is None else int(self.max_age * self.hz)
        limits = self._limits(dim)
        if limits is not None:
            check_workspace(limits, player.motion)
        guard = Guard(limits, self.period, player.motion.still(dim))
        return Controller(
            player, guard, max_age, self.finish, dim, self.chunk_size or MAX_ROWS, smoothing=smoothing
        )

    def _check_speed(self, player: Player) -> None:
        """Raise :class:`SettingsError` if the speed is below 1 and chunks cannot be played slower."""
        if self.speed == 1.0:
            return
        if type(player.motion) is Motion:
            raise SettingsError(
                "speed: expected motion absolute, relative or offsets; other actions cannot be interpolated. Set"
                " --motion, or use speed 1"
            )
        if self.refine or self.future or player.handover.method == "rtc":
            raise SettingsError(
                "speed: expected 1 with real-time chunking, an edge adapter or future, which need actions at the rate"
                f" of training, got {self.speed:g}"
            )

    def check_start(self, dim: int, state_dim: int | None = None) -> None:
        """Check that the position before the first command is known if limits of velocity or acceleration need it.

        Args:
            dim: Number of values in a command (D).
            state_dim: Number of values in the state, if it is known before the robot is observed.

        Raises:
            SettingsError: The position is unknown.
        """
        if (limits := self._limits(dim)) is not None:
            check_start(limits, self.parse_motion(), state_dim)

    def _limits(self, dim: int) -> Limits | None:
        return Limits.parse(self.limits, dim) if self.limits is not None else None

    def parse_motion(self) -> Motion:
        """Create the motion of these settings: what the policy's actions are relative to.

        For a stream, the motion gives only the position before the first command, because waypoints are sent unchanged.

        Raises:
            SettingsError: The motion is not valid.
        """
        try:
            motion = parse_motion(self.motion)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return Motion() if self.fusion and isinstance(motion, Relative) else motion

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        return asdict(self)


def _above_zero(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < 1e30:
        raise SettingsError(f"{name}: expected a number above 0, got {shown(value)}")


def check_workspace(limits: Limits, motion: Motion) -> None:
    """Raise :class:`SettingsError` if a value has a workspace, but the motion does not determine its position."""
    lost = [limits.name(int(at)) for at in np.flatnonzero(limits.boxed & ~motion.posed(limits.dim))]
    if lost:
        raise SettingsError(
            "limits.workspace_low, limits.workspace_high: need a motion that determines the position after a command"
            f" (absolute, or relative or offsets with these values), got none for {', '.join(lost)}; set --motion"
        )


def check_start(limits: Limits, motion: Motion, state_dim: int | None = None) -> None:
    """Check that limits of velocity and acceleration have a known position to start from.

    Without this position, the first command would not be limited, or would never be sent.

    Args:
        limits: The limits.
        motion: The motion, which states what actions are relative to.
        state_dim: Number of values in the state, if known.

    Raises:
        SettingsError: The position is unknown.
    """
    placed = motion.placed(limits.dim)
    seen = placed if state_dim is None else np.isfinite(motion.position(np.zeros(state_dim), limits.dim))
    has_start = seen | ~np.isnan(motion.still(limits.dim)) | ~np.isnan(limits.still)
    lost = limits.paced & ~has_start
    if lost.any():
        missing = ", ".join(limits.name(int(joint)) for joint in np.flatnonzero(lost))
        needs = ", ".join(f"limits.{name}" for name in RATES if np.isfinite(getattr(limits, name)).any())
        # The motion is absolute here, but the state and the command do not have the same number of values.
        if placed[lost].all():
            columns = list(range(limits.dim))
            raise SettingsError(
                f"{needs}: the robot's position before its first command is unknown: a command has {limits.dim} values"
                f" and the state {state_dim}. Set a motion with indices, such as"
                f' {{"kind": "absolute", "action": {columns}, "state": {columns}}} for the first {limits.dim} values'
            )
        raise SettingsError(
            f"{needs}: the robot's position before its first command is unknown for {missing}. Set --motion absolute if"
            " commands are positions, or set limits.still, the command of a standing robot (0 for velocities and delta"
            " actions)"
        )
