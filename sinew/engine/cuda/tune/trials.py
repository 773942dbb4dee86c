"""Trials: the problems that are timed, and what is stored of each: its tile and the implementation to use.

Every answer is compared with the reference's before it is timed, and one that differs is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinew.engine.cuda.fused.ops import ResidualStream
from sinew.engine.cuda.kernels import choices, tuning
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.tune.timing import Measure

TOLERANCE = 1e-2  # relative L2 of a tile's answer against the reference's, in bfloat16
ROUNDED = 2e-2  # of another way's, which rounds between its passes
NARROW = 4e-2  # of e4m3, where a last bit of bfloat16 before it can move a value by a sixteenth
Row = dict[str, Any]
Way = Callable[[int], Any]  # number of a set of arguments -> the answer


class TuningProblem(NamedTuple):
    """The key of stored tiles and choices."""

    kernel: str
    dims: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kernel} {'x'.join(map(str, self.dims))}"


class Trials:
    """Times each problem once per device.

    measure: returns the milliseconds per call of calls that run back to back. left: returns the seconds until no new
    problem begins. emit: receives one row per problem, when its result is stored. trying: receives a line of text
    before each tile is timed. again: True also times problems that were stored before.
    """

    def __init__(
        self,
        device: torch.device,
        measure: Measure,
        left: Callable[[], float],
        emit: Callable[[Row], None],
        trying: Callable[[str], None] | None = None,
        again: bool = False,
    ):
        self.device, self.measure, self.left, self.emit = device, measure, left, emit
        self.trying, self.again = trying or (lambda _: None), again
        self.done: set[tuple[TuningProblem, bool]] = set()
        self.known: set[tuple[TuningProblem, bool]] = set()  # from an earlier run on this machine
        self.skipped: set[tuple[TuningProblem, bool]] = set()
        self.failed = 0
        self.paused = False  # no problem is begun, and none counts as left out

    def summary(self) -> Row:
        late = len(self.skipped - self.done)
        done = len(self.done) - self.failed
        return {
            "tuned": done,
            "known": len(self.known),
            "failed": self.failed,
            "left out for lack of time": late,
        }

    def begin(self, problem: TuningProblem, has_others: bool = False) -> bool:
        """Return True if a problem is to be timed now: it is new, was not stored before, and there is time."""
        entry = problem, has_others
        if self.paused or entry in self.done or entry in self.known:
            return False
        if not self.again and is_kept(problem, self.device, has_others):
            self.known.add(entry)
            return False
        if self.left() <= 0:
            self.skipped.add(entry)
            return False
        self.done.add(entry)
        return True

    def time(
        self,
        problem: TuningProblem,
        kernel: Callable[[Tile, int], Any],
        wanted: Callable[[], Any],
        others: Mapping[str, Way] | None = None,
        sets: int = 8,
    ) -> None:
        """Time our kernel with each of its tiles, then against ``others``, on ``sets`` sets of arguments in turn; keep
        what was found. wanted: the reference's answer to set 0."""
        try:
            row = self._timed(problem, kernel, wanted(), others or {}, sets)
        except Exception as error:  # noqa: BLE001 - the default stays; the row says why
            self.failed += 1
            row = {"reason": f"not tuned: {type(error).__name__}: {error}"[:400]}
        self.emit({"kernel": problem.kernel, "dims": list(problem.dims), **row})

    def _timed(
        self,
        problem: TuningProblem,
        kernel: Callable[[Tile, int], Any],
        wanted: Any,
        others: Mapping[str, Way],
        sets: int,
    ) -> Row:
        tried = 0

        def milliseconds(way: Way) -> float:
            return self.measure([partial(way, i) for i in range(sets)])

        def timed(way: Way, tolerance: float) -> float:
            agree(way(0), wanted, tolerance)
            return milliseconds(way)

        def with_tile(tile: Tile) -> float:
            nonlocal tried
            tried += 1
            self.trying(f"{problem}, {tile}")
            return timed(partial(kernel, tile), TOLERANCE)

        row: Row = {"tile": None}
        ways: dict[str, Callable[[], float]] = {}
        unusable = ""
        try:
            # A launch is its tile here, and its measure computes, compares and times.
            entry = tuning.tune(*problem, self.device, lambda tile: tile, with_tile)  # type: ignore[arg-type, return-value]
        except tuning.NoTile as error:
            if not others:
                raise
            unusable = str(error)
        else:
            left_out = f"; left out: {'; '.join(entry['failed'])}"[:600] if entry["failed"] else ""
            times = {"us": 1e3 * entry["ms"], "default_us": 1e3 * entry["default_ms"]}
            row = {"tile": entry["tile"], "tiles": tried, **times}
            if not others:
                return row | {"way": "triton", "reason": f"the only way{left_out}"}
            best = Tile(**entry["tile"])
            ways["triton"] = lambda: milliseconds(partial(kernel, best))  # once more: right before the others
        for name, way in others.items():
            ways[name] = partial(timed, way, ROUNDED)
        self.trying(f"{problem}, {', '.join(ways)}")
        choice = choices.pick(*problem, self.device, ways, lambda call: call(), unusable)
        row |= {"tiles": tried, "us": 1e3 * choice["ms"][choice["way"]], "way": choice["way"]}
        return row | {"reason": choice["reason"] + ("" if unusable else left_out)}


def is_kept(problem: TuningProblem, device: torch.device, has_others: bool) -> bool:
    """Return True if tile and implementation of a problem were measured before."""
    tile = tuning.choose(*problem, device)[1].startswith("tuned")
    if not has_others:
        return tile
    way = choices.choose(*problem, device, "")[1]
    return way.startswith(choices.NO_TILE) or (tile and way.startswith("measured"))


def agree(got: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    """Raise ArithmeticError unless a way's tensors are the reference's, each up to ``tolerance``. Of a stream,
    what the way has of it; squares by row."""
    if isinstance(wanted, ResidualStream):
        parts = [(got.rows, wanted.rows), (_summed(got.squares), _summed(wanted.squares))]
        parts = [(a, b) for a, b in (*parts, (got.scaled, wanted.scaled)) if a is not None]
        got, wanted = zip(*parts, strict=True)
    for ours, theirs in zip(_tensors(got), _tensors(wanted), strict=True):
        a, b = ours.float(), theirs.float()
        error = float((a - b).norm() / b.norm().clamp(min=torch.finfo(torch.float32).tiny))
        bound = max(tolerance, NARROW) if ours.dtype == E4M3 else tolerance
        if a.numel() and not error <= bound:  # NaN is not
            raise ArithmeticError(f"relative L2 of {error:.2g} against the reference, expected {bound}")


def _summed(squares: Tensor | None) -> Tensor | None:
    return None if squares is None else squares.sum(-1)


def _tensors(answer: Any) -> list[Tensor]:
    if answer is None:
        return []
    return [answer] if isinstance(answer, Tensor) else [leaf for part in answer for leaf in _tensors(part)]
