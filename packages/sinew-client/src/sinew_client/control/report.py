"""The report of a run: achieved rate, late ticks, age of actions, holds with their reasons, clipped commands."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Iterable, Mapping

import numpy as np

from sinew_client.control.authority import AuthorityChange
from sinew_client.control.controller import BaseController, Controller
from sinew_client.control.pace import Pace
from sinew_client.control.watchdog import Watchdog

KEPT = 100_000  # the report stores at most this many ages for each source (a camera, or the state)
LISTED = 8  # if more limits than this changed a command, a report groups the joints by the kind of limit
MAX_SOURCES = 64  # largest number of sources (cameras and the state) whose ages are stored


@dataclass(frozen=True)
class Cadence:
    """The report of a run. Distributions are dicts with p50, p95, p99 and max.

    Attributes:
        hz: Planned control rate, Hz.
        seconds: Time from the first tick to the last tick, seconds.
        rate_hz: Achieved control rate, Hz.
        steps: Number of control steps.
        executed: Number of control steps with a command.
        late: Number of ticks that began more than half a period late.
        skipped: Number of periods without a tick.
        jitter_ms: Lateness of the ticks, ms.
        age_ms: Time from the exposure of a frame to the execution of an action from this frame, ms.
        chunks: Number of accepted chunks.
        failed_requests: Number of requests without an executable answer. Some are errors, which ``faults`` counts.
            The other answers were late or lost.
        held: Number of control steps with a hold, by reason.
        clipped_commands: Number of commands that a limit changed.
        clipped: Number of commands that each limit changed, by "joint.limit".
        faults: Errors by kind (:class:`~sinew_client.faults.Faults`).
        unanswered: Number of failed requests after the last chunk.
        request_ms: Expected duration of the next request, rounded to whole control steps, ms.
        watchdog: True if a watchdog watched the loop.
        watchdog_holds: Number of holds by the watchdog.
        longest_gap_ms: Longest gap between two commands or holds, ms.
        handed: Changes of the driver between policy and human
            (:class:`~sinew_client.control.authority.AuthorityChange`); {} without a take-over.
        filter: Text of the filter, its lag in ms, and the number of control steps in which the lag could not be
            compensated; {} without a filter.
        agreement: In shadow mode: agreement of the policy with the driver
            (:class:`~sinew_client.control.listeners.shadow.ShadowAgreement`).
        sources: If the robot states exposure times: age of each camera and of the state, and the time between frames of
            different cameras ("skew"), ms (:class:`SourceAges`).
        rest: Outcome of the return to the rest pose, with the reason if the robot did not return
            (:class:`~sinew_client.control.rest.RestPose`); {} if the robot never got a command.
    """

    hz: float
    seconds: float
    rate_hz: float
    steps: int
    executed: int
    late: int
    skipped: int
    jitter_ms: dict[str, float]
    age_ms: dict[str, float]
    chunks: int
    failed_requests: int
    held: dict[str, int]
    clipped_commands: int
    clipped: dict[str, int]
    faults: dict[str, Any]
    unanswered: int
    request_ms: float
    watchdog: bool
    watchdog_holds: int
    longest_gap_ms: float
    handed: dict[str, Any]
    filter: dict[str, Any]
    agreement: dict[str, Any]
    sources: dict[str, Any]
    rest: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the printed report, each as (name, text)."""
        lines = [
            ("control rate", f"{self.rate_hz:.2f} Hz of {self.hz:g} over {self.seconds:.1f} s"),
            ("late ticks", f"{self.late} of {self.steps}, {self.skipped} periods skipped"),
            ("tick lateness", _spread(self.jitter_ms)),
            ("longest gap", gap(self.longest_gap_ms, self.watchdog, self.watchdog_holds)),
            ("chunk age", _spread(self.age_ms)),
            ("chunks", f"{self.chunks}, {rate(self.chunks, self.seconds)}; {self._failed()}"),
            ("next chunk due", f"{self.request_ms:.0f} ms after its request, in whole control steps"),
            ("held", f"{sum(self.held.values())} of {self.steps} steps"),
        ]
        lines += [
            ("", f"{count} x {reason}") for reason, count in sorted(self.held.items(), key=lambda x: -x[1])
        ]
        lines.append(("clipped", f"{self.clipped_commands} commands"))
        lines += [("", text) for text in _clipped(self.clipped)]
        lines += [
            ("frames apart" if name == "skew" else f"age of {name}", _spread(ages))
            for name, ages in self.sources.items()
        ]
        if self.filter:
            ms, missing = self.filter["delay_ms"], self.filter["missing"]
            lag = f"{ms:.0f} ms delay, not compensated in {missing} steps"
            lines.append(("filter", f"{self.filter['filter']}: {lag}"))
        if self.handed:
            lines.append(("hand-overs", AuthorityChange(**self.handed).text()))
        if self.rest:
            lines.append(("end", self.rest["text"]))
        return lines + (agreement_rows(self.agreement) if self.agreement else [])

    def _failed(self) -> str:
        return f"{self.failed_requests} requests failed, {self.faults['total']} errors"


