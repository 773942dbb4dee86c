"""How fast a stream's loops can turn on one machine: prefixes at the camera's rate, head runs in what is left.

The pattern is that of Ma et al. 2025 ("Running VLAs at Real-time Speed", section 6.1): a slow loop makes a prefix of
each frame, a fast loop runs one evaluation of the head after the other. Where both share the machine, a second holds
``camera_hz`` prefixes, and the head has the rest of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sinew.core import SinewError
from sinew.perf.hardware import Hardware
from sinew.perf.operators import Component
from sinew.perf.roofline import timing


@dataclass(frozen=True, slots=True)
class LoopRates:
    """Times of one prefix and one head run, and head runs per second alone and beside the prefixes.

    beside_hz is 0 where the prefixes alone take the whole machine.
    """

    prefix_s: float
    head_s: float
    camera_hz: float

    @property
    def alone_hz(self) -> float:
        return 1 / self.head_s

    @property
    def beside_hz(self) -> float:
        return max(0.0, 1 - self.camera_hz * self.prefix_s) / self.head_s

    @property
    def image_reaction_s(self) -> float:
        """Return the longest time from light to a node: the wait for the next exposure, or for the prefix under way if
        that takes longer; the prefix; two runs."""
        return max(1 / self.camera_hz, self.prefix_s) + self.prefix_s + 2 * self.head_s


def loops(
    parts: Sequence[Component], machine: Hardware, camera_hz: float, efficiency: float = 1.0
) -> LoopRates:
    """Return the loops of a policy's stages on a machine.

    parts: vision, prefix and head, as of :meth:`sinew.perf.program.Program.components`. efficiency: the share of the
    roofline that software reaches. Raises :class:`SinewError` for a rate or a share that is none.
    """
    if not (camera_hz > 0 and 0 < efficiency <= 1):
        raise SinewError(
            f"camera_hz above 0 and efficiency in (0, 1] expected, got {camera_hz} and {efficiency}"
        )
    *before, head = (timing(part, machine).seconds / efficiency for part in parts)
    return LoopRates(sum(before), head / parts[-1].repeats, camera_hz)
