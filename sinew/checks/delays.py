"""Measure the delays of a robot's cameras and actuators. The input is a recording of its commands, states and frames
during a small test motion (a wobble).

The robot moves along a known smooth curve (:mod:`sinew.checks.wobble`). A delay is the time by which one signal must
be shifted so that it explains most of the variance of another signal, by least squares. Two delays are measured:

* from a command until the state has reached it (the actuators, and the reading of the state)
* from the exposure of a frame until the frame is in memory (the camera)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from sinew.checks.wiring.thumbnails import SAMPLES, imprint, is_frame, sample

EARLIEST_S, LATEST_S = -0.1, 1.0  # the search tries shifts in this interval, in seconds
GRID_S = 0.002  # seconds between two shifts of the search; a parabola interpolates between them
NEAR_S = 0.1  # largest difference between the shift of one part and the shift of the whole trace
PARTS = 6  # the trace is split into this many parts; the 95 % interval is that of the mean of their shifts
T_QUANTILE = 2.571  # 97.5 % quantile of Student's t distribution with PARTS - 1 degrees of freedom
EXPLAINED = 0.5  # a command must explain at least this share of the variance of its state
SEEN = 0.02  # a command must explain at least this share of a frame's variance; most of a frame does not move
CELLS = 32  # a frame is reduced to this many rows and columns of mean values
# If the durations of `observe` differ by more than this share of a frame period, this shows that `observe` waits for
# the next frame.
WAITS = 0.25

Signal = Callable[[np.ndarray], np.ndarray]  # times [n] -> regressors [n, k]


@dataclass(frozen=True)
class Look:
    """One reading of a camera by the control loop.

    Attributes:
        begun: Time when the robot was asked for an observation, in seconds of the loop's clock.
        time: Time when the robot had answered.
        cells: The frame as means of cells, float32 [CELLS * CELLS]; None if the frame is the same as in the previous
            reading.
        stated: The robot's own time of the exposure, in seconds of the same clock; None if the robot states none.
    """

    begun: float
    time: float
    cells: np.ndarray | None
    stated: float | None = None


@dataclass
class DelayTrace:
    """The commands, states and frames that were recorded during the test motion (wobble). Times are seconds of the
    loop's clock.

    Attributes:
        names: Name of each number of a command.
        step: Seconds between two observations, if observations are synchronous with the commands; else 0. Delays
            shorter than such a step cannot be measured.
        commands: Time and target, float [D], of each command.
        states: Time and position, float [D], of each control step; NaN for numbers without a position.
        looks: Camera -> its readings.
    """

    names: Sequence[str]
    step: float = 0.0
    commands: list[tuple[float, np.ndarray]] = field(default_factory=list)
    states: list[tuple[float, np.ndarray]] = field(default_factory=list)
    looks: dict[str, list[Look]] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)

    def frame(self, camera: str, begun: float, time: float, frame: Any, stated: float | None) -> None:
        """Record one reading of a camera.

        Args:
            camera: Name of the camera.
            begun: Time when the robot was asked for the observation, in seconds of the loop's clock.
            time: Time when the robot had answered.
            frame: uint8 [height, width, 3] or floats in [0, 1]. Any other array is ignored.
            stated: The robot's own time of the exposure; None if the robot states none.
        """
        pixels = np.asarray(frame)
        if not is_frame(pixels):
            return
        cells, now = None, imprint(pixels)
        if self._last.get(camera) != now:
            of = SAMPLES // CELLS
            cells = sample(pixels).mean(-1).reshape(CELLS, of, CELLS, of).mean((1, 3)).ravel()
        self._last[camera] = now
        self.looks.setdefault(camera, []).append(Look(begun, time, cells, stated))


@dataclass(frozen=True)
class Delay:
    """A delay in seconds, with its 95 % interval.

    Attributes:
        seconds: The delay; NaN if it could not be measured.
        low: Lower end of the interval.
        high: Upper end of the interval.
        explained: Share of the variance that the shifted signal explains.
        why: The reason if the delay could not be measured; "" if it was measured.
    """

    seconds: float = np.nan
    low: float = np.nan
    high: float = np.nan
    explained: float = 0.0
    why: str = ""

    @property
    def measured(self) -> bool:
        """Return True if the delay was measured, and False if only the reason for its absence is known."""
        return not self.why

    def text(self) -> str:
        """Return the delay with its interval in milliseconds as text, or the reason why it was not measured."""
        if self.why:
            return self.why
        return f"{1e3 * self.seconds:.0f} ms ({1e3 * self.low:.0f} to {1e3 * self.high:.0f})"


@dataclass(frozen=True)
class CameraDelay:
    """The delays of a camera.

    Attributes:
        transfer: From the exposure of a frame until it is in memory.
        wait: Mean seconds that a frame is in memory before a control step observes it.
        period: Median seconds between two frames.
        clock: How many seconds the robot's own times are later than the exposure; None if the robot states no times.
    """

    transfer: Delay
    wait: float
    period: float
    clock: Delay | None

    @property
    def age(self) -> float:
        """Return the mean seconds from the exposure of a frame until an observation contains the frame."""
        return self.transfer.seconds + self.wait


@dataclass(frozen=True)
class Delays:
    """All delays of a robot.

    Attributes:
        joints: Name of a number of the command -> its delay.
        cameras: Name of a camera -> its delays.
    """

    joints: Mapping[str, Delay]
    cameras: Mapping[str, CameraDelay]

    @property
    def actuation(self) -> float:
        """Return the longest delay from a command to the state, in seconds; NaN if none was measured."""
        return max((each.seconds for each in self.joints.values() if each.measured), default=np.nan)

    @property
    def transfer(self) -> float:
        """Return the longest delay from an exposure until the frame is in memory, in seconds; NaN if none was
        measured."""
        measured = (each.transfer for each in self.cameras.values() if each.transfer.measured)
        return max((max(0.0, each.seconds) for each in measured), default=np.nan)

    def to_dict(self) -> dict[str, Any]:
        """Return the delays as a JSON-ready dict. Values that were not measured are None."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(each) for key, each in value.items()}
            return None if isinstance(value, float) and np.isnan(value) else value

        record: dict[str, Any] = plain(asdict(self))
        for name, camera in self.cameras.items():
            record["cameras"][name]["age"] = plain(camera.age)
        return {**record, "actuation": plain(self.actuation), "transfer": plain(self.transfer)}


