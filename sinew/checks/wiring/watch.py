"""Collects statistics of a robot's observations over some seconds: of its frames, its states and their times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinew.checks.wiring.cameras import CameraFit
from sinew.checks.wiring.finding import CANNOT_TELL, LOOKS_WRONG, WRONG, Finding
from sinew.checks.wiring.joints import JointFit
from sinew.checks.wiring.thumbnails import imprint, is_frame, thumbnail

ENOUGH = 10  # with fewer observations, an input that never changed is not reported
DARK = 6.0  # a frame with a smaller mean, out of 255, is black
LIT = 20.0  # training frames with a larger mean, out of 255, were not black
FLAT = 2.0  # a frame with a smaller range of pixels, out of 255, has one colour
STALE_S = 0.5  # the setting `stale` of `sinew run` has the same default
AHEAD_S = 0.1
MAX_STATES = 20_000
UINT8 = "frames in 0..1 that are cast to uint8 become black: use (frame * 255).astype(np.uint8)"


@dataclass
class CameraStatistics:
    """Statistics of one camera's frames.

    Attributes:
        sums: Sum of the thumbnails, RGB [8, 8, 3].
        looks: Number of frames.
        low: Smallest pixel.
        high: Largest pixel.
        changes: Number of frames that differ from the previous frame.
        whole: True if all frames have whole numbers.
        size: Height and width of the last frame.
        last: Checksum of the last frame.
    """

    sums: np.ndarray = field(default_factory=lambda: np.zeros((8, 8, 3)))
    looks: int = 0
    low: float = math.inf
    high: float = -math.inf
    changes: int = 0
    whole: bool = True
    size: tuple[int, int] = (0, 0)
    last: int | None = None

    def add(self, frame: np.ndarray, exact: bool = True) -> None:
        """Add a frame.

        Args:
            frame: uint8, or floats in [0, 1], [height, width, 3].
            exact: Also detect whether any bit changed since the previous frame.
        """
        cells = thumbnail(frame)
        self.sums += cells
        self.looks += 1
        self.whole = self.whole and frame.dtype.kind == "u"
        self.size = frame.shape[0], frame.shape[1]
        pixels = frame[:: max(1, frame.shape[0] // 64), :: max(1, frame.shape[1] // 64)]
        unit = 255.0 if frame.dtype.kind == "f" else 1.0
        self.low = min(self.low, unit * float(pixels.min()))
        self.high = max(self.high, unit * float(pixels.max()))
        if not exact:
            return
        now = imprint(frame)
        self.changes += self.last is not None and now != self.last
        self.last = now

    @property
    def mean(self) -> np.ndarray:
        """Return the mean thumbnail, RGB [8, 8, 3], 0 to 255."""
        return self.sums / max(self.looks, 1)


@dataclass
class WiringWatch:
    """Statistics of a robot's observations during some seconds.

    Attributes:
        cameras: Camera -> statistics of its frames.
        states: The states.
        times: The robot's own times of its frames.
        ages: Seconds from these times to the observation, if both have the same clock.
        took: Seconds that each observation took.
        faults: Error of `observe` -> how often it occurred.
        odd: Camera -> description of an array that is not a frame.
        looks: Number of observations.
        exact: Detect inputs that never change. This compares every bit.
    """

    cameras: dict[str, CameraStatistics] = field(default_factory=dict)
    states: list[np.ndarray] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    looks: int = 0
    exact: bool = True

    def add(self, seen: Mapping[str, Any], now: float | None = None, took: float | None = None) -> None:
        """Add an observation.

        Args:
            seen: The observation, with ``images``, ``state`` and perhaps ``time``.
            now: The present time of the clock of ``time``; None if unknown.
            took: Seconds that the observation took; None if unknown.
        """
        self.looks += 1
        images = seen.get("images")
        for name, image in images.items() if isinstance(images, Mapping) else ():
            frame = np.asarray(image)
            if is_frame(frame) and (frame.dtype == np.uint8 or frame.dtype.kind == "f"):
                self.cameras.setdefault(str(name), CameraStatistics()).add(frame, self.exact)
            else:
                self.odd[str(name)] = f"{frame.dtype} {list(frame.shape)}"
        state = np.asarray(seen.get("state", ()))
        if state.dtype.kind in "fiu" and len(self.states) < MAX_STATES:
            self.states.append(state.astype(np.float64).reshape(-1))
        stamp = seen.get("time")
        if isinstance(stamp, int | float) and not isinstance(stamp, bool):
            self.times.append(float(stamp))
            if now is not None:
                self.ages.append(now - float(stamp))
        if took is not None:
            self.took.append(took)

    def fault(self, text: str) -> None:
        """Count an error that the robot's method `observe` has raised."""
        self.faults[text] = self.faults.get(text, 0) + 1

    def state(self, dim: int) -> np.ndarray:
        """Return the states that have ``dim`` finite numbers, [n, dim]."""
        fine = [each for each in self.states if each.shape == (dim,) and np.isfinite(each).all()]
        return np.stack(fine) if fine else np.zeros((0, dim))

    def pictures(self, names: Sequence[str], cameras: CameraFit, lit: Mapping[str, float]) -> list[Finding]:
        """Return a finding for each camera whose frames look wrong.

        Args:
            names: The cameras.
            cameras: The training record of the cameras.
            lit: Camera -> mean of its pixels in training, if known.
        """
        results, usable = [], {}
        for name in names:
            if (shown := self.cameras.get(name)) is None:
                continue
            if (blind := _blind(name, shown, lit.get(name, math.inf))) is not None:
                results.append(blind)
            else:
                usable[name] = shown.mean
        return results + cameras.findings(usable)

    def numbers(self, joints: JointFit) -> list[Finding]:
        """Return a finding for each number of the states that looks wrong."""
        bad = sum(not np.isfinite(each).all() for each in self.states)
        results = []
        if bad:
            text = f"not finite in {bad} of {len(self.states)} observations"
            results.append(
                Finding(
                    "state", WRONG, "not finite", text, "finite numbers", "check that the bus is read in time"
                )
            )
        return results + joints.findings(self.state(len(joints.mean)))

    def still(self, joints: JointFit, runs: Mapping[str, int]) -> list[Finding]:
        """Return a finding for each camera and joint that never changed although others did.

        Args:
            joints: The training record of the joints.
            runs: Camera -> longest run of equal frames in training, if known.
        """
        if self.looks < ENOUGH or not self.exact:
            return []
        states = self.state(len(joints.mean))
        span = np.ptp(joints.steps(states), axis=0) / joints.std if len(states) >= ENOUGH else np.zeros(0)
        moved = [name for name, shown in self.cameras.items() if shown.changes >= ENOUGH]
        motion = bool((span > 1).any())
        frozen = [
            name
            for name, shown in self.cameras.items()
            if shown.looks >= ENOUGH + 2 * runs.get(name, ENOUGH) and not shown.changes
        ]
        results = []
        for name in frozen if moved or motion else ():
            why = (
                f"camera {moved[0]} changed {self.cameras[moved[0]].changes} times"
                if moved
                else "the robot moved"
            )
            results.append(
                Finding(
                    f"camera {name}",
                    LOOKS_WRONG,
                    "frozen",
                    f"the same frame to the bit in {self.cameras[name].looks} observations, while {why}",
                    "frames that change",
                    "check that the camera's thread still reads frames",
                )
            )
        if frozen and not moved and not motion:
            text = (
                f"cannot decide whether {', '.join(frozen)} is frozen: the robot and its frames did not change in"
                f" {self.looks} observations"
            )
            advice = "move something in front of it; the noise of a real camera changes every frame"
            results.append(Finding("cameras", CANNOT_TELL, "frozen", text, advice=advice))
        if len(span) >= 2 and (span > 1).sum() >= max(1, len(span) - 1):
            results += [
                Finding(
                    f"state.{joints.names[i]}",
                    LOOKS_WRONG,
                    "never moves",
                    f"the same number to the bit in {len(states)} observations, while all others moved",
                    f"a joint that moves: standard deviation {joints.std[i]:.2g} in training",
                    "check that this joint is read",
                )
                for i in np.flatnonzero(span == 0)
                if len(states) >= 3 * ENOUGH
            ]
        return results

    def clock(self, hz: float | None) -> list[Finding]:
        """Return findings about wrong times of the frames, and about a low rate of observations.

        Args:
            hz: Required observations per second; None if unknown.
        """
        results = []
        times = np.array(self.times)
        if len(times) and not np.isfinite(times).all():
            results.append(
                Finding("time", WRONG, "not finite", "time is not finite", "seconds of time.monotonic()")
            )
        elif self.ages:
            age = float(np.median(self.ages))
            if age < -AHEAD_S:
                results.append(
                    Finding(
                        "time",
                        WRONG,
                        "another clock",
                        f"frames are from {-age:.3g} s in the future: another clock (Unix time?)",
                        "seconds of time.monotonic() of the newest frame",
                        "send time.monotonic() of the exposure, or leave `time` out",
                    )
                )
            elif age > STALE_S:
                results.append(
                    Finding(
                        "time",
                        LOOKS_WRONG,
                        "stale",
                        f"frames are {age:.3g} s old",
                        f"at most {STALE_S:g} s; `sinew run` holds the robot if frames are older (setting stale)",
                        "read the newest frame instead of the oldest of a buffer",
                    )
                )
        if len(times) >= ENOUGH and np.isfinite(times).all() and np.ptp(times) == 0:
            text = f"the same time in {len(times)} observations"
            results.append(Finding("time", LOOKS_WRONG, "stands still", text, "the time of the newest frame"))
        if self.took and hz:
            took = float(np.median(self.took))
            if took > 1 / hz:
                results.append(
                    Finding(
                        "rate",
                        LOOKS_WRONG,
                        "slow",
                        f"an observation takes {1e3 * took:.3g} ms, so {1 / took:.3g} a second",
                        f"{hz:g} a second, the control rate of the policy",
                        "read each camera in its own thread, and return the newest frames",
                    )
                )
        return results