def cadence(
    controller: BaseController,
    pace: Pace,
    steps: int,
    failed: int,
    substeps: int,
    watchdog: Watchdog,
    sources: SourceAges,
    listeners: Mapping[str, Any],
) -> Cadence:
    """Assemble the report of a run.

    Args:
        controller: The loop's controller.
        pace: The loop's ticks.
        steps: Number of control steps with a command or a hold.
        failed: Number of requests without an answer.
        substeps: Ticks per control step.
        watchdog: The loop's watchdog.
        sources: Ages of the cameras and of the state.
        listeners: Fields that the loop's listeners report.

    Returns:
        The report.
    """
    smoothing = controller.smoothing if isinstance(controller, Controller) else None
    span = (pace.ticks + pace.skipped) * pace.period
    period = pace.period * substeps
    ages = {1e3 * period * age: count for age, count in controller.ages.items()}
    return Cadence(
        hz=1.0 / period,
        seconds=round(span, 3),
        rate_hz=round(steps / span, 3) if span else 0.0,
        steps=steps,
        executed=sum(controller.ages.values()) + controller.handed.steps,
        late=pace.late,
        skipped=pace.skipped,
        jitter_ms=percentiles(1e3 * second for second in pace.lateness),
        age_ms=percentiles(Counter(ages).elements()),
        chunks=controller.chunks,
        failed_requests=failed,
        held=dict(controller.held),
        clipped_commands=controller.clipped_commands,
        clipped=dict(controller.clipped),
        faults=controller.faults.to_dict(),
        unanswered=controller.unanswered,
        request_ms=round(1e3 * period * controller.delay.steps, 3),
        watchdog=watchdog.active,
        watchdog_holds=watchdog.holds,
        longest_gap_ms=round(1e3 * watchdog.longest, 3),
        handed=controller.handed.to_dict(),
        filter={}
        if smoothing is None
        else {
            "filter": smoothing.design.text,
            "delay_ms": round(1e3 * period * smoothing.design.lag, 3),
            "missing": smoothing.missing,
        },
        sources=sources.to_dict(),
        **{"agreement": {}, "rest": {}, **listeners},
    )


def _clipped(counts: Mapping[str, int]) -> list[str]:
    """List the limits that changed commands, most frequent first. With more than 8 limits, group them by kind."""
    ordered = sorted(counts.items(), key=lambda each: -each[1])
    if len(ordered) <= LISTED:
        return [f"{count} x {name}" for name, count in ordered]
    kinds: dict[str, list[tuple[str, int]]] = {}
    for name, count in ordered:
        joint, _, kind = name.rpartition(".")
        kinds.setdefault(kind, []).append((joint, count))
    lines = []
    for kind, joints in kinds.items():
        more = f" and {len(joints) - 3} more" if len(joints) > 3 else ""
        lines.append(f"{kind}: {', '.join(f'{count} x {joint}' for joint, count in joints[:3])}{more}")
    return lines


class SourceAges:
    """Stores the age of each camera and of the state at each observation, and the time between frames of cameras."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def add(self, ages: Mapping[str, float], cameras: Iterable[str]) -> None:
        """Record one observation.

        Args:
            ages: Age of each camera and of "state", seconds.
            cameras: The cameras with a frame in this observation.
        """
        seconds = dict(ages)
        frames = [ages[name] for name in cameras if name in ages]
        if len(frames) > 1:
            seconds["skew"] = max(frames) - min(frames)
        for name, age in seconds.items():
            if name in self._seconds or len(self._seconds) < MAX_SOURCES:
                own = self._seconds.setdefault(name, [])
                if len(own) < KEPT and math.isfinite(age):
                    own.append(age)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return p50, p95, p99 and max of the ages, in milliseconds, by camera and "state". The entry "skew" has the
        time between frames of different cameras.
        """
        return {name: percentiles(1e3 * age for age in ages) for name, ages in self._seconds.items() if ages}


def gap(milliseconds: float, watched: bool, holds: int) -> str:
    """Format the longest gap between two commands or holds as a text.

    Args:
        milliseconds: The gap.
        watched: True if a watchdog was active.
        holds: Number of holds by the watchdog.
    """
    by = f"{holds} holds by the watchdog" if watched else "no watchdog"
    return f"{milliseconds:.3g} ms between two commands or holds, {by}"


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Compute the percentiles p50, p95 and p99 and the maximum of the values, each rounded to 3 decimals. Without
    values, the result is {}.
    """
    numbers = np.fromiter(values, np.float64)
    if not numbers.size:
        return {}
    marks = {f"p{q}": round(float(np.percentile(numbers, q)), 3) for q in (50, 95, 99)}
    return {**marks, "max": round(float(numbers.max()), 3)}


def rate(count: int, seconds: float) -> str:
    """Format ``count`` events in ``seconds`` as a rate, such as "2.50 Hz"."""
    return f"{count / seconds:.2f} Hz" if seconds else "- Hz"


def agreement_rows(agreement: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the printed report about shadow mode, each as (name, text)."""
    lines = [("agreement", f"{agreement['steps']} steps, {agreement['missing']} without a row of the policy")]
    rows = agreement.get("rows") or {"row": [], "numbers": {}}
    shown = sorted(
        {round(share * (len(rows["row"]) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)} if rows["row"] else ()
    )
    if shown:
        lines.append(("", "by row of a chunk, " + ", ".join(str(rows["row"][at]) for at in shown) + ":"))
    for name, each in agreement["numbers"].items():
        share = "-" if each["explained"] is None else f"{100 * each['explained']:.0f} %"
        own = rows["numbers"].get(name, {}).get("p50", [])
        by_row = "; by row " + ", ".join(f"{own[at]:.3g}" for at in shown) if own else ""
        lines.append(("", f"{name}: p50 {each['p50']:.3g}, p95 {each['p95']:.3g}, {share} explained{by_row}"))
    return lines


def _spread(values: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3g}" for name, value in values.items()) + " ms" if values else "-"