def measure(trace: DelayTrace) -> Delays:
    """Measure the delays of a robot from the recording of a test motion (wobble).

    Args:
        trace: Commands, states and frames of the motion.

    Returns:
        A delay for each number of the command and for each camera. A delay that could not be measured has the reason.
    """
    times, targets = _columns(trace.commands, len(trace.names))
    looked, positions = _columns(trace.states, len(trace.names))
    joints = {
        name: _joint(times, targets[:, i], looked, positions[:, i], trace.step)
        for i, name in enumerate(trace.names)
    }
    moved = [i for i, name in enumerate(trace.names) if joints[name].measured]
    arm = _Arm.of(times, targets[:, moved], [joints[trace.names[i]] for i in moved]) if moved else None
    cameras = {name: _camera(looks, arm, looked, trace.step) for name, looks in trace.looks.items()}
    return Delays(joints, cameras)


def shift(times: np.ndarray, values: np.ndarray, signal: Signal, step: float = 0.0) -> Delay:
    """Return the delay of values after a signal: the shift at which the signal explains most of their variance.

    Args:
        times: Times of the measurements in seconds, [n], ascending.
        values: The measured values, [n, p].
        signal: Function that returns the regressors at some times, [n, k]. A regressor is a value from which the
            measured values are predicted linearly.
        step: Seconds between two observations, if observations are synchronous with the commands; else 0.

    Returns:
        The delay. Its interval is the 95 % confidence interval of the mean over :data:`PARTS` parts of the trace, and
        at least ``step`` wide.
    """
    if len(times) < 8 * PARTS:
        return Delay(why=f"{len(times)} observations; at least {8 * PARTS} are needed")
    if not np.ptp(values, axis=0).any():
        return Delay(why="the signal did not change")
    best, explained, blur = _best(times, values, signal, EARLIEST_S, LATEST_S)
    edges = np.linspace(times[0], times[-1], PARTS + 1)
    parts = []
    for low, high in itertools.pairwise(edges):
        inside = (times >= low) & (times <= high)
        if inside.sum() >= 8 and np.ptp(values[inside], axis=0).any():
            parts.append(_best(times[inside], values[inside], signal, best - NEAR_S, best + NEAR_S)[0])
    if len(parts) < PARTS:
        return Delay(why=f"the signal changed only in {len(parts)} of {PARTS} parts of the time")
    half = max(blur, step / 2, T_QUANTILE * float(np.std(parts, ddof=1)) / np.sqrt(PARTS))
    return Delay(best, best - half, best + half, explained)


