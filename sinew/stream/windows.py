"""The results of head runs: the next waypoints (future commands, also called nodes) of a trajectory. They come from a
rolling window or from a whole chunk.

Waypoints are counted at the stream's rate from the start of the robot's clock: the time of node k is k / rate
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sinew_client.control.trajectory import Node, Trajectory
from sinew_client.solver import Solver

from sinew.core import ContinuationRequest, SinewError
from sinew.engine.engine import Engine
from sinew.engine.watch import Watch
from sinew.processing import Processor
from sinew.processing.continuation import Continuation, continuation
from sinew.stream.text import SILENT, StreamedText

ROLLING = "gradual flow matching"
CHUNKS = "whole chunks"
HISTORY = 1024  # number of sent waypoints that the server stores (two seconds at 480 Hz)


@dataclass(frozen=True)
class Window:
    """A window: the waypoints (future commands) ``step``, ``step + 1`` ... of a trajectory.

    Attributes:
        step: Number of the first waypoint.
        rows: Waypoints, float32 [K, D] in robot units.
        sample_time: Time of the newest sensor sample, seconds of the robot's clock.
        frame_time: Time of the newest frame, seconds of the robot's clock.
        prefix_age: Seconds since the prefix came into use, on this machine's clock.
        sensor_age: Seconds since the sample arrived, on this machine's clock.
        head_s: Duration of the head run in seconds.
        run: Number of the head run.
        tag: Tag of the sample.
        state: State that the head has read, float [D] in robot units. Delta actions were added to this state.
        text: Text of the prefix.
    """

    step: int
    rows: np.ndarray
    sample_time: float
    frame_time: float
    prefix_age: float = 0.0
    sensor_age: float = 0.0
    head_s: float = 0.0
    run: int = 0
    tag: int = 0
    state: np.ndarray | None = None
    text: StreamedText = SILENT


class Rolling:
    """Denoises a window of H actions step by step, where each action has its own noise level. After a run, action i has
    the level i / H.

    Level 1 is noise, and level 0 is clean. Action 0 of a window is final, and the later actions are the best
    present estimates. If m nodes have passed since the last run, m actions are appended as noise. If less than one
    node has passed, noise is added until the levels are equal to the levels at the start of a run: x' = a x + b n
    with a = (1 - t') / (1 - t) and b^2 = t'^2 - (a t)^2, as in the forward process of diffusion.

    Args:
        engine: The engine of the policy.
        solver: The solver's settings.
        shape: Number of actions H, and width A of an action in model units.
        seed: Seed of the noise.
    """

    label = f"{ROLLING}: one evaluation of the head per run"

    def __init__(self, engine: Engine, solver: Solver, shape: tuple[int, int], seed: int = 0):
        self._engine, self._solver = engine, solver
        self._rng = np.random.default_rng(seed)
        self.rows, self.width = shape
        # Actions of the window with their remaining noise, [H, A] in model units; None before the first run.
        self._x: np.ndarray | None = None
        # Noise level of each action of the window, and number of the window's first waypoint. The first run sets both.
        self._levels: np.ndarray
        self._origin: int

    def run(self, context: Any, origin: int) -> np.ndarray:
        """Run the head once, for the window of actions that begins at the node ``origin``.

        Args:
            context: Context of the prefix.
            origin: Number of the first node.

        Returns:
            The denoised actions, float32 [H, A] in model units.
        """
        x, before = self._window(origin)
        after = np.arange(self.rows) / self.rows
        start, end = self._solver.start, self._solver.end
        times = end + before * (start - end)
        (velocity,) = self._engine.evaluate(context, x[None], times[None])
        denoised = x + ((end - times)[:, None] * velocity).astype(np.float32)
        moved = ((end + after * (start - end)) - times)[:, None]
        self._x = x + (moved * velocity).astype(np.float32)
        self._levels, self._origin = after, origin
        return denoised

    def _window(self, origin: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the noisy actions x [H, A], and the level of each action, which is at least (i + 1) / H."""
        noise = self._rng.standard_normal((self.rows, self.width), np.float32)
        least = (np.arange(self.rows) + 1) / self.rows
        if self._x is None or abs(origin - self._origin) >= self.rows:
            return noise, np.ones(self.rows)
        index = np.arange(self.rows) + origin - self._origin
        inside = (index >= 0) & (index < self.rows)
        at = np.clip(index, 0, self.rows - 1)
        x = np.where(inside[:, None], self._x[at], noise)
        levels = np.where(inside, self._levels[at], 1.0)
        raised = np.maximum(levels, least)
        keep = np.where(levels < 1.0, (1.0 - raised) / np.maximum(1.0 - levels, 1e-9), 1.0)
        add = np.sqrt(np.maximum(raised**2 - (keep * levels) ** 2, 0.0))
        add = np.where(raised > levels, add, 0.0)
        fresh = self._rng.standard_normal(x.shape, np.float32)
        return (keep[:, None] * x + add[:, None] * fresh).astype(np.float32), raised


class Chunks:
    """Computes whole chunks with an ordinary checkpoint, and converts them to waypoints at the stream's rate. Each
    chunk continues the waypoints that were sent before.

    Args:
        engine: The engine of the policy.
        processor: The processor of the policy.
        rate: Rate of the stream, nodes per second.
        guidance: Guidance of real-time chunking: "guided", "no-jacobian" or "ramp". "none" computes each chunk
            independently.
        interpolation: "linear" between the actions of a chunk, or "hold" for actions that are not positions. The
            interpolation has no effect at the policy's own rate.

    Raises:
        SinewError: The policy does not state its control rate.
    """

    def __init__(self, engine: Engine, processor: Processor, rate: float, guidance: str, interpolation: str):
        self._engine, self._processor, self.rate = engine, processor, rate
        self.guidance, self.interpolation = guidance, interpolation
        hz = processor.spec.control_hz
        if not hz:
            raise SinewError(
                "stream: the bundle states no control rate (control_hz), which a stream needs;"
                " convert the checkpoint with --control-hz RATE"
            )
        self.hz = float(hz)
        how = "no guidance" if guidance == "none" else f"real-time chunking ({guidance})"
        between = (
            "" if rate == self.hz else f", interpolated ({interpolation}) from {self.hz:g} to {rate:g} Hz"
        )
        self.label = f"{CHUNKS} of an ordinary checkpoint, {how}{between}"
        self._handed = Trajectory(HISTORY)

    def solve(
        self,
        context: Any,
        noise: np.ndarray,
        steps: int,
        state: Any,
        frame_time: float,
        origin: int,
        pause: Callable[[], None] | None = None,
    ) -> np.ndarray:
        """Compute a chunk in the units of the engine, which continues the waypoints that were sent before.

        Args:
            context: The results of vision tower and language model for the frame.
            noise: Noise from which the solution starts.
            steps: Number of evaluations.
            state: Normalised state of the prefix.
            frame_time: Exposure time of the frame, seconds of the robot's clock.
            origin: Number of the first node of the window.
            pause: Called after each evaluation.

        Returns:
            The chunk, float32 [H, A] in model units, or in robot units if the engine converts them.
        """
        options = self._continuation(state, frame_time, origin)
        if options is None:
            return self._engine.solve(context, noise[None], steps, watch=Watch(between=pause))[0]
        from sinew.engine.guidance import guide

        solver, place = self._processor.spec.solver, self._engine.place
        guidance, started = guide([options], solver, noise[None], place)  # guide() takes a batch
        return self._engine.solve(context, started, steps, guidance, Watch(between=pause))[0]

    def nodes(self, rows: np.ndarray, frame_time: float, origin: int) -> np.ndarray:
        """Convert a chunk to the waypoints of a window.

        Args:
            rows: The chunk, float32 [H, D] in robot units.
            frame_time: Exposure time of the frame, seconds of the robot's clock.
            origin: Number of the first waypoint.

        Returns:
            The waypoints, float32 [K, D]. K is at most the number of waypoints that a whole chunk has, even if
            the frame is later than ``origin``.
        """
        last = frame_time + (len(rows) - 1) / self.hz
        most = math.ceil(len(rows) * self.rate / self.hz) + 1
        count = min(math.floor(last * self.rate + 1e-6) - origin + 1, most)
        if count <= 0:
            return rows[:0]
        place = ((np.arange(count) + origin) / self.rate - frame_time) * self.hz
        if self.rate == self.hz:
            return rows[np.maximum(np.rint(place), 0).astype(int)]
        low = np.maximum(np.floor(place + 1e-6), 0).astype(int)
        if self.interpolation == "hold":
            return rows[low]
        share = np.maximum(place - low, 0.0)[:, None].astype(np.float32)
        return rows[low] + share * (rows[np.minimum(low + 1, len(rows) - 1)] - rows[low])

    def handed(self, rows: np.ndarray, origin: int, run: int) -> None:
        """Record the waypoints that the robot received. Waypoints before ``origin`` count as executed."""
        for step in range(max(self._handed.next, origin - HISTORY), origin):
            if (node := self._handed.take(step)) is not None:
                self._handed.commanded(step, node.row)
        self._handed.clear()
        self._handed.put(Node(origin + k, row, origin, run, k) for k, row in enumerate(rows))

    def _continuation(self, state: Any, frame_time: float, origin: int) -> Continuation | None:
        if self.guidance == "none":
            return None
        # The sent waypoints, beginning with the waypoint at the exposure time of the frame.
        sent_nodes = self._handed.rows_from(max(0, round(frame_time * self.rate)))
        spec = self._processor.spec
        count = int((len(sent_nodes) - 1) * self.hz / self.rate) + 1 if len(sent_nodes) else 0
        if not count:
            return None
        at = np.rint(np.arange(min(count, spec.chunk_size)) * self.rate / self.hz).astype(int)
        previous = sent_nodes[np.minimum(at, len(sent_nodes) - 1)]
        delay = max(0, math.ceil((origin / self.rate - frame_time) * self.hz - 1e-6))
        request = ContinuationRequest(
            previous=previous, delay=min(delay, len(previous)),
            horizon=max(0, spec.chunk_size - 2 * max(delay, 1)), rtc=self.guidance,
        )  # fmt: skip
        recipe, normalizer = self._processor.recipe, self._processor.action_normalizer
        return continuation(request, spec, normalizer, recipe.action_steps, state, recipe.padded_action_dim)