def _blind(name: str, shown: CameraStatistics, lit: float) -> Finding | None:
    """Return a finding if a camera's frames are black or have only one colour; None if the frames show a picture.

    Args:
        name: Name of the camera.
        shown: Statistics of the camera's frames.
        lit: Mean of the camera's pixels in training.
    """
    subject, mean = f"camera {name}", float(shown.mean.mean())
    usual = f"; {lit:.3g} in training" if math.isfinite(lit) else ""
    if shown.whole and shown.high <= 1:
        kind, seen = (
            ("black", "black") if shown.high == 0 else ("0..1 as uint8", "uint8 with no value above 1")
        )
        return Finding(
            subject,
            WRONG,
            kind,
            f"{seen} in {shown.looks} observations{usual}",
            "pixels from 0 to 255",
            UINT8,
        )
    if mean < DARK and lit > LIT:
        text = f"black: {mean:.3g} of 255 on average{usual}"
        return Finding(
            subject, LOOKS_WRONG, "black", text, "a picture", f"check cap, exposure and light; {UINT8}"
        )
    if shown.high - shown.low <= FLAT and lit > LIT:
        text = f"one colour everywhere ({mean:.3g} of 255){usual}"
        return Finding(
            subject,
            LOOKS_WRONG,
            "one colour",
            text,
            "a picture",
            "check that it is plugged in and its cap is off",
        )
    return None
