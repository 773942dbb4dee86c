"""Everything that decides what a controller does, as plain values: for a command line, a journal, a replay."""

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

LARGEST_CHUNK = 8192  # rows, as bundles have them
_KINDS: Mapping[str, tuple] = {
    **dict.fromkeys(("handover", "replan", "fusion", "filter"), (str,)),
    **dict.fromkeys(("motion", "limits"), (Mapping, type(None))),
    "stale_of": (Mapping,),
    "rest": (str, list, tuple, type(None)),
    **dict.fromkeys(("finish", "future", "watchdog"), (bool,)),
    **dict.fromkeys(("substeps", "committed_rows", "refine", "chunk_size"), (Integral,)),
}
# What says how chunks are asked for and played, which a stream has nothing to do with.
_OF_CHUNKS = (
    "handover", "replan", "max_age", "finish", "future", "substeps", "committed_rows", "refine", "filter", "speed"
)  # fmt: skip


class SettingsError(ClientError, ValueError):
    """A setting of the controller is not what was expected; the message names it."""


@dataclass(frozen=True)
class Settings:
    """The settings of a controller.

    hz: control steps per second; a chunk's rows are that far apart. handover: see
        :func:`~sinew_client.control.handover.parse_handover`; ``auto`` is what
        :func:`~sinew_client.control.defaults.choose` makes of the motion. replan: see
        :func:`~sinew_client.control.replan.parse_rule`.
    motion: {"kind": "as is"}, {"kind": "absolute"} (also with columns, of a state that has other numbers too),
        {"kind": "relative", "action": [...], "state": [...]} or
        {"kind": "offsets", "action": [...], "state": [...], "scale": 1, "low": ..., "high": ...}.
    limits: see :meth:`~sinew_client.control.safety.Limits.parse`; None for none. They hold for what the robot is sent.
    max_age: seconds after its frame beyond which a row is not executed; None: a row is valid in its own step.
    deadline: seconds to wait for an answer. stale: seconds beyond which a frame is too old to act on.
    finish: execute the rows at hand after a request has failed, instead of holding at once.
    future: tell the policy the state that the robot will have when the answer arrives.
    committed_rows: rows that the policy was trained to continue, as it states in its metadata; 0: none, or not known.
        Real-time chunking as trained then never commits to more: the robot stands still for the rest of the delay.
    substeps: commands per control step, for actuators that want a higher rate.
    refine: control steps after its frame up to which an edge adapter refines a chunk; 0: there is none.
    chunk_size: rows of the policy's chunks, as it states them: more are not taken; 0: not known, then
        :data:`~sinew_client.protocol.MAX_ROWS`.
    watchdog: hold the robot from another thread while its loop is late, as where ``observe`` blocks (:class:`Loop`).
    filter: of the rows before they are sent (:func:`~sinew_client.control.smoothing.parse_filter`); "": none.
    speed: at which chunks are played, above 0 and at most 1.
    stale_of: seconds beyond which a frame is too old to act on, of cameras that differ from ``stale``, and of "state".
    skew: seconds by which the newest frames of two cameras may be apart; None: any. Both count where the robot says
        when each frame was exposed (``times`` of its observations).
    rest: where the robot goes at the end of a run (:mod:`~sinew_client.control.rest`): "hold" for nowhere, "first", the
        numbers of a pose, or the name of one of the robot's. None: :class:`~sinew_client.control.run.RunPlan` chooses.
    fusion: how the windows of a stream are fused (:func:`~sinew_client.control.blend.parse_fusion`); "": chunks are
        asked for. Of a stream, ``hz`` is the rate of its nodes, ``stale`` counts for the frame that a node was made
        from, ``chunk_size`` for the nodes of a window, and motion says only where the robot is before its first
        command: nodes go out as they come.
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
    skew: float | None = None
    rest: str | Sequence[float] | None = None

    def __post_init__(self) -> None:
        for name in ("hz", "deadline", "stale", "max_age", "speed", "skew"):
            value = getattr(self, name)
            if not (value is None and name in ("max_age", "skew")):
                _above_zero(name, value)
                object.__setattr__(self, name, float(value))  # as a journal says it, whatever numpy calls it
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                words = " or ".join(kind.__name__ for kind in kinds)
                raise SettingsError(f"{name}: expected {words}, got {shown(value)}")
        for name, value in self.stale_of.items():
            _above_zero(f"stale_of.{named(name)}", value)
        if not 1e-3 <= self.hz <= 1e5:
            raise SettingsError(f"hz: expected 0.001 to 100000, got {self.hz:g}")
        if self.speed > 1.0:
            raise SettingsError(f"speed: expected at most 1, as the policy was trained, got {self.speed:g}")
        if not 1 <= self.substeps <= 100:
            raise SettingsError(f"substeps: expected 1 to 100, got {self.substeps}")
        if self.committed_rows < 0:
            raise SettingsError(f"committed_rows: expected 0 or more, got {self.committed_rows}")
        if self.refine < 0:
            raise SettingsError(f"refine: expected 0 or more control steps, got {self.refine}")
        if not 0 <= self.chunk_size <= LARGEST_CHUNK:
            raise SettingsError(f"chunk_size: expected 0 to {LARGEST_CHUNK} rows, got {self.chunk_size}")
        for name in _OF_CHUNKS if self.fusion else ():
            if getattr(self, name) != getattr(Settings, name):
                raise SettingsError(f"{name}: expected none beside fusion, got {shown(getattr(self, name))}")

    @property
    def period(self) -> float:
        """Return seconds between two control steps."""
        return 1.0 / self.hz

    @property
    def choice(self) -> Choice:
        """Return the hand-over that is played and why. Raises SettingsError for one that is none."""
        try:
            return choose(self.handover, self.motion, refined=bool(self.refine))
        except ValueError as error:
            raise SettingsError(str(error)) from error

    def controller(self, dim: int) -> BaseController:
        """Return a controller for commands of ``dim`` numbers. Raises ClientError that names a bad setting."""
        return self.of_stream(dim) if self.fusion else self.of_chunks(dim)

    def of_stream(self, dim: int) -> StreamController:
        """Return a controller of a stream's windows."""
        try:
            fusion = parse_fusion(self.fusion)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        motion = self.parse_motion()
        limits = self._limits(dim)
        if limits is not None and limits.boxed.any():
            raise SettingsError("limits.workspace_low, limits.workspace_high: expected none beside fusion")
        guard = Guard(limits, self.period, motion.still(dim))
        return StreamController(fusion, self.hz, self.stale, motion, guard, dim, self.chunk_size or MAX_ROWS)

    def of_chunks(self, dim: int) -> Controller:
        """Return a controller of chunks by request."""
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
                "replan: expected a hand-over beside disagreement whose chunks overlap (aligned, ensemble, ...), got"
                f" {self.choice.handover}, under which the robot waits for the next one"
            )
        if self.future and type(player.motion) is Motion:
            raise SettingsError(
                "future: expected a motion beside it, what actions are measured from (absolute, relative, offsets)"
            )
        if self.refine and player.handover.method == "rtc":
            raise SettingsError(
                f"handover: expected one without real-time chunking beside an edge adapter, got {self.handover}: the"
                " server is told which rows will be executed, and the adapter changes them"
            )
        if self.substeps > 1 and not isinstance(player.motion, (Absolute, Relative)):
            raise SettingsError(
                "substeps: expected motion absolute or relative; between other rows there is no way"
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
        """Raise :class:`SettingsError` where chunks cannot be played slower than they come."""
        if self.speed == 1.0:
            return
        if type(player.motion) is Motion:
            raise SettingsError(
                "speed: expected motion absolute, relative or offsets; between other rows there is no way"
            )
        if self.refine or self.future or player.handover.method == "rtc":
            raise SettingsError(
                "speed: expected 1 beside real-time chunking, an edge adapter or future, which count rows as the policy"
                f" was trained, got {self.speed:g}"
            )

    def check_start(self, dim: int, state_dim: int | None = None) -> None:
        """Raise :class:`SettingsError` where limits of velocity or acceleration have nothing to begin with. state_dim:
        numbers of the robot's state, where they are known before it is observed."""
        if (limits := self._limits(dim)) is not None:
            check_start(limits, self.parse_motion(), state_dim)

    def _limits(self, dim: int) -> Limits | None:
        return Limits.parse(self.limits, dim) if self.limits is not None else None

    def parse_motion(self) -> Motion:
        """Return what actions are measured from; of a stream, whose nodes are added to nothing, where the robot is."""
        try:
            found = parse_motion(self.motion)
        except ValueError as error:
            raise SettingsError(str(error)) from error
        return Motion() if self.fusion and isinstance(found, Relative) else found

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _above_zero(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < 1e30:
        raise SettingsError(f"{name}: expected a number above 0, got {shown(value)}")


def check_workspace(limits: Limits, motion: Motion) -> None:
    """Raise :class:`SettingsError` where nothing says to which pose a command leads that has a workspace."""
    lost = [limits.name(int(at)) for at in np.flatnonzero(limits.boxed & ~motion.posed(limits.dim))]
    if lost:
        raise SettingsError(
            "limits.workspace_low, limits.workspace_high: expected a motion that says to which pose a command leads"
            f" (absolute, or relative and offsets of these columns), got none for {', '.join(lost)}"
        )


def check_start(limits: Limits, motion: Motion, state_dim: int | None = None) -> None:
    """Raise :class:`SettingsError` where nothing says from where limits of velocity or acceleration count: the first
    command would not be limited, or never be sent. state_dim: numbers of a state, if known."""
    placed = motion.placed(limits.dim)
    seen = placed if state_dim is None else np.isfinite(motion.position(np.zeros(state_dim), limits.dim))
    known = seen | ~np.isnan(motion.still(limits.dim)) | ~np.isnan(limits.still)
    lost = limits.paced & ~known
    if lost.any():
        missing = ", ".join(limits.name(int(joint)) for joint in np.flatnonzero(lost))
        given = ", ".join(f"limits.{name}" for name in RATES if np.isfinite(getattr(limits, name)).any())
        if placed[lost].all():  # it says so, of another state
            columns = list(range(limits.dim))
            raise SettingsError(
                f"{given}: expected to know where the robot is before its first command; a command has {limits.dim}"
                f" numbers, the state {state_dim}, so say which of them they are, as by the motion"
                f' {{"kind": "absolute", "action": {columns}, "state": {columns}}} for the first {limits.dim}'
            )
        raise SettingsError(
            f"{given}: expected a motion that says where the robot is before its first command"
            " (absolute: where its state says), or limits.still, the command of a robot that stands still"
            f" (0 of velocities and offsets), got neither for {missing}"
        )
