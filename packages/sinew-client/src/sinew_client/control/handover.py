"""How a late chunk is taken over: which of its rows belongs to which control step, and what is mixed into it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Sequence

import numpy as np

from sinew_client.control.blend import AGGREGATES, COSINE_ALPHA, ENSEMBLE_DECAY, SCHEDULES, ensemble
from sinew_client.control.trajectory import Node, Trajectory

METHODS = ("freeze", "naive", "aligned", "ensemble", "aggregate", "rtc")
GUIDANCE = ("", "guided", "no-jacobian", "ramp", "trained")  # "": as the policy was trained, else guided


@dataclass(frozen=True)
class Placed:
    """A chunk whose row 0 belongs to control step ``origin``. rows: targets, float32 [H, D]."""

    rows: np.ndarray
    origin: int
    frame: int
    number: int

    def nodes(self) -> list[Node]:
        return [Node(self.origin + k, row, self.frame, self.number, k) for k, row in enumerate(self.rows)]


@dataclass(frozen=True)
class Handover:
    """One method and its settings; see :func:`parse_handover` for the text form.

    halt: the robot stops and asks anew where a late chunk expects it further than this from where it is, in units of an
    action (:meth:`~sinew_client.control.motion.Motion.apart`); infinite: it never does.

    freeze: the robot executes its rows, asks, and stands still until the answer is there, which starts at row 0.
    naive: the old chunk goes on; the new one starts at row 0 whenever it arrives.
    aligned: row k belongs to the k-th step after the chunk's frame; rows whose step has passed are skipped.
    ensemble: aligned, and every step gets the mean of all chunks that have a row for it (ACT), or of the newest, by how
        alike their rows are (CogACT).
    aggregate: aligned, and steps that old and new chunk share get a mixture of the two (LeRobot).
    rtc: aligned, and the server is told what is still to be executed and continues it (real-time chunking).
    """

    method: str = "aligned"
    mix: str = "weighted_average"  # aggregate
    decay: float = ENSEMBLE_DECAY  # ensemble
    alpha: float | None = None  # ensemble:cosine, in the decay's place
    newest: int = 0  # ensemble:cosine: of so many chunks; 0: of all
    guidance: str = ""  # rtc
    schedule: str = "exp"  # rtc
    beta: float = 5.0  # rtc
    halt: float = math.inf  # of those that go by time

    def __post_init__(self) -> None:
        for name, value, known in (
            ("handover", self.method, METHODS),
            ("aggregate", self.mix, tuple(AGGREGATES)),
            ("rtc", self.guidance, GUIDANCE),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise ValueError(
                    "{}: expected one of {}, got {!r}".format(name, ", ".join(filter(None, known)), value)
                )
        if not self.beta >= 0.0:
            raise ValueError(f"beta: expected a number >= 0, got {self.beta}")
        if self.alpha is not None and not math.isfinite(self.alpha):
            raise ValueError(f"alpha: expected a finite number, got {self.alpha}")
        if not self.halt > 0.0:
            raise ValueError(f"halt: expected a number > 0, got {self.halt}")
        if self.halt < math.inf and not self.timed:
            raise ValueError(f"halt: expected a hand-over whose rows have a time, got {self.method}")

    @property
    def stops(self) -> bool:
        """Return True if the robot stands still while a chunk is under way."""
        return self.method == "freeze"

    @property
    def timed(self) -> bool:
        """Return True if rows belong to the time of their frame and not to that of their arrival."""
        return self.method not in ("freeze", "naive")

    @property
    def as_trained(self) -> bool:
        """Return True if a policy that was trained to continue committed rows does so."""
        return self.method == "rtc" and self.guidance in ("", "trained")

    @property
    def continuation(self) -> dict[str, Any]:
        """Return the fields of a request that say how the running chunk is to be continued."""
        if not self.guidance:
            return {}
        if self.guidance == "trained":  # which has nothing to weigh
            return {"rtc": self.guidance}
        return {"rtc": self.guidance, "schedule": self.schedule, "beta": self.beta}

    def merge(self, running: Trajectory, chunks: Sequence[Placed], step: int) -> list[Node]:
        """Return the rows from ``step`` on. chunks: those that are known, the newest last."""
        newest = chunks[-1]
        nodes = [node for node in newest.nodes() if node.step >= step]
        if self.method == "aggregate":
            nodes = running.fused(nodes, AGGREGATES[self.mix])
        elif self.method == "ensemble":
            nodes = [node._replace(row=self._mean(chunks, node.step)) for node in nodes]
        return nodes

    def _mean(self, chunks: Sequence[Placed], step: int) -> np.ndarray:
        found = [(chunk, step - chunk.origin) for chunk in chunks[-self.newest :]]
        rows = [chunk.rows[k] for chunk, k in found if 0 <= k < len(chunk.rows)]
        return ensemble(rows, self.decay, self.alpha)


def parse_handover(text: str) -> Handover:
    """Return the method that a text names.

    ``freeze``, ``naive``, ``aligned``, ``ensemble[:M]``, ``ensemble:cosine[:ALPHA[:CHUNKS]]``, ``aggregate[:FUNCTION]``
    or ``rtc[:GUIDANCE[:SCHEDULE[:BETA]]]``; behind all but the first two ``+halt:LIMIT``. Raises ValueError that names
    the part that does not fit.
    """
    text, plus, addition = text.partition("+")
    if plus:
        name, _, limit = addition.partition(":")
        if name != "halt":
            raise ValueError(f"handover: expected +halt:LIMIT or nothing behind {text}, got +{addition}")
        return replace(parse_handover(text), halt=_number("halt", limit))
    method, *rest = text.split(":")
    most = {"ensemble": 3 if rest[:1] == ["cosine"] else 1, "aggregate": 1, "rtc": 3}.get(method, 0)
    if len(rest) > most:
        raise ValueError(f"handover: {method} takes at most {most} settings, got {text!r}")
    if method == "ensemble" and rest[:1] == ["cosine"]:
        _, alpha, newest = _three(rest)
        if newest is not None and not (newest.isdecimal() and int(newest)):
            raise ValueError(f"ensemble:cosine: expected a number of chunks from 1 on, got {newest!r}")
        chosen = COSINE_ALPHA if alpha is None else _number("ensemble:cosine", alpha)
        return Handover(method, alpha=chosen, newest=int(newest or 0))
    if method == "ensemble" and rest:
        return Handover(method, decay=_number("ensemble", rest[0]))
    if method == "aggregate" and rest:
        return Handover(method, mix=rest[0])
    if method == "rtc" and rest:
        guidance, schedule, beta = _three(rest)
        if guidance not in GUIDANCE[1:]:
            raise ValueError("rtc: expected one of {}, got {!r}".format(", ".join(GUIDANCE[1:]), guidance))
        if guidance == "trained" and len(rest) > 1:
            raise ValueError(
                f"handover: rtc:trained has nothing to weigh and takes no settings, got {text!r}"
            )
        return Handover(
            method,
            guidance=guidance,
            schedule=schedule or "exp",
            beta=5.0 if beta is None else _number("beta", beta),
        )
    return Handover(method)


def _three(parts: Sequence[str]) -> tuple[str, str | None, str | None]:
    padded = [*parts, None, None]
    return parts[0], padded[1], padded[2]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {text!r}") from None