def _best(
    times: np.ndarray, values: np.ndarray, signal: Signal, low: float, high: float
) -> tuple[float, float, float]:
    """Search the shift that explains most of the variance.

    Several shifts can explain the same share if observations are synchronous with commands, for example in a simulation
    that advances with each command.

    Args:
        times: When the values were measured, seconds, [n].
        values: The values, [n, p].
        signal: Returns the regressors at some times.
        low: Smallest shift of the search, seconds.
        high: Largest shift of the search, seconds.

    Returns:
        The shift, the explained share of the variance, and half the width of the interval of equally good shifts.
    """
    centred = values - values.mean(0)
    total = float((centred**2).sum())
    tried = np.arange(low, high + GRID_S / 2, GRID_S)

    def share(by: float) -> float:
        regressors = signal(times - by)
        regressors = regressors - regressors.mean(0)
        basis, sizes, _ = np.linalg.svd(regressors, full_matrices=False)
        basis = basis[:, sizes > 1e-6 * max(float(sizes[0]), 1e-30)]
        return float(((basis.T @ centred) ** 2).sum()) / total

    shares = np.array([share(by) for by in tried])
    at = int(shares.argmax())
    equal = tried[shares > shares[at] - 1e-9]
    if len(equal) > 1 and np.ptp(equal) < (len(equal) - 0.5) * GRID_S:
        return float(equal.mean()), float(shares[at]), float(np.ptp(equal)) / 2
    if 0 < at < len(tried) - 1:
        before, here, after = shares[at - 1 : at + 2]
        bend = before - 2 * here + after
        return (
            float(tried[at] + (GRID_S * (before - after) / (2 * bend) if bend < 0 else 0.0)),
            float(here),
            0.0,
        )
    return float(tried[at]), float(shares[at]), 0.0


