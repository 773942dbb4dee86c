"""What one run hands out, beside the same written out row by row: rolling windows, and chunks at a stream's rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinew.core import Observation, SinewError
from sinew.engine.watch import Watch
from sinew.models.solvers import Solver
from sinew.policy import Policy, load
from sinew.stream import windows
from sinew.stream.windows import HISTORY, Chunks, Rolling

ROWS, WIDTH = 6, 2


class Constant:
    """A head whose velocity is what it is given, as a function of the row's time."""

    def evaluate(self, context: float, x: np.ndarray, times: np.ndarray) -> np.ndarray:
        assert x.shape[:2] == times.shape == (1, ROWS)
        return context * np.ones_like(x) + times[..., None]


def forward(
    x: np.ndarray | None, levels: list[float], before: int, origin: int, rng: np.random.Generator
) -> tuple[np.ndarray, list[float]]:
    """The window that begins at ``origin``, row by row: what is kept, put back under noise, or new."""
    noise = rng.standard_normal((ROWS, WIDTH), np.float32)
    if x is None or abs(origin - before) >= ROWS:
        return noise, [1.0] * ROWS
    fresh = rng.standard_normal((ROWS, WIDTH), np.float32)
    rows, now = [], []
    for i in range(ROWS):
        old = i + origin - before
        inside = 0 <= old < ROWS
        row, level = (x[old], levels[old]) if inside else (noise[i], 1.0)
        wanted = max(level, (i + 1) / ROWS)
        if wanted > level:
            keep = (1 - wanted) / (1 - level)
            row = keep * row + math.sqrt(max(wanted**2 - (keep * level) ** 2, 0.0)) * fresh[i]
        rows.append(row)
        now.append(wanted)
    return np.array(rows), now


@pytest.mark.parametrize(
    "solver", [Solver(start=1.0, end=0.0), Solver(start=0.0, end=1.0), Solver(start=0.8)]
)
def test_a_rolling_window_is_what_its_rows_are_one_by_one(solver: Solver) -> None:
    """Forward, in place, backward, by the most that still overlaps, and by a window and more."""
    engine: Any = Constant()
    rolling = Rolling(engine, solver, (ROWS, WIDTH), seed=4)
    rng = np.random.default_rng(4)
    x: np.ndarray | None = None
    levels, before = [1.0] * ROWS, 0
    for origin in (0, 0, 1, 3, 2, 2 + ROWS - 1, 7 - (ROWS - 1), 2 + ROWS, 8, 40, 41, 41 - ROWS):
        started, raised = forward(x, levels, before, origin, rng)
        velocity = 0.25
        with np.errstate(all="raise"):  # rows that are noise have nothing to keep
            found = rolling.run(velocity, origin)
        span = solver.start - solver.end
        x, denoised = np.empty((ROWS, WIDTH)), np.empty((ROWS, WIDTH))
        for i in range(ROWS):
            time = solver.end + raised[i] * span
            denoised[i] = started[i] + (solver.end - time) * (velocity + time)
            x[i] = started[i] + (solver.end + i / ROWS * span - time) * (velocity + time)
        levels, before = [i / ROWS for i in range(ROWS)], origin
        np.testing.assert_allclose(found, denoised, atol=2e-6, err_msg=f"origin {origin}")
        assert found.dtype == np.float32


def test_the_first_window_is_noise_wherever_it_begins() -> None:
    engine: Any = Constant()
    for origin in (0, 3, 1000):
        rolling = Rolling(engine, Solver(), (ROWS, WIDTH), seed=1)
        x, levels = rolling._window(origin)
        noise = np.random.default_rng(1).standard_normal((ROWS, WIDTH), np.float32)
        np.testing.assert_array_equal(x, noise)
        assert levels.tolist() == [1.0] * ROWS


# ----------------------------------------------------------------------------- whole chunks


class Recording:
    """What reaches an engine: the real one answers."""

    def __init__(self, engine: Any):
        self._engine, self.place, self.calls = engine, engine.place, []

    def solve(
        self, context: Any, noise: np.ndarray, steps: int, guidance: Any = None, watch: Any = None
    ) -> np.ndarray:
        self.calls.append(SimpleNamespace(noise=noise, steps=steps, guidance=guidance))
        return self._engine.solve(context, noise, steps, guidance, watch or Watch())


