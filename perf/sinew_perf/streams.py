"""How fast a stream's loops can turn on one machine: prefixes at the camera's rate, head runs in what is left.

The pattern is that of Ma et al. 2025 ("Running VLAs at Real-time Speed", section 6.1): a slow loop makes a prefix of
each frame, a fast loop runs one evaluation of the head after the other. Where both share the machine and take turns, a
second holds ``camera_hz`` prefixes, and the head has the rest of it. Where they run at once, as on two streams of a
GPU, one computes while the other moves: a second then holds what fits both its arithmetic and its memory traffic.
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
    """States the times of one prefix and one head run, and head runs per second alone and beside the prefixes.

    prefix_s, head_s: as they take one after the other. prefix_sides, head_sides: what computing and moving alone take
    of each, in seconds. sensing_s: from light to the frame in memory. actuation_s: from a command to its effect.
    beside_hz is 0 where the prefixes alone take the whole machine.
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
        """Return the most head runs per second while prefixes run at once with them: neither the arithmetic nor the
        memory traffic of a second is exceeded, and no run is faster than alone."""
        sides = zip(self.prefix_sides, self.head_sides, strict=True)
        left = [max(0.0, 1 - self.camera_hz * prefix) / head for prefix, head in sides if head]
        return min(self.alone_hz, *left)

    @property
    def image_reaction_s(self) -> float:
        """Return the longest time from light to motion: the wait for the next exposure, or for the prefix under way if
        that takes longer; the camera's own delay; the prefix; two runs; the actuator's delay."""
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
    """Return the loops of a policy's stages on a machine.

    parts: vision, prefix and head, as of :meth:`sinew_perf.program.PublishedProgram.components`. efficiency: the share
    of the roofline that software reaches, of arithmetic and of memory alike. Raises :class:`SinewError` for a rate or a
    share that is none.
    """
    if not (camera_hz > 0 and 0 < efficiency <= 1):
        raise SinewError(
            f"camera_hz above 0 and efficiency in (0, 1] expected, got {camera_hz} and {efficiency}"
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