def _columns(rows: Sequence[tuple[float, np.ndarray]], dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a list of (time, numbers) into the times [n] and the numbers [n, dim]."""
    if not rows:
        return np.zeros(0), np.zeros((0, dim))
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows], np.float64)


def _joint(
    times: np.ndarray, targets: np.ndarray, looked: np.ndarray, positions: np.ndarray, step: float
) -> Delay:
    """Return the delay of one number of the state after its command.

    Args:
        times: Times of the commands, [m].
        targets: The commanded values, [m].
        looked: Times of the states, [n].
        positions: The measured values, [n]; NaN if the state does not contain the number.
        step: See :class:`DelayTrace`.
    """
    if not len(times) or not np.ptp(targets):
        return Delay(why="this joint was not moved")
    if not np.isfinite(positions).all():
        return Delay(why="the state does not contain its position")

    def commanded(moments: np.ndarray) -> np.ndarray:
        return _held(times, targets, moments)[:, None]

    delay = shift(looked, positions[:, None], commanded, step)
    if delay.measured and delay.explained < EXPLAINED:
        return Delay(
            explained=delay.explained,
            why=f"this joint did not follow its commands, which explain {100 * delay.explained:.0f} % of its motion",
        )
    return delay


@dataclass(frozen=True)
class _Arm:
    """The part of the recorded motion that comes from joints that follow their commands.

    Attributes:
        commanded: The main direction of the commands, and its square, because a picture does not change linearly with
            a joint.
        actuation: Mean delay from the commands to the joints, in seconds.
        half: Half of the width of its 95 % interval.
    """

    commanded: Signal
    actuation: float
    half: float

    @classmethod
    def of(cls, times: np.ndarray, targets: np.ndarray, delays: Sequence[Delay]) -> _Arm:
        centred = targets - targets.mean(0)
        scaled = centred / centred.std(0)
        main = scaled @ np.linalg.svd(scaled, full_matrices=False)[2][0]

        def commanded(moments: np.ndarray) -> np.ndarray:
            at = _held(times, main, moments)
            return np.stack([at, at**2], axis=1)

        half = max((each.high - each.low) / 2 for each in delays)
        return cls(commanded, float(np.mean([each.seconds for each in delays])), half)

    def behind(self, times: np.ndarray, cells: np.ndarray, step: float) -> Delay:
        """Return the delay from the time at which the robot had the pose in a frame until the frame arrives. It is the
        delay of the frame after the command, minus the delay of the actuators.

        Args:
            times: Times of the frames, [n].
            cells: The frames as means of cells, [n, CELLS * CELLS].
            step: See :class:`DelayTrace`.
        """
        delay = shift(times, cells, self.commanded, step)
        if delay.measured and delay.explained < SEEN:
            why = f"the motion explains {100 * delay.explained:.1f} % of what changed in its frames"
            return Delay(explained=delay.explained, why=why)
        seconds = delay.seconds - self.actuation
        half = float(np.hypot((delay.high - delay.low) / 2, self.half))
        return replace(delay, seconds=seconds, low=seconds - half, high=seconds + half)


def _held(times: np.ndarray, values: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Return the value that was commanded at each time in ``moments``, [n]. A command stays in effect until the next
    command.
    """
    return values[np.maximum(np.searchsorted(times, moments, side="right") - 1, 0)]


def _camera(looks: Sequence[Look], arm: _Arm | None, steps: np.ndarray, step: float) -> CameraDelay:
    """Return the delays of one camera.

    Args:
        looks: The readings of the camera.
        arm: The motion of the joints; None if no joint moved.
        steps: Times of the observations of the control steps, [n].
        step: Seconds between two observations, if observations are synchronous with the commands; else 0.
    """
    fresh = [i for i, each in enumerate(looks) if each.cells is not None][1:]
    if len(fresh) < 2:
        return CameraDelay(Delay(why="its frames did not change"), np.nan, np.nan, None)
    # If the durations of readings vary between zero and a frame period, `observe` waits for the next frame, and a frame
    # arrives at the end of its reading. Otherwise the frame arrived at some time since the previous reading.
    period = float(np.median(np.diff([looks[i].time for i in fresh])))
    lasted = np.quantile([each.time - each.begun for each in looks], (0.1, 0.9))
    waits = step > 0 or float(np.ptp(lasted)) > WAITS * period
    arrived = np.array([looks[i].time if waits else (looks[i - 1].time + looks[i].time) / 2 for i in fresh])
    at = np.searchsorted(arrived, steps, side="right") - 1
    wait = float(np.mean(steps[at >= 0] - arrived[at[at >= 0]]))
    if arm is None:
        return CameraDelay(Delay(why="no joint moved"), wait, period, None)
    cells = np.array([looks[i].cells for i in fresh], np.float64)
    stated = [np.nan if (time := looks[i].stated) is None else time for i in fresh]
    clock = None if np.isnan(stated).any() else arm.behind(np.array(stated), cells, step)
    return CameraDelay(arm.behind(arrived, cells, step), wait, period, clock)
