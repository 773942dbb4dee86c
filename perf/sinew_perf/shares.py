"""The share of the roofline that Sinew's engines reached (``data/shares.toml``), and its use in a prediction.

An engine also waits for launches and for the latency of memory, which a roofline does not contain. These times weigh
more if the work itself is short, so the share depends on the roofline's time. For a request that was not measured,
the share is between those of two measurements: the one with the next shorter and the one with the next longer
roofline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sinew_client.untrusted import parse_toml

from sinew_perf.hardware import Hardware, hardware

# A measurement of the same policy is used if its roofline time is between a quarter and four times the roofline time of
# the prediction.
NEAR = 4.0
RULE = (
    f"A family's own measurement on the machine counts if its roofline is within {NEAR:g} times this one. Otherwise "
    "the share lies between the two measurements with the next rooflines, on a log scale. Beyond all of them the share "
    "of the longest counts, or the time of the shortest. Measurements of the same precision, kind of machine and kind "
    "of ceilings come first."
)
# Key: the format of a component. Value: the same format in the notation WEIGHTS/ACTIVATIONS/CACHE of
# sinew_perf.precision.
_FORMATS = {
    "fp8": "fp8/fp8/bf16",
    "int8": "int8/int8",
    "int4": "int4/int8",
}


@dataclass(frozen=True, slots=True)
class MeasuredShare:
    """One measurement of an inference. ``data/shares.toml`` explains the attributes. None means the model's own
    value.
    """

    family: str
    model: str
    machine: str
    engine: str
    precision: str
    ms: float
    share: float
    source: str
    head: str = ""
    cameras: int | None = None
    prompt_tokens: int | None = None
    chunk: int | None = None
    steps: int | None = None

    @property
    def roofline_ms(self) -> float:
        return self.share * self.ms

    @property
    def dtypes(self) -> dict[str, str]:
        """Return the number format of each component, for :func:`sinew_perf.precision.by_stage`."""
        narrow = _FORMATS.get(self.precision, self.precision)
        head = self.head or self.precision
        return {"vision": narrow, "language": narrow, "head": _FORMATS.get(head, head)}

    @property
    def request(self) -> tuple[Any, ...]:
        """Return all fields of a measurement that must be equal if the measurements of two engines are compared."""
        sizes = (self.cameras, self.prompt_tokens, self.chunk, self.steps)
        return self.model, self.machine, self.precision, self.head, *sizes

    def __str__(self) -> str:
        precision = f"{self.precision}, head {self.head}" if self.head else self.precision
        return f"{self.model} on {self.machine} ({self.engine}, {precision})"


@dataclass(frozen=True, slots=True)
class OthersShare:
    """The share of the roofline that engines of other projects reached.

    Attributes:
        share: Share above 0, at most 1.
        source: Publication or file that contains the number.
    """

    share: float
    source: str


@dataclass(frozen=True, slots=True)
class UsedShare:
    """The share of the roofline that one prediction uses.

    Attributes:
        share: Share above 0, at most 1.
        rows: Measurements behind the share: one, or two that it interpolates. Empty if there is none.
        why: A text that explains how the share follows from the measurements.
    """

    share: float
    rows: tuple[MeasuredShare, ...]
    why: str

    @property
    def engine(self) -> str:
        return ", ".join(dict.fromkeys(row.engine for row in self.rows))


@cache
def measured() -> tuple[MeasuredShare, ...]:
    """Return all measurements of inference times that the package contains."""
    return tuple(MeasuredShare(**row) for row in _packaged()["measured"])


@cache
def others() -> OthersShare:
    return OthersShare(**_packaged()["others"])


def used(
    family: str, precision: str, machine: Hardware, roofline_s: float, fixed: float | None = None
) -> UsedShare:
    """Choose the share of the roofline for a prediction, by ``RULE``.

    Args:
        family: Architecture of the policy.
        precision: Format of vision and language: fp32, bf16, fp8, int8 or int4.
        machine: Machine on which the policy runs.
        roofline_s: Seconds of the inference by the roofline.
        fixed: Share that the user sets. None for the rule.

    Returns:
        The share with the measurements behind it. A kind of machine without measurements gets the share of other
        projects.
    """
    if fixed is not None:
        return UsedShare(fixed, (), "--efficiency")
    pool = _pool(precision, machine)
    if not pool:
        return UsedShare(
            others().share, (), f"of other projects: no machine of kind {machine.kind} was measured"
        )
    roofline_ms = 1e3 * roofline_s

    def apart(row: MeasuredShare) -> float:
        return abs(math.log(row.roofline_ms / roofline_ms))

    own = [row for row in pool if (row.family, row.machine) == (family, machine.name)]
    if own and apart(nearest := min(own, key=apart)) <= math.log(NEAR):
        return UsedShare(nearest.share, (nearest,), str(nearest))
    shorter = [row for row in pool if row.roofline_ms <= roofline_ms]
    longer = [row for row in pool if row.roofline_ms > roofline_ms]
    if not longer:
        row = min(shorter, key=apart)
        return UsedShare(row.share, (row,), f"as {row}, the longest")
    high = min(longer, key=apart)
    # Without a shorter measurement, predict the time of the shortest one: such a short request mostly waits for kernel
    # launches and memory, and this waiting time does not get shorter.
    if not shorter:
        return UsedShare(roofline_ms / high.ms, (high,), f"as long as {high}, the shortest")
    low = min(shorter, key=apart)
    part = math.log(roofline_ms / low.roofline_ms) / math.log(high.roofline_ms / low.roofline_ms)
    share = math.exp((1 - part) * math.log(low.share) + part * math.log(high.share))
    return UsedShare(share, (low, high), f"between {low} and {high}")


def _pool(precision: str, machine: Hardware) -> Sequence[MeasuredShare]:
    """Return the measurements that apply to a machine.

    They are from the same kind of machine and, if possible, with the same kind of peaks (measured or from a data
    sheet) and the same precision. Shorter measurements with another precision are added. If several engines measured
    the same request, the fastest measurement counts.
    """
    machines = hardware()
    rows = [row for row in measured() if machines[row.machine].kind == machine.kind]
    rows = [row for row in rows if machines[row.machine].measured == machine.measured] or rows
    same = [row for row in rows if row.precision == precision] or rows
    shortest = min((row.roofline_ms for row in same), default=0.0)
    rows = same + [row for row in rows if row.roofline_ms < shortest]
    quickest: dict[tuple[Any, ...], MeasuredShare] = {}
    for row in sorted(rows, key=lambda row: row.ms):
        quickest.setdefault(row.request, row)
    return list(quickest.values())


def _packaged() -> Mapping[str, Any]:
    return parse_toml((files("sinew_perf") / "data" / "shares.toml").read_text("utf-8"))  # own file
