"""Chunk merging: assign the actions of a late chunk to control steps, and mix overlapping chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Sequence

import numpy as np

from sinew_client.control.blend import AGGREGATES, COSINE_ALPHA, ENSEMBLE_DECAY, SCHEDULES, ensemble
from sinew_client.control.trajectory import Node, Trajectory

METHODS = ("freeze", "naive", "aligned", "ensemble", "aggregate", "rtc")
# "" chooses "trained" for a policy that was trained to continue an action prefix, else "guided".
GUIDANCE = ("", "guided", "no-jacobian", "ramp", "trained")


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk whose actions are assigned to control steps.

    Attributes:
        rows: Targets of the chunk, float32 [H, D].
        origin: Control step to which the first action belongs.
        frame: Control step in which the chunk's newest frame was exposed.
        number: Number of the chunk in this run, from 0.
    """

    rows: np.ndarray
    origin: int
    frame: int
    number: int

    def nodes(self) -> list[Node]:
        """Return one node (an action with its control step) for each action."""
        return [Node(self.origin + k, row, self.frame, self.number, k) for k, row in enumerate(self.rows)]


@dataclass(frozen=True)
class Handover:
    """A method of chunk merging and its settings. :func:`parse_handover` describes the text form.

    Methods:

    * freeze: The robot stands still during each request. It executes the new chunk from its first action on.
    * naive: The robot continues with the old chunk during a request. It executes the new chunk from its first action
    on, without compensation of the delay.
    * aligned: The robot continues with the old chunk. Action k of the new chunk belongs to the k-th control step after
    the chunk's observation, and actions whose step has passed are skipped.
    * ensemble: As aligned, but each step gets the mean of all chunks that have an action for it (ACT), or the mean of
    the newest chunks, weighted by their similarity (CogACT).
    * aggregate: As aligned, but steps with an old and a new action get a mixture of both (LeRobot).
    * rtc: As aligned, and the server computes the new chunk as a continuation of the running chunk (real-time
    chunking).

    Attributes:
        method: One of :data:`METHODS`.
        mix: For aggregate: name of the mixture, a key of :data:`~sinew_client.control.blend.AGGREGATES`.
        decay: For ensemble: m of the weights exp(-m i), where the oldest chunk has i = 0.
        alpha: For ensemble:cosine: factor of the similarity, in place of ``decay``.
        newest: For ensemble:cosine: number of newest chunks that are averaged; 0 for all.
        guidance: For rtc: one of :data:`GUIDANCE`.
        schedule: For rtc: schedule of the guidance weights.
        beta: For rtc: largest guidance weight.
        halt: If a late chunk expects the robot at another position than its own, the robot stops and requests again.
            This is the largest allowed distance, in units of an action
            (:meth:`~sinew_client.control.motion.Motion.apart`). Infinity never stops the robot.

    Raises:
        ValueError: A value is not allowed. The message names it.
    """

    method: str = "aligned"
    mix: str = "weighted_average"
    decay: float = ENSEMBLE_DECAY
    alpha: float | None = None
    newest: int = 0
    guidance: str = ""
    schedule: str = "exp"
    beta: float = 5.0
    halt: float = math.inf

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("handover", self.method, METHODS),
            ("aggregate", self.mix, tuple(AGGREGATES)),
            ("rtc", self.guidance, GUIDANCE),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in choices:
                raise ValueError(
                    "{}: expected one of {}, got {!r}".format(name, ", ".join(filter(None, choices)), value)
                )
        if not self.beta >= 0.0:
            raise ValueError(f"beta: expected a number >= 0, got {self.beta}")
        if self.alpha is not None and not math.isfinite(self.alpha):
            raise ValueError(f"alpha: expected a finite number, got {self.alpha}")
        if not self.halt > 0.0:
            raise ValueError(f"halt: expected a number > 0, got {self.halt}")
        if self.halt < math.inf and not self.timed:
            raise ValueError(f"halt: only aligned, ensemble, aggregate and rtc can halt, got {self.method}")

    @property
    def stops(self) -> bool:
        """True if the robot stands still while a request is in progress."""
        return self.method == "freeze"

    @property
    def timed(self) -> bool:
        """True if actions are assigned to control steps by the time of their observation. False if they are assigned by
        the time of their arrival.
        """
        return self.method not in ("freeze", "naive")

    @property
    def as_trained(self) -> bool:
        """True if a policy that was trained to continue an action prefix may do so, without guidance."""
        return self.method == "rtc" and self.guidance in ("", "trained")

    @property
    def continuation(self) -> dict[str, Any]:
        """The fields of a request that state how to continue the running chunk."""
        if not self.guidance:
            return {}
        if self.guidance == "trained":  # this guidance has neither a schedule nor a weight
            return {"rtc": self.guidance}
        return {"rtc": self.guidance, "schedule": self.schedule, "beta": self.beta}

    def merge(self, running: Trajectory, chunks: Sequence[PlacedChunk], step: int) -> list[Node]:
        """Merge the newest chunk with the older actions.

        Args:
            running: The buffer with the old actions.
            chunks: The chunks with remaining actions, newest last.
            step: The control step.

        Returns:
            The actions for ``step`` and the steps after it.
        """
        newest = chunks[-1]
        nodes = [node for node in newest.nodes() if node.step >= step]
        if self.method == "aggregate":
            nodes = running.fused(nodes, AGGREGATES[self.mix])
        elif self.method == "ensemble":
            nodes = [node._replace(row=self._mean(chunks, node.step)) for node in nodes]
        return nodes

    def _mean(self, chunks: Sequence[PlacedChunk], step: int) -> np.ndarray:
        indices = [(chunk, step - chunk.origin) for chunk in chunks[-self.newest :]]
        rows = [chunk.rows[k] for chunk, k in indices if 0 <= k < len(chunk.rows)]
        return ensemble(rows, self.decay, self.alpha)


def parse_handover(text: str) -> Handover:
    """Parse a method of chunk merging.

    Args:
        text: ``freeze``, ``naive``, ``aligned``, ``ensemble[:M]``, ``ensemble:cosine[:ALPHA[:CHUNKS]]``,
            ``aggregate[:FUNCTION]`` or ``rtc[:GUIDANCE[:SCHEDULE[:BETA]]]``. All except the first two may end in
            ``+halt:LIMIT``.

    Returns:
        The method and its settings.

    Raises:
        ValueError: A part of the text is not valid. The message names the part.

    Example:
        >>> parse_handover("rtc:guided:exp:5").beta
        5.0
    """
    text, plus, addition = text.partition("+")
    if plus:
        name, _, limit = addition.partition(":")
        if name != "halt":
            raise ValueError(f"handover: expected +halt:LIMIT or nothing after {text}, got +{addition}")
        return replace(parse_handover(text), halt=_number("halt", limit))
    method, *rest = text.split(":")
    most = {"ensemble": 3 if rest[:1] == ["cosine"] else 1, "aggregate": 1, "rtc": 3}.get(method, 0)
    if len(rest) > most:
        raise ValueError(f"handover: {method} has at most {most} settings after the colon, got {text!r}")
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
            raise ValueError(f"handover: rtc:trained has no settings, got {text!r}; write rtc:trained")
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