@pytest.fixture(scope="module")
def whole(smolvla_bundle: Callable[[str], Path]) -> Policy:
    policy = load(smolvla_bundle("smolvla-2cam"), engine="eager", threads=1)
    object.__setattr__(policy.spec, "control_hz", policy.spec.control_hz or 30.0)
    return policy


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """What is to be continued, as it is handed to processing."""
    found: list[Observation] = []
    real = windows.continuation

    def noting(wanted: Observation, *rest: Any) -> Any:
        found.append(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(windows, "continuation", noting)
    return found


def chunks_of(policy: Policy, per_row: float, guidance: str, interpolation: str = "linear") -> Chunks:
    return Chunks(
        policy.engine, policy.processor, per_row * float(policy.spec.control_hz or 0), guidance, interpolation
    )


@pytest.mark.parametrize("interpolation", ["linear", "hold"])
@pytest.mark.parametrize("per_row", [0.5, 1, 2.5, 4])
@pytest.mark.parametrize("begins", [-7.3, 0.0, 0.3, 2.0, 12.99])
def test_nodes_are_the_chunks_rows_at_their_moments(
    whole: Policy, per_row: float, begins: float, interpolation: str
) -> None:
    """begins: when the frame was exposed, in nodes. Every origin, also those before the frame and past the chunk."""
    chunks = chunks_of(whole, per_row, "none", interpolation)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, 3)).astype(np.float32)
    frame_time = begins / chunks.rate
    for origin in range(-20, 40):
        wanted = []
        for node in range(origin, origin + math.ceil(len(rows) * per_row) + 1):
            place = (node / chunks.rate - frame_time) * chunks.hz  # row of the chunk, a real number
            if place > len(rows) - 1 + 1e-6:
                break
            if per_row == 1:
                wanted.append(rows[min(max(round(place), 0), len(rows) - 1)])
                continue
            low = min(max(math.floor(place + 1e-6), 0), len(rows) - 1)
            high = min(low + 1, len(rows) - 1)
            share = 0.0 if interpolation == "hold" else min(max(place - low, 0.0), 1.0)
            wanted.append(rows[low] + np.float32(share) * (rows[high] - rows[low]))
        found = chunks.nodes(rows, frame_time, origin)
        assert len(found) == len(wanted), f"origin {origin}"
        assert found.shape[1] == 3
        for mine, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-5, err_msg=f"origin {origin}")


def test_what_a_stream_of_chunks_says_of_itself(whole: Policy) -> None:
    assert chunks_of(whole, 1, "none").label.endswith("ordinary checkpoint, no guidance")
    assert chunks_of(whole, 1, "ramp").label.endswith("real-time chunking (ramp)")
    hz = float(whole.spec.control_hz or 0)
    assert f"interpolated (hold) from {hz:g} to {4 * hz:g} Hz" in chunks_of(whole, 4, "none", "hold").label
    object.__setattr__(whole.spec, "control_hz", None)
    try:
        with pytest.raises(SinewError, match="control_hz"):
            Chunks(whole.engine, whole.processor, 30.0, "none", "linear")
    finally:
        object.__setattr__(whole.spec, "control_hz", hz)


