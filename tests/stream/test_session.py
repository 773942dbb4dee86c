"""A stream without threads: what wins, what is swapped, and what windows are made of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sinew_client.control import Loop, Settings, SimulatedPace, Stream
from sinew_client.control.windows import MAX_DELAY
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow

from sinew.core import CancelledError, ObservationError, SinewError
from sinew.engine.capability import Capability, Refusal
from sinew.policy import Policy, load
from sinew.steps.vector.add_state import AddState
from sinew.stream import LocalLink, Session, StreamSettings
from sinew.stream.loops import READ, RUN, Loops, _daemon
from sinew.stream.session import StateSample
from sinew.stream.windows import Chunks, Rolling, Window
from tests.serve.puppet import until

FRAME = np.zeros((16, 16, 3), np.uint8)


@pytest.fixture(scope="module")
def rolls(rolling_bundle: Path) -> Policy:
    return load(rolling_bundle, engine="eager", threads=1)


class Once:
    """A link that hands out one window per tick, and notes the delays that it is told."""

    label, errors, error, faults = "", 0, "", Faults()

    def __init__(self, windows: list[StreamWindow]):
        self.left, self.delays = windows, []

    def send(self, state: object, time: float, delay: int = 1, *_: object, **__: object) -> bool:
        self.delays.append(delay)
        return True

    def windows(self) -> list[StreamWindow]:
        return [self.left.pop(0)] if self.left else []


class Still:
    """A robot that does nothing."""

    def observe(self) -> dict[str, Any]:
        return {"state": np.zeros(2, np.float32)}

    def act(self, row: np.ndarray) -> None: ...

    def hold(self) -> None: ...


def session(policy: Policy, rate: float = 100.0, **settings: object) -> Session:
    found = Session(policy, StreamSettings(rate, seed=1, **settings), "go", clock=lambda: 0.0)  # type: ignore[arg-type]
    found.push_frame({"front": FRAME}, 0.0)
    return found


def sample(time: float, value: float = 0.0, delay: int = 1) -> StateSample:
    return StateSample(np.float32([value, -value]), time, delay)


def test_a_sample_reaches_rows_from_the_next_node_on() -> None:
    """Where nobody says more, and was there when this machine's clock began."""
    plain = StateSample(np.zeros(2), 0.5)
    assert (plain.delay, plain.arrived, plain.tag) == (1, 0.0, 0)


def test_the_newest_frame_wins_and_prefixes_are_swapped_whole(rolls: Policy) -> None:
    stream = session(rolls)
    assert not stream.wants_prefix  # there is no state yet
    assert stream.run() is None
    stream.push_sample(sample(0.3))
    opened: list[int] = []
    for number in range(3):
        stream.push_frame(
            lambda number=number: opened.append(number) or {"front": FRAME + number}, 0.1 * number
        )
    made = stream.compute()
    assert made is not None
    assert opened == [2]  # the others were never decoded
    stream.push_frame({"front": FRAME}, 0.3)
    assert stream.run() is None  # a prefix that is computed is not in use
    stream.swap(made)
    window = stream.run()
    assert window is not None
    assert window.frame_time == pytest.approx(0.2)
    assert stream.run() is None  # nothing new to see
    assert stream.read()
    assert not stream.read()
    assert stream.run().frame_time == pytest.approx(0.3)  # type: ignore[union-attr]
    assert (stream.frames, stream.prefixes, stream.runs) == (5, 2, 2)


def test_a_sample_reaches_the_head_without_a_new_prefix(rolls: Policy) -> None:
    rows = []
    for value in (0.0, 3.0):
        stream = session(rolls)
        stream.push_sample(sample(0.0))
        stream.read()
        stream.run()
        stream.push_sample(sample(0.01, value))
        window = stream.run()
        assert window is not None
        assert (window.step, window.sample_time, stream.prefixes) == (2, 0.01, 1)
        rows.append(window.rows)
    assert np.abs(rows[0] - rows[1]).max() > 1e-3


def test_a_new_instruction_makes_a_new_prefix(rolls: Policy) -> None:
    stream = session(rolls)
    stream.push_sample(sample(0.0))
    assert stream.read()
    stream.say("stop")
    assert stream.wants_prefix
    assert stream.read()
    assert not stream.read()


def test_rows_at_one_time_are_the_ordinary_head(rolls: Policy) -> None:
    """The limit: equal times in all rows, step by step, give the ordinary chunk to the bit."""
    prepared = rolls.prepare(
        {"images": {"front": FRAME}, "state": np.float32([0.5, 1.0]), "prompt": "go", "seed": 3}
    )
    context = rolls.engine.read(prepared.inputs.batched())
    (ordinary,) = rolls.engine.solve(context, prepared.noise[None], prepared.steps)
    x = prepared.noise
    for step in rolls.spec.solver.steps(prepared.steps):
        x = step.advance(x, rolls.engine.evaluate(context, x[None], np.full((1, len(x)), step.time))[0])
    np.testing.assert_array_equal(x, ordinary)
    world = rolls.processor.finish(ordinary, prepared.state)
    np.testing.assert_array_equal(world, rolls.run(prepared).actions)


