"""Measurements of seven policies by the authors of vla.cpp (``data/tiers.toml``), with predictions from a trace of
each policy.

A step in the paper is a step of the environment. It includes other work, and several steps share one inference. A
roofline is the time of one inference. Memory is computed as in ``sinew perf fit`` for an Orin Nano.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from sinew.core import SinewError
from sinew_client.untrusted import parse_toml

from sinew_perf.hardware import load_hardware
from sinew_perf.memory import memory_report
from sinew_perf.program import PublishedProgram
from sinew_perf.request import TracedRequest
from sinew_perf.roofline import StageTiming, timing
from sinew_perf.trace import STAGES

BOARDS = ("rtx3060", "agx-orin", "orin-nano")  # the paper's table of hardware tiers lists these machines
SHARES_ON = "rtx5070"  # the paper's table of time shares was measured on this machine


@dataclass(frozen=True, slots=True)
class MeasuredTier:
    """Measurements of one policy in milliseconds, MiB and percent. ``data/tiers.toml`` explains the attributes.
    None if the paper prints no value.
    """

    title: str
    preset: str
    backbone: str
    vision: str
    language: str
    head: str
    params: float
    rank: int
    chunk: int
    success: float
    step: float
    inference: float
    vram: int
    agx_step: float
    nano_step: float | None = None
    rss: int | None = None
    split: bool = False
    steps: int | None = None
    views: int | None = None
    embodiments: int = 1
    prefix_share: float | None = None

    @property
    def tier(self) -> str:
        """Return "fits", "alone" (only without the simulator) or "no", for the board with 8 GB."""
        return "no" if self.rss is None else "alone" if self.split else "fits"


@dataclass(frozen=True, slots=True)
class Tier:
    """Measurements of one policy with Sinew's predictions.

    Attributes:
        measured: Measurements of the paper.
        params: Parameters in billions.
        steps: Number of solver steps.
        ms: Predicted milliseconds of an inference by the roofline, for each board.
        prefix_share: Share of the prefix on ``SHARES_ON``, in percent.
        intensity: FLOP per byte of memory traffic, for each stage.
        memory: Memory on the Orin Nano, in MiB.
        tier: "fits", "alone" or "no" by this memory.
    """

    measured: MeasuredTier
    params: float
    steps: int
    ms: dict[str, float]
    prefix_share: float
    intensity: dict[str, float]
    memory: float
    tier: str


@cache
def measured() -> tuple[MeasuredTier, ...]:
    text = (files("sinew_perf") / "data" / "tiers.toml").read_text(
        "utf-8"
    )  # own file: in an installed package
    return tuple(MeasuredTier(**row) for row in parse_toml(text)["policy"])


def tiers(titles: Collection[str] = ()) -> Iterator[Tier]:
    """Yield a comparison for each policy.

    Args:
        titles: Names of policies. Empty for all.

    Raises:
        SinewError: A name is unknown.
    """
    by_name = {name.lower(): row for row in measured() for name in (row.title, row.preset)}
    if unknown := [name for name in titles if name.lower() not in by_name]:
        raise SinewError(
            f"policy: expected one of {', '.join(r.preset for r in measured())}, got {unknown[0]!r}"
        )
    for row in [by_name[name.lower()] for name in titles] or measured():
        yield _traced(row)


def _traced(row: MeasuredTier) -> Tier:
    # For a policy with several embodiments, the paper's memory includes whole token tables, as on a GPU.
    whole = row.embodiments > 1
    program = PublishedProgram.load(row.preset, TracedRequest(row.views), engine="plan" if whole else "eager")
    report = memory_report(program, "cuda", whole_tables=whole, embodiments=row.embodiments)
    parts = program.components()
    boards = {name: load_hardware(name) for name in (*BOARDS, SHARES_ON)}
    times = {name: [timing(part, board) for part in parts] for name, board in boards.items()}
    nano = boards["orin-nano"]
    left = round(nano.memory_gib * 2**30) - report.total
    alone = 0.0 if nano.alone_gib is None else nano.alone_gib
    tier = next(
        (name for name, taken in (("fits", nano.system_gib), ("alone", alone)) if left >= taken * 2**30), "no"
    )
    return Tier(
        row,
        sum(weights.parameters for weights in report.weights) / 1e9,
        0 if program.model.solver.fixed_steps == 1 else program.shapes.steps,
        {name: 1e3 * _total(times[name]) for name in BOARDS},
        100 * (1 - times[SHARES_ON][-1].seconds / _total(times[SHARES_ON])),
        {name: stage.intensity for name, stage in zip(STAGES, times[SHARES_ON], strict=True) if stage.nbytes},
        report.total / 2**20,
        tier,
    )


def _total(stages: list[StageTiming]) -> float:
    return sum(stage.seconds for stage in stages)
