"""Predict the rates of a stream's two loops on one machine: prefixes at the camera's rate, and head runs in the
remaining time.

The pattern is from Ma et al. 2025 ("Running VLAs at Real-time Speed", section 6.1). A slow loop computes a prefix of
each frame, and a fast loop runs the action head repeatedly. If both loops take turns on the machine, each second
contains ``camera_hz`` prefixes, and the head uses the rest. If they run at the same time, for example on two streams
of a GPU, one loop computes while the other moves data. Then each second is limited by its total arithmetic and by its
total memory traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinew.core import SinewError

from sinew_perf.hardware import Hardware
from sinew_perf.operators import Component
from sinew_perf.roofline import timing


@dataclass(frozen=True, slots=True)
class LoopRates:
    """The times of one prefix (the context that is computed from a frame) and of one run of the action head, and the
    rates that follow from them.

    Attributes:
        prefix_s: Time of a prefix alone, in seconds.
        head_s: Time of a head run alone, in seconds.
        prefix_sides: For one prefix, the seconds of computing and the seconds of moving data.
        head_sides: For one head run, the seconds of computing and the seconds of moving data.
        camera_hz: Frames per second.
        sensing_s: Time from light to the frame in memory, in seconds.
        actuation_s: Time from a command to its effect, in seconds.
    """

    prefix_s: float
    head_s: float
    prefix_sides: tuple[float, float]
    head_sides: tuple[float, float]
    camera_hz: float
    sensing_s: float = 0.0
    actuation_s: float = 0.0

    @property
    def alone_hz(self) -> float:
        return 1 / self.head_s

    @property
    def beside_hz(self) -> float:
        return max(0.0, 1 - self.camera_hz * self.prefix_s) / self.head_s

    @property
    def overlapped_hz(self) -> float:
        """Return the maximum number of head runs per second while prefixes run at the same time. The limits are
        the arithmetic and the memory traffic of a second, and the time of a single run.
        """
        sides = zip(self.prefix_sides, self.head_sides, strict=True)
        left = [max(0.0, 1 - self.camera_hz * prefix) / head for prefix, head in sides if head]
        return min(self.alone_hz, *left)

    @property
    def image_reaction_s(self) -> float:
        """Return the longest time from light to motion. It consists of the wait for the next exposure (or for the
        running prefix, if that takes longer), the camera's delay, the prefix, two head runs, and the actuator's
        delay.
        """
        waiting = max(1 / self.camera_hz, self.prefix_s)
        return waiting + self.sensing_s + self.prefix_s + 2 * self.head_s + self.actuation_s


def loops(
    parts: Sequence[Component],
    machine: Hardware,
    camera_hz: float,
    efficiency: float = 1.0,
    *,
    sensing_s: float = 0.0,
    actuation_s: float = 0.0,
) -> LoopRates:
    """Compute the rates of a stream on a machine.

    Args:
        parts: Vision, prefix and head (:meth:`sinew_perf.program.PublishedProgram.components`).
        machine: The machine.
        camera_hz: Frames per second.
        efficiency: Share of the roofline that software reaches, for arithmetic and memory.
        sensing_s: Time from light to the frame in memory, in seconds.
        actuation_s: Time from a command to its effect, in seconds.

    Raises:
        SinewError: A rate or a share is out of its range.
    """
    if not (camera_hz > 0 and 0 < efficiency <= 1):
        raise SinewError(
            f"expected camera_hz above 0 and efficiency above 0 and at most 1, got {camera_hz} and {efficiency}"
        )
    *before, head = (timing(part, machine) for part in parts)
    runs = efficiency * parts[-1].repeats
    return LoopRates(
        sum(part.seconds for part in before) / efficiency,
        head.seconds / runs,
        (
            sum(part.compute_s for part in before) / efficiency,
            sum(part.memory_s for part in before) / efficiency,
        ),
        (head.compute_s / runs, head.memory_s / runs),
        camera_hz,
        sensing_s,
        actuation_s,
    )