def test_a_window_rolls(rolls: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row i leaves a run at level i / H, whatever number of nodes has passed since the last one."""
    prepared = rolls.prepare(
        {"images": {"front": FRAME}, "state": np.zeros(2, np.float32), "prompt": "go", "seed": 3}
    )
    engine: Any = rolls.engine
    context, seen = engine.read(prepared.inputs.batched()), []
    evaluate = engine.evaluate
    monkeypatch.setattr(
        engine, "evaluate", lambda context, x, times: seen.append(times[0]) or evaluate(context, x, times)
    )
    rolling = Rolling(engine, rolls.spec.solver, (6, 1), seed=0)
    for origin, least in (
        (0, [6] * 6),
        (1, range(1, 7)),
        (3, [2, 3, 4, 5, 6, 6]),
        (3, range(1, 7)),
        (50, [6] * 6),
    ):
        denoised = rolling.run(context, origin)
        np.testing.assert_allclose(seen[-1], np.array(list(least)) / 6, err_msg=str(origin))
        np.testing.assert_allclose(rolling._levels, np.arange(6) / 6)
        np.testing.assert_allclose(rolling._x[0], denoised[0], rtol=1e-5, atol=1e-6)  # type: ignore[index]  # clean: final


def test_noise_is_put_back_as_the_forward_process_would_have_it(rolls: Policy) -> None:
    """Without a node that has passed, rows go back up: x' has the mean (1 - t') a and the variance t'^2."""
    rolling = Rolling(rolls.engine, rolls.spec.solver, (6, 4000), seed=0)
    levels = np.arange(6) / 6
    clean = 2.0
    rng = np.random.default_rng(0)
    rolling._x = ((1 - levels) * clean)[:, None] + levels[:, None] * rng.standard_normal((6, 4000))
    rolling._levels, rolling._origin = levels, 0
    x, raised = rolling._window(0)
    np.testing.assert_allclose(raised, (np.arange(6) + 1) / 6)
    np.testing.assert_allclose(x.mean(1), (1 - raised) * clean, atol=0.08)
    np.testing.assert_allclose(x.std(1), raised, atol=0.05)


@pytest.mark.parametrize("engine", ["eager", "plan"])
def test_an_ordinary_checkpoint_streams_whole_chunks(
    smolvla_bundle: Callable[[str], Path], engine: str
) -> None:
    policy = load(smolvla_bundle("smolvla-2cam"), engine=engine, threads=1)
    images = {camera.name: np.zeros((8, 8, 3), np.uint8) for camera in policy.spec.cameras}
    state = np.zeros(policy.spec.state.dim, np.float32)
    hz = policy.spec.control_hz or 30.0
    object.__setattr__(policy.spec, "control_hz", hz)
    stream = Session(policy, StreamSettings(4 * hz, "none", seed=5), "go", clock=lambda: 0.0)
    assert "ordinary" in stream.label
    assert "interpolated" in stream.label
    stream.push_frame(images, 0.0)
    stream.push_sample(StateSample(state, 0.0, 2))
    assert stream.read()
    window = stream.run()
    assert window is not None
    seed = stream._seed
    chunk = policy.infer({"images": images, "state": state, "prompt": "go", "seed": seed}).actions
    assert len(window.rows) == 4 * (len(chunk) - 1) + 1 - window.step
    np.testing.assert_array_equal(stream._made._handed.rows_from(window.step), window.rows)  # to be continued
    np.testing.assert_allclose(window.rows[4 - window.step], chunk[1], rtol=1e-4, atol=1e-5)
    middle = window.rows[4 - window.step + 2]
    np.testing.assert_allclose(middle, (chunk[1] + chunk[2]) / 2, rtol=1e-4, atol=1e-5)
    stream.push_sample(StateSample(state, 0.1, 2))
    assert stream.run() is None  # its state is in the prefix, so it waits for a frame