@pytest.mark.parametrize("per_row", [1, 2.5, 4])
def test_a_chunk_continues_what_the_robot_was_given(
    whole: Policy, asked: list[Observation], per_row: float
) -> None:
    """previous: at the policy's rate, from the frame on, what was executed and what is to come. delay: rows until
    the origin, rounded up."""
    spec = whole.spec
    prepared = whole.prepare(
        {
            "images": {camera.name: np.zeros((8, 8, 3), np.uint8) for camera in spec.cameras},
            "state": np.zeros(spec.state.dim, np.float32),
            "prompt": "go",
            "seed": 1,
        }
    )
    context = whole.engine.read(prepared.inputs.batched())
    chunks = chunks_of(whole, per_row, "guided")
    engine: Any = Recording(whole.engine)
    chunks._engine = engine
    state = prepared.inputs.state

    def solve(frame_node: float, origin: int) -> Observation | None:
        asked.clear()
        engine.calls.clear()
        solved = chunks.solve(context, prepared.noise, 2, state, frame_node / chunks.rate, origin)
        (call,) = engine.calls
        assert (call.guidance is None) == (not asked)
        assert solved.shape == (spec.chunk_size, whole.processor.recipe.padded_action_dim)
        plain = whole.engine.solve(context, prepared.noise[None], 2)[0]
        assert np.array_equal(solved, plain) == (not asked)
        return asked[0] if asked else None

    assert solve(0.0, 3) is None  # nothing was handed out yet
    given = {step: np.full(spec.action.dim, 0.01 * step, np.float32) for step in range(10, 30)}
    chunks.handed(np.stack(list(given.values())), 10, run=1)
    newer = {step: np.full(spec.action.dim, 0.01 * step + 5, np.float32) for step in range(16, 40)}
    chunks.handed(np.stack(list(newer.values())), 16, run=2)  # so 10 to 15 were executed
    there = {**given, **newer}
    for frame_node, origin in (
        (12.0, 16),
        (12.4, 17),
        (15.6, 21),
        (16.0, 16),
        (20.0, 19),
        (10.0, 30),
        (39.0, 39),
    ):
        wanted = solve(frame_node, origin)
        assert wanted is not None
        first = round(frame_node)
        known = [there[step] for step in range(first, 40)]
        rows = [
            known[min(round(k * per_row), len(known) - 1)]
            for k in range(min(math.floor((len(known) - 1) / per_row) + 1, spec.chunk_size))
        ]
        np.testing.assert_allclose(wanted.previous, np.stack(rows), err_msg=f"frame {frame_node}")
        delay = max(0, math.ceil((origin - frame_node) / per_row - 1e-6))
        assert wanted.delay == min(delay, len(rows))
        assert wanted.horizon == max(0, spec.chunk_size - 2 * max(delay, 1))
        assert wanted.rtc == "guided"
    assert solve(40.0, 40) is None  # nothing is known of what follows
    many = round(2 * per_row * spec.chunk_size)
    chunks.handed(np.zeros((many, spec.action.dim), np.float32), 40, run=3)
    wanted = solve(40.0, 40)
    assert wanted is not None
    assert wanted.previous is not None
    assert len(wanted.previous) == spec.chunk_size


def test_what_was_taken_back_is_not_continued(whole: Policy, asked: list[Observation]) -> None:
    """A later hand-over that ends earlier leaves nothing of the one before. The first frame may be at zero."""
    chunks = chunks_of(whole, 1, "guided")
    rows = np.arange(30, dtype=np.float32)[:, None] * np.ones((1, whole.spec.action.dim), np.float32)
    chunks.handed(rows, 0, run=1)
    for taken in (0.0, -1.0 / chunks.rate):  # a frame may be older than the robot's clock
        assert chunks._continuation(np.zeros(whole.spec.state.dim, np.float32), taken, 0) is not None
        assert asked[-1].previous is not None
        np.testing.assert_array_equal(asked[-1].previous[:, 0], np.arange(30))
    chunks.handed(rows[:5], 6, run=2)
    assert len(chunks._handed.rows_from(6)) == 5


def test_a_stream_without_guidance_is_the_policys_own_chunk(whole: Policy, asked: list[Observation]) -> None:
    chunks = chunks_of(whole, 1, "none")
    chunks.handed(np.ones((10, whole.spec.action.dim), np.float32), 0, run=1)
    assert chunks._continuation(None, 0.0, 2) is None
    assert not asked


def test_what_was_handed_out_is_remembered_for_a_while(whole: Policy) -> None:
    """Rows stay readable for as many steps as a server remembers, and a later hand-over executes those before it."""
    dim = whole.spec.action.dim
    chunks = chunks_of(whole, 1, "guided")
    rows = np.arange(2 * HISTORY, dtype=np.float32)[:, None] * np.ones((1, dim), np.float32)
    chunks.handed(rows, 0, run=1)
    chunks.handed(rows[5:], 5, run=2)
    assert chunks._handed.next == 5
    np.testing.assert_array_equal(chunks._handed.rows_from(0)[:8, 0], np.arange(8))
    chunks.handed(rows[HISTORY + 9 :], HISTORY + 9, run=3)
    assert chunks._handed.next == HISTORY + 9
    assert not len(chunks._handed.rows_from(8))
    np.testing.assert_array_equal(chunks._handed.rows_from(9)[:3, 0], [9, 10, 11])
