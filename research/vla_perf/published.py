"""Printed numbers of papers against ours, and the effect of correcting VLA-Perf's defects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, ROUND_HALF_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

from sinew_perf.hardware import Hardware
from sinew_perf.scenarios import Payload

from research.vla_perf import realtime
from research.vla_perf.layers import PAPER, Accounting
from research.vla_perf.study import GIB, MACHINES, Study, Value, as_published
from sinew.core import SinewError

SUM_OF_ROUNDED_MS = 0.011  # 22 rows of three decimals, each rounded by at most half of the last one


@dataclass(frozen=True, slots=True)
class Row:
    """status: exact, ok (both say that it does not fit), measured (by the authors; nothing to compute), the documented
    exception, or "differs"."""

    where: str
    quantity: str
    printed: str
    ours: Value
    status: str

    @property
    def shown(self) -> str:
        """Ours as a table has it."""
        if self.ours is None:
            return "-" if self.status == "measured" else "does not fit"
        return self.ours if isinstance(self.ours, str) else f"{self.ours:.4f}"


def printed(file: str = "paper.tsv") -> list[tuple[str, str, str, str]]:
    """(where, quantity, printed text, expected status) of every number of a paper's file of ``data/``."""
    text = (Path(__file__).parent / "data" / file).read_text("utf-8")
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    return [(where, quantity, number, expected) for where, quantity, number, expected in lines]


def compare(study: Study | None = None) -> list[Row]:
    """VLA-Perf's printed numbers beside a study's; the paper's own if None."""
    ours = (study or Study()).numbers()
    return [judged(line, ours[line[0], line[1]]) for line in printed()]


def compare_realtime() -> list[Row]:
    """The printed numbers of "Running VLAs at Real-time Speed" beside what follows from its own counts."""
    lines = printed("realtime.tsv")
    ours = realtime.numbers({(where, quantity): float(number) for where, quantity, number, _ in lines})
    return [judged(line, ours.get((line[0], line[1]))) for line in lines]


def judged(line: tuple[str, str, str, str], value: Value) -> Row:
    where, quantity, number, expected = line
    if number == "N/A" or value is None:
        fits_not = "ok" if number == "N/A" and value is None else "differs"
        status = "measured" if value is None and expected == "measured" else fits_not
    elif isinstance(value, str):
        status = "exact" if value == number else "differs"
    elif rounded(value, number) == number.replace(",", ""):
        status = "exact"
    else:
        status = expected if explained(value, number, expected) else "differs"
    return Row(where, quantity, number, value, status)


def rounded(value: float, like: str) -> str:
    """Return ``value`` with as many decimals as ``like`` has, halves rounded up; without separators of thousands."""
    places = len(like.partition(".")[2])
    return str(Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


def explained(value: float, number: str, expected: str) -> bool:
    """Return True if a documented exception is what makes ``value`` print as ``number``."""
    unit = Decimal(1).scaleb(-len(number.partition(".")[2]))
    if expected == "truncated":
        return Decimal(value).quantize(unit, ROUND_DOWN) == Decimal(number)
    if expected == "rounded twice":
        once = Decimal(value).quantize(unit / 10, ROUND_HALF_UP)
        return once.quantize(unit, ROUND_HALF_DOWN) == Decimal(number)
    if expected == "at most":
        return value <= float(number)
    if expected == "not added up":
        return abs(value - float(number)) > SUM_OF_ROUNDED_MS
    if expected == "added up":
        return abs(value - float(number)) <= SUM_OF_ROUNDED_MS
    return expected == "of rounded values" and abs(value - float(number)) <= 0.01 * value


# ----------------------------------------------------------------------------- corrections


# name: (why, the change, whether bandwidth is decimal)
Correction = tuple[str, Callable[[Accounting], Accounting], bool]
CORRECTIONS: dict[str, Correction] = {
    "decimal-bandwidth": ("GB/s of data sheets are decimal", lambda how: how, True),
    "one-qkv": (
        "an action expert projects once",
        lambda how: replace(how, second_qkv=False, one_attention=True),
        False,
    ),
    "flash-attention": ("scores stay in registers", lambda how: replace(how, scores=False), False),
    "activations-in-memory": (
        "what goes between products is written and read",
        lambda how: replace(how, block_on_chip=False),
        False,
    ),
    "state-token": ("pi0's expert has chunk + 1 tokens", lambda how: replace(how, state_token=True), False),
}


def corrected_study(names: Iterable[str], put_right: Iterable[str] = (), **sent: Payload) -> Study:
    """The paper's study with these corrections alone; all of them make the preset ``corrected``. put_right, payload:
    as of :class:`Study`."""
    how, decimal = PAPER, False
    for name in names:
        if name not in CORRECTIONS:
            raise SinewError(f"correction {name!r}: expected one of {', '.join(CORRECTIONS)}")
        _, change, in_decimal = CORRECTIONS[name]
        how, decimal = change(how), decimal or in_decimal
    return Study(how, unlimited_chip if decimal else as_published, tuple(put_right), **sent)


def corrections() -> list[dict[str, str | float]]:
    """E2E milliseconds of pi0 on the five machines: as published, with each correction alone, and with all."""

    def row(title: str, why: str, names: Iterable[str]) -> dict[str, str | float]:
        study = corrected_study(names)
        return {"name": title, "why": why} | {title: 1e3 * study.e2e(m) for m, title in MACHINES}

    alone = [row(name, why, [name]) for name, (why, _, _) in CORRECTIONS.items()]
    return [row("as published", "", ()), *alone, row("corrected", "all of these", CORRECTIONS)]


def unlimited_chip(machine: Hardware) -> Hardware:
    """Bandwidth as the data sheet has it, beside the published on-chip memory (which the other corrections leave
    empty)."""
    return replace(machine, on_chip_bandwidth=18_000 * GIB)