def test_a_newer_state_reaches_the_head_of_pi0_on_every_engine(pi_bundle: Callable[[str], Path]) -> None:
    """Engine plan has the state's keys and values behind the prefix's: another state takes their place."""
    found = {}
    for engine in ("eager", "plan"):
        policy = load(pi_bundle("pi0-2cam"), engine=engine, threads=1)
        assert policy.facts.head_reads_state
        images = {camera.name: FRAME for camera in policy.spec.cameras}
        states = (np.full(policy.spec.state.dim, value, np.float32) for value in (0.0, 0.7))
        old, new = (
            policy.prepare({"images": images, "state": state, "prompt": "go", "seed": 1}) for state in states
        )
        before, noise = policy.engine.read(old.inputs.batched()), new.noise[None]
        renewed = policy.engine.renew(before, new.inputs.state[None])
        found[engine] = policy.engine.solve(renewed, noise, new.steps)
        straight = policy.engine.run(new.inputs.batched(), noise, new.steps)
        np.testing.assert_allclose(found[engine], straight, rtol=1e-5, atol=1e-5)
        assert np.abs(policy.engine.solve(before, noise, old.steps) - straight).max() > 1e-3
    np.testing.assert_allclose(found["eager"], found["plan"], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def whole(smolvla_bundle: Callable[[str], Path]) -> Policy:
    """A policy of whole chunks whose head does not read the state."""
    policy = load(smolvla_bundle("smolvla-2cam"), engine="eager", threads=1)
    object.__setattr__(policy.spec, "control_hz", policy.spec.control_hz or 30.0)
    return policy


@pytest.mark.parametrize("interpolation", ["linear", "hold"])
@pytest.mark.parametrize("per_row", [1, 4])
def test_a_frame_from_the_future_makes_no_more_nodes_than_a_chunk_has(
    whole: Policy, interpolation: str, per_row: int
) -> None:
    """The robot's clock went back, as of one that was restarted: the frame before it is of a million seconds later."""
    hz = float(whole.spec.control_hz or 0)
    chunks = Chunks(whole.engine, whole.processor, per_row * hz, "none", interpolation)
    chunk = np.arange(12, dtype=np.float32).reshape(6, 2)
    nodes = chunks.nodes(chunk, 1e6, 1)
    assert 6 <= len(nodes) <= per_row * 6 + 1
    np.testing.assert_array_equal(nodes, np.broadcast_to(chunk[0], nodes.shape))  # nothing was due before it
    assert len(chunks.nodes(chunk, 0.0, 0)) == per_row * 5 + 1


def test_relative_actions_are_relative_to_the_state_that_the_model_saw(
    whole: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = tuple(range(min(whole.spec.action.dim, whole.spec.state.dim)))
    relative = replace(whole.processor.recipe, action_steps=(AddState(dims),))
    monkeypatch.setattr(whole.processor, "recipe", relative)
    images = {camera.name: np.zeros((8, 8, 3), np.uint8) for camera in whole.spec.cameras}
    seen = np.zeros(whole.spec.state.dim, np.float32)
    rows = []
    for moved in (0.0, 0.5):
        stream = Session(whole, StreamSettings(float(whole.spec.control_hz or 0), "none", seed=5), "go")
        assert not whole.facts.head_reads_state
        stream.push_sample(StateSample(seen, 0.0))
        stream.push_frame(images, 0.0)
        prefix = stream.compute()
        assert prefix is not None
        stream.push_sample(
            StateSample(seen + np.float32(moved), 0.0)
        )  # the robot moved while it was computed
        stream.swap(prefix)
        window = stream.run()
        assert window is not None
        np.testing.assert_array_equal(window.state, seen)
        rows.append(window.rows)
    np.testing.assert_array_equal(*rows)


def test_what_cannot_stream_is_refused_by_name(rolls: Policy) -> None:
    for field, settings in (
        ("rate", {"rate": 50.0}),
        ("rate", {"rate": float("nan")}),
        ("rtc", {"guidance": "trained"}),
    ):
        with pytest.raises(ObservationError, match=f"^{field}: expected"):
            session(rolls, **settings)  # type: ignore[arg-type]
    for rate in (0.05, 2001.0):
        with pytest.raises(
            ObservationError, match=f"^rate: expected nodes per second from 0.1 to 2000, got {rate}"
        ):
            StreamSettings(rate)
    assert (StreamSettings(0.1).rate, StreamSettings(2000.0).rate) == (0.1, 2000.0)
    for kind in ("guided", "no-jacobian", "ramp", "none"):
        assert StreamSettings(1.0, kind).guidance == kind
    stream = session(rolls)
    for bad, field in (
        (StateSample(np.zeros(3), 0.0), "state"),
        (StateSample(np.zeros(2), np.nan), "time"),
        (StateSample(np.zeros(2), np.inf), "time"),
        (sample(-0.01), "time"),
        (sample(0.0, delay=-1), "delay"),
    ):
        with pytest.raises(ObservationError, match=f"^{field}: expected"):
            stream.push_sample(bad)
    stream.push_sample(sample(0.0))
    for taken in (np.nan, np.inf, -np.inf, -1e300, -60.0, 0.2, 1e7):
        with pytest.raises(ObservationError, match="^frame_time: expected"):
            stream.push_frame({"front": FRAME}, taken)
    stream.push_frame({"front": FRAME}, -0.05)  # exposed before the first tick
    stream.push_sample(sample(1.0))
    with pytest.raises(ObservationError, match=r"^time: expected 1 s of the robot's clock or later"):
        stream.push_sample(sample(0.99))
    stream.push_frame({"side": FRAME}, 1.0)
    with pytest.raises(
        ObservationError, match=r"^frame_time: expected .* from 0.9 to .*, because times may not go back"
    ):
        stream.push_frame({"front": FRAME}, 0.8)
    with pytest.raises(SinewError, match="images.side"):
        stream.read()
    assert not stream.read()  # not again and again


def test_moments_are_taken_to_their_bounds(rolls: Policy) -> None:
    stream = Session(rolls, StreamSettings(100.0))
    stream.push_frame({"front": FRAME}, -10.0)
    stream.push_sample(sample(0.5, delay=0))
    for taken in (0.5 + 0.1, 0.5):  # ahead of its sample, behind the newest frame
        stream.push_frame({"front": FRAME}, taken)
    with pytest.raises(ObservationError, match=r"^time: .* from 0 to 1e\+09, got 1e\+09$"):
        stream.push_sample(sample(1e9))


def test_an_engine_that_cannot_guide_so_is_refused_by_name(
    whole: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    hz = float(whole.spec.control_hz or 0)
    assert "guided" in whole.facts.guides
    assert "guided" in Session(whole, StreamSettings(hz, "guided")).label
    monkeypatch.setattr(whole, "facts", replace(whole.facts, guides=("ramp",)))
    with pytest.raises(
        ObservationError, match="^rtc: expected one of ramp, none on engine eager, got guided"
    ):
        Session(whole, StreamSettings(hz, "guided"))


def test_a_window_says_how_old_it_is(rolls: Policy) -> None:
    """By this machine's clock: a prefix that was swapped in at 2 s, a sample of 1 s, a run from 5 to 5.5 s."""
    clock = iter([2.0, 5.0, 5.5])
    stream = Session(rolls, StreamSettings(100.0, seed=1), "go", clock=lambda: next(clock))
    stream.push_frame({"front": FRAME}, 0.0)
    stream.push_sample(StateSample(np.zeros(2, np.float32), 0.0, 1, arrived=1.0, tag=7))
    assert stream.read()
    window = stream.run()
    assert window is not None
    assert (window.prefix_age, window.sensor_age, window.head_s, window.tag) == (3.5, 4.5, 0.5, 7)


def test_a_delay_beyond_the_largest_is_taken_as_that(rolls: Policy) -> None:
    stream = session(rolls)
    stream.push_sample(sample(0.0, delay=100_000))
    stream.read()
    window = stream.run()
    assert window is not None
    assert window.step == MAX_DELAY


def test_a_link_in_this_process_begins_anew(rolls: Policy) -> None:
    link = LocalLink(session(rolls))
    old = link.session
    link.restart()
    try:
        assert link.session is not old
        assert (link.session.prompt, link.session.frames, len(link._loops)) == ("go", 0, 1)
        assert not link.send([0.0, 0.0], 1.0, images={"front": FRAME}, frame_time=1e7)
        assert "frame_time: expected" in link.error
    finally:
        link.close()
    assert len(link._loops) == 0


def test_a_link_in_this_process_wakes_the_loops_and_hands_over_what_they_made(rolls: Policy) -> None:
    woken: list[bool] = []
    ignored = {"add": lambda *_: None, "remove": lambda *_: None, "stop": lambda: None}
    link = LocalLink(session(rolls), SimpleNamespace(wake=lambda: woken.append(True), **ignored))  # type: ignore[arg-type]
    assert link.send([0.0, 0.0], 1.0) is True
    assert link.session._sample.delay == 1  # rows from the next node on
    assert link.send([0.0], 1.0) is False
    assert (len(woken), link.errors, link.faults.counts) == (1, 1, {"bad_observation": 1})
    said = []
    for prompt in ("", "stop", "go on", "go on", ""):
        link.send([0.0, 0.0], 1.0, prompt=prompt)
        said.append(link.session.prompt)
    assert said == ["go", "stop", "go on", "go on", "go on"]
    rows = np.ones((2, 1), np.float32)
    link.window(Window(3, rows, 1.0, 0.5, prefix_age=0.25, sensor_age=0.5, head_s=0.125, run=4))
    (found,) = link.windows()
    assert found.rows is rows
    assert (found.step, found.sample_time, found.frame_time, found.run) == (3, 1.0, 0.5, 4)
    assert (found.prefix_age_ms, found.sensor_age_ms, found.head_ms) == (250.0, 500.0, 125.0)
    assert link.windows() == []


def test_an_answer_that_is_too_late_still_tells_how_late(
    rolls: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer of a cold server must not leave a delay behind that no window reaches any more."""
    monkeypatch.setattr(rolls, "facts", replace(rolls.facts, rolling=False))
    stream = session(rolls, guidance="none")
    stream.push_sample(sample(0.0, delay=40))
    stream.read()
    window = stream.run()
    assert window is not None
    assert window.rows.shape == (0, 1)
    late, fresh = StreamWindow(40, window.rows, 0.0, 0.0), StreamWindow(40, np.ones((6, 1)), 0.38, 0.0, run=2)
    link = Once([late, fresh])
    loop = Loop(Still(), Stream(link), Settings(100.0, fusion="latest_only"), 1, pace=SimulatedPace(100.0))
    loop.pace._number = 38
    for _ in range(2):
        loop.tick(loop.pace.next())
    assert link.delays == [39, 2]


def test_a_whole_solution_is_computed_in_pieces_that_can_be_ended(whole: Policy) -> None:
    """Between two evaluations others have their turn, and a stream that was ended computes no more."""
    images = {camera.name: np.zeros((8, 8, 3), np.uint8) for camera in whole.spec.cameras}
    paused: list[int] = []

    def pause() -> None:
        paused.append(len(paused))
        if len(paused) == 7:
            raise CancelledError("the stream has ended")

    stream = Session(whole, StreamSettings(float(whole.spec.control_hz or 0), solver_steps=5, seed=5), "go")
    assert stream.run_cost == 0
    for time in (0.0, 0.1):
        stream.push_sample(StateSample(np.zeros(whole.spec.state.dim, np.float32), time))
        stream.push_frame(images, time)
        assert stream.read()
        assert stream.run_cost == 5 * whole.spec.noise_shape[0]
        if time:
            with pytest.raises(CancelledError):
                stream.run(pause)
        else:
            assert stream.run(pause) is not None
            assert len(paused) == 5
    assert len(paused) == 7


class Busy:
    """A session of which each loop wants something all the time, and that makes nothing."""

    def __init__(self, rate: float, cost: float) -> None:
        self.rate, self.run_cost = rate, cost
        self.wants_prefix = self.wants_run = True
        self.prefixes = self.runs = self.evaluated = 0

    def read(self) -> bool:
        self.prefixes += 1
        return True

    def run(self, pause: Callable[[], None]) -> None:
        self.runs += 1
        for _ in range(int(self.run_cost)):
            pause()
            self.evaluated += 1


class Nobody:
    """A listener."""

    def window(self, window: object) -> None: ...
    def failed(self, error: SinewError) -> None:
        raise error


def loops_by_hand(*streams: tuple[Busy, str]) -> tuple[Loops, list[float]]:
    """Loops whose turns a test takes, and their clock."""
    now = [0.0]
    made = Loops(start=lambda _name, _run: threading.current_thread(), clock=lambda: now[0])
    for busy, owner in streams:
        made.add(busy, Nobody(), owner)  # type: ignore[arg-type]
    return made, now


def turns(loops: Loops, which: int) -> int:
    """Take all turns that there are now."""
    count = 0
    while loops._next(which) is None:
        loops._work(which)
        count += 1
    return count


def test_streams_take_turns_by_what_their_runs_cost() -> None:
    """Seven streams of a hundred steps, on four connections, beside one of a step: each connection gets as much."""
    hogs = [Busy(1e6, 100.0) for _ in range(7)]
    robot = Busy(1e6, 1.0)
    owned = [(hog, f"hog {number // 2}") for number, hog in enumerate(hogs)]
    loops, _ = loops_by_hand(*owned, (robot, "robot"))
    while robot.runs < 900:
        assert loops._next(RUN) is None
        loops._work(RUN)
    spent = {"robot": float(robot.runs)}
    for hog, owner in owned:
        spent[owner] = spent.get(owner, 0.0) + 100.0 * hog.runs
    assert max(spent.values()) - min(spent.values()) <= 100.0 + 25.0
    assert abs(hogs[0].runs - hogs[1].runs) <= 1  # streams of one connection take turns, too


def test_a_cheap_run_does_not_wait_for_a_dear_one() -> None:
    hog, robot, other = Busy(1e6, 100.0), Busy(1e6, 25.0), Busy(1e6, 50.0)
    third = Busy(1e6, 10.0)  # which is so much cheaper than the hog alone
    own = Busy(1e6, 1.0)  # which has had its turn with the hog
    robot.wants_run = other.wants_run = third.wants_run = own.wants_run = False
    loops, _ = loops_by_hand((hog, "hog"), (robot, "robot"), (other, "other"), (third, "third"), (own, "hog"))
    ran: list[tuple[str, int]] = []

    def cheap(pause: Callable[[], None]) -> None:
        ran.append(("robot", hog.evaluated))
        robot.wants_run, third.wants_run = False, True
        pause()
        third.wants_run = False

    robot.run = cheap  # type: ignore[method-assign,assignment]
    other.run = lambda pause: ran.append(("other", hog.evaluated))  # type: ignore[method-assign]

    def asked(pause: Callable[[], None]) -> None:
        for hog.evaluated in range(100):
            robot.wants_run, own.wants_run = hog.evaluated in (40, 60), hog.evaluated < 99
            other.wants_run = hog.evaluated >= 50
            pause()

    hog.run = asked  # type: ignore[method-assign]
    assert loops._next(RUN) is None
    loops._work(RUN)
    assert ran == [
        ("robot", 40),
        ("robot", 60),
    ]  # and the other costs half as much as what it would interrupt
    assert loops._next(RUN) is None
    loops._work(RUN)
    assert ran[-1] == ("other", 99)
    assert third.runs == own.runs == 0
    assert loops._busy == ([], [])


def test_who_comes_late_has_saved_nothing_and_owes_nothing() -> None:
    first, second = Busy(1e6, 1.0), Busy(1e6, 1.0)
    loops, _ = loops_by_hand((first, "first"))

    def turn() -> tuple[int, int]:
        assert loops._next(READ) is None
        loops._work(READ)
        return first.prefixes, second.prefixes

    assert turn() == (1, 0)
    loops.add(second, Nobody(), "second")  # type: ignore[arg-type]
    assert turn() == (1, 1)
    second.wants_prefix = False
    for count in range(2, 7):
        assert turn() == (count, 1)
    second.wants_prefix = True
    assert [turn() for _ in range(4)] == [(6, 2), (7, 2), (7, 3), (8, 3)]


def test_each_loop_computes_on_a_thread_of_its_own() -> None:
    """With as many compute threads as it was given, until it is stopped."""
    before, seen, busy = torch.get_num_threads(), dict[str, int](), Busy(1e6, 1.0)

    def note(*_: object) -> None:
        seen[threading.current_thread().name] = torch.get_num_threads()

    busy.read = busy.run = note  # type: ignore[method-assign, assignment]
    loops = Loops((2, 3))
    try:
        loops.add(busy, Nobody())  # type: ignore[arg-type]
        until(lambda: len(seen) == 2)
    finally:
        loops.stop(60.0)
        torch.set_num_threads(before)
    assert seen == {"sinew-prefix": 2, "sinew-head": 3}
    assert not any(thread.is_alive() for thread in loops._running)


def test_a_link_in_this_process_computes_until_it_is_closed(rolls: Policy) -> None:
    link = LocalLink(session(rolls))
    assert link._loops._threads == (1, 1)
    assert link.send([0.0, 0.0], 1.0)
    assert until(link.windows)[0].run == 1
    link.close()
    until(lambda: not any(thread.is_alive() for thread in link._loops._running))


def test_a_stream_computes_within_its_turns() -> None:
    """Each loop has its own, and what is evaluated lies between two of their marks."""
    seen: list[str] = []
    names = iter(("slow read", "slow", "quick read", "quick"))

    def turn() -> SimpleNamespace:
        name = next(names)
        return SimpleNamespace(
            begin=lambda: seen.append(f"{name} begins"), pause=lambda: seen.append(f"{name} pauses")
        )

    def run(pause: Callable[[], None]) -> None:
        for piece in "ab":
            seen.append(piece)
            quick.wants_run = piece == "b"  # and then it comes between
            pause()

    def between(_pause: object) -> None:
        seen.append("c")
        quick.wants_run = False

    slow, quick, loops = Busy(1e6, 100.0), Busy(1e6, 1.0), loops_by_hand()[0]
    slow.read, slow.run = lambda: seen.append("prefix"), run  # type: ignore[method-assign, assignment]
    quick.run, quick.wants_run, quick.wants_prefix = between, False, False  # type: ignore[method-assign, assignment]
    for each in (slow, quick):
        loops.add(each, Nobody(), "slow" if each is slow else "quick", turn)  # type: ignore[arg-type]
    assert loops._next(READ) is None
    loops._work(READ)
    assert seen == ["slow read begins", "prefix", "slow read pauses"]
    seen.clear()
    assert loops._next(RUN) is None
    slow.wants_run = False
    loops._work(RUN)
    other = ["quick begins", "c", "quick pauses", "slow begins"]
    assert seen == ["slow begins", "a", "slow pauses", "b", "slow pauses", *other, "slow pauses"]


def test_a_stream_that_fails_is_told_and_what_nobody_foresaw_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    listener = SimpleNamespace(failed=lambda error: told.append(str(error)))
    robot, loops = Busy(1e6, 1.0), loops_by_hand()[0]
    loops.add(robot, listener, "robot")  # type: ignore[arg-type]
    for error in (SinewError("no head"), ZeroDivisionError("0"), ZeroDivisionError("0"), KeyError("a")):
        robot.run = lambda _pause, error=error: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
        assert loops._next(RUN) is None
        loops._work(RUN)
    internal = "internal error ({}); the log has the details"
    assert told == [
        "no head",
        *(internal.format(f"{name}Error") for name in ("ZeroDivision",) * 2 + ("Key",)),
    ]
    assert caplog.messages == ["a computation of a stream failed"] * 2


def test_who_has_left_is_forgotten_and_loops_end_in_time() -> None:
    joined: list[float] = []
    started: list[str] = []
    thread = SimpleNamespace(join=joined.append)
    loops = Loops(start=lambda name, _run: started.append(name) or thread)  # type: ignore[arg-type, return-value]
    first, second = Busy(1e6, 1.0), Busy(1e6, 1.0)
    for busy, owner in ((first, "one"), (second, "one"), (Busy(1e6, 1.0), "two")):
        loops.add(busy, Nobody(), owner)  # type: ignore[arg-type]
    assert turns_of(loops, 3) == {"one", "two"}
    loops.remove(first)  # type: ignore[arg-type]
    assert turns_of(loops, 0) == {"one", "two"}
    loops.remove(second)  # type: ignore[arg-type]
    loops.remove(second)  # type: ignore[arg-type]
    assert turns_of(loops, 0) == {"two"}
    loops.stop(5.0)
    assert len(joined) == 2
    assert all(0 <= wait <= 5.0 for wait in joined)
    loops.stop(0.0)
    assert joined[2:] == [0.0, 0.0]
    assert all(event.is_set() for event in loops._news)  # or they would not look
    loops.add(first, Nobody(), "one")  # type: ignore[arg-type]
    assert started == ["sinew-prefix", "sinew-head"]  # once for all, and no more at the end


@pytest.mark.parametrize("made", [True, False])
def test_a_prefix_is_news_for_the_head(made: bool) -> None:
    busy = Busy(1e6, 1.0)
    loops, _ = loops_by_hand((busy, "robot"))
    busy.read = lambda: made  # type: ignore[method-assign]
    assert loops._next(READ) is None
    loops._work(READ)
    assert loops._news[RUN].is_set() is made
    assert _daemon("of a test", lambda: None).daemon  # a process ends though a loop computes


def test_a_loop_sleeps_until_there_is_news() -> None:
    """It forgets the last before it looks, so that nothing is missed."""
    loops, seen, before = loops_by_hand()[0], list[Any](), torch.get_num_threads()

    def wait(seconds: float) -> None:
        seen.append(seconds)
        loops._ended = True

    event = SimpleNamespace(clear=lambda: seen.append("clear"), wait=wait)
    loops._news = (event, event)  # type: ignore[assignment]
    loops._loop(RUN)
    torch.set_num_threads(before)
    assert seen == ["clear", 0.5]


def test_who_has_left_is_computed_no_further_and_nothing_of_it_stays() -> None:
    told: list[str] = []
    listener = SimpleNamespace(failed=lambda error: told.append(str(error)))
    here, gone = Busy(1e6, 2.0), Busy(1e6, 2.0)
    loops = loops_by_hand((here, "here"))[0]
    loops.add(gone, listener, "gone")  # type: ignore[arg-type]
    gone_run = gone.run
    here.wants_run = gone.wants_prefix = False

    def leaves(pause: Callable[[], None]) -> None:
        loops.remove(gone)  # type: ignore[arg-type]
        gone_run(pause)

    gone.run = leaves  # type: ignore[method-assign]
    assert loops._next(RUN) is None
    assert loops._next(READ) is None  # that of the other
    loops.settle([Busy(1.0, 1.0)])  # type: ignore[list-item]  # which nothing is computed for
    waits = threading.Thread(target=loops.settle, args=([gone],), daemon=True)
    waits.start()
    until(lambda: loops._lock._waiters)  # type: ignore[attr-defined]
    loops._work(RUN)
    waits.join(60.0)
    assert not waits.is_alive()
    assert (told, gone.runs, gone.evaluated) == (["the stream has ended"], 1, 0)
    loops._work(READ)
    loops.add(gone, listener, "gone")  # type: ignore[arg-type]
    assert loops._next(RUN) is None
    loops.remove(gone)  # type: ignore[arg-type]
    loops._work(RUN)
    assert (gone.runs, len(told)) == (1, 1)  # it had not begun


def turns_of(loops: Loops, count: int) -> set[Any]:
    """Take turns of the fast loop; return whose use of it is known."""
    for _ in range(count):
        assert loops._next(RUN) is None
        loops._work(RUN)
    return set(loops._spent[RUN])


def test_no_stream_is_computed_more_often_than_it_said() -> None:
    """Whatever is sent: a prefix for each node of its rate at most, and a run for each sample and each prefix."""
    stream = Busy(10.0, 100.0)
    loops, now = loops_by_hand((stream, "robot"))
    assert turns(loops, READ) == 2  # one comes early by as much as a network delivers at once
    counts = []
    for second in range(5):
        for tick in range(100):
            now[0] = second + tick / 100
            turns(loops, READ)
            turns(loops, RUN)
        counts.append((stream.prefixes, stream.runs))
    rates = np.diff(counts, axis=0)
    assert rates.max(axis=0).tolist() == [10, 20]
    assert 10 <= counts[0][0] <= 12
    assert 20 <= counts[0][1] <= 23
    assert 0.0 < loops._next(RUN) <= 0.05  # type: ignore[operator]  # and the loop sleeps until then


def test_a_robots_clock_begins_at_zero_and_its_sources_may_come_in_any_order(rolls: Policy) -> None:
    """A frame is at most 10 s older than the clock, at most 0.1 s ahead of its sample or behind another frame."""
    stream = Session(rolls, StreamSettings(100.0, seed=1), "go", clock=lambda: 0.0)
    with pytest.raises(
        ObservationError, match="^frame_time: expected seconds of the robot's clock from -10 to "
    ):
        stream.push_frame({"front": FRAME}, -10.5)
    stream.push_frame({"front": FRAME}, -10.0)
    stream.push_sample(sample(0.0, delay=0))
    stream.push_frame({"front": FRAME}, 0.1)
    stream.push_frame({"front": FRAME}, 0.0)
    assert (stream.frames, stream.samples) == (3, 1)
    with pytest.raises(ObservationError, match=r"^time: expected .* from 0 to 1e\+09, got 1e\+09"):
        stream.push_sample(sample(1e9))
    assert stream.samples == 1
    session(rolls).push_sample(sample(1e9 - 0.5))
    assert stream.read()
    window = stream.run()
    assert window is not None
    assert (window.step, window.run, window.tag) == (0, 1, 0)
    assert stream.run_cost == 6  # the rows of a window, once


def test_each_prefix_has_noise_of_its_own(whole: Policy) -> None:
    """That of the stream's seed and of the prefixes before it, so that a stream can be repeated."""
    last = 2**63 - 1  # after which seeds begin anew
    stream = Session(whole, StreamSettings(float(whole.spec.control_hz or 0), seed=last - 1), "go")
    images = {camera.name: np.zeros((8, 8, 3), np.uint8) for camera in whole.spec.cameras}
    seen = {"images": images, "state": np.zeros(whole.spec.state.dim, np.float32), "prompt": "go"}
    for count in range(3):
        stream.push_sample(StateSample(seen["state"], 0.1 * count))
        stream.push_frame(images, 0.1 * count)
        made = stream.compute()
        assert made is not None
        np.testing.assert_array_equal(
            made.noise, whole.prepare({**seen, "seed": (last - 1, last, 0)[count]}).noise
        )
        stream.swap(made)


def test_a_stream_whose_weights_were_changed_ends(rolls: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = session(rolls)
    stream.push_sample(sample(0.0))

    def changed() -> None:
        raise SinewError("the file was written over")

    monkeypatch.setattr(rolls.files, "check", changed)
    with pytest.raises(SinewError, match="written over"):
        stream.read()


def test_what_has_no_halves_or_nothing_to_guide_does_not_stream(
    whole: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    hz, spec = float(whole.spec.control_hz or 0), whole.spec
    with monkeypatch.context() as patched:
        refusals = {Capability.STREAM: Refusal("two graphs", "one graph")}
        patched.setattr(whole, "capabilities", replace(whole.capabilities, refusals=refusals))
        with pytest.raises(SinewError, match="^stream: expected two graphs, got one graph$"):
            Session(whole, StreamSettings(hz))
    with monkeypatch.context() as patched:
        patched.setattr(whole, "spec", replace(spec, history=2))
        with pytest.raises(
            SinewError,
            match="^stream: expected a policy without an observation history, got one with 2 observation steps$",
        ):
            Session(whole, StreamSettings(hz))
    monkeypatch.setattr(whole, "spec", replace(spec, solver=replace(spec.solver, kind="ddim")))
    assert "no guidance" in Session(whole, StreamSettings(hz, "none")).label
    with pytest.raises(
        ObservationError,
        match="^rtc: expected none, because this policy does not support guidance, got guided",
    ):
        Session(whole, StreamSettings(hz, "guided"))
