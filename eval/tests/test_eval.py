"""The evaluation harness: statistics, exact hand-over semantics, pairing, resumption, gate, server, demo."""

from __future__ import annotations

import io
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the blocks task needs the sim extra")

from sinew.cli import main  # noqa: E402
from sinew.core import (  # noqa: E402
    ActionChunk,
    SinewError,
    Timing,
    statistics,
)
from tests.covering import some  # noqa: E402

from sinew_eval.episodes import campaign  # noqa: E402
from sinew_eval.episodes.adapters import Mapped, make_env, read_mapping  # noqa: E402
from sinew_eval.episodes.policies import ServerPolicy  # noqa: E402
from sinew_eval.episodes.runner import EpisodeSettings, run_episode  # noqa: E402
from sinew_eval.episodes.settings import Latency, Task, Variant, sweep  # noqa: E402
from sinew_eval.episodes.sources import chunk_seed  # noqa: E402
from sinew_eval.episodes.variants import variants  # noqa: E402
from sinew_eval.foreign.server import serving  # noqa: E402
from sinew_eval.report import stats  # noqa: E402
from sinew_eval.report.gate import Gate, GateRule, read_gate  # noqa: E402
from sinew_eval.report.report import comparison_cells  # noqa: E402
from sinew_eval.suites.mapping import Mapping  # noqa: E402
from tests import processes  # noqa: E402

pytestmark = pytest.mark.usefixtures("forked")

PACKAGE = Path(__file__).resolve().parents[2] / "sinew"
BLOCKS, PEN, ACT = (PACKAGE / "assets" / f"{name}.gguf" for name in ("blocks", "pen", "act"))
GATES = PACKAGE.parent / "eval" / "sinew_eval" / "gates"
HOLD = -1.0

needs_blocks = pytest.mark.skipif(not BLOCKS.exists(), reason="no trained policy at sinew/assets/blocks.gguf")
needs_pen = pytest.mark.skipif(not PEN.exists(), reason="no trained policy at sinew/assets/pen.gguf")


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """Run the verb in this process; returns the exit code and its JSON."""
    code = main(["eval", *map(str, arguments), "--json"])
    said = capsys.readouterr().out
    return code, json.loads(said) if said else {}


# ----------------------------------------------------------------------------- statistics


def test_wilson_at_the_ends() -> None:
    assert statistics.wilson(0, 10)[0] == 0.0
    assert statistics.wilson(10, 10)[1] == 1.0
    assert statistics.wilson(0, 0) == (0.0, 1.0)
    for wins in (-1, 11):
        with pytest.raises(ValueError, match=f"^wins: expected 0 to 10, got {wins}$"):
            statistics.wilson(wins, 10)


@pytest.mark.parametrize("z", [1.0, 1.959963984540054])
def test_wilsons_ends_are_where_the_score_test_stands_at_its_bound(z: float) -> None:
    """An end e solves (wins / count - e)^2 = z^2 e (1 - e) / count."""
    for count in (1, 2, 7, 50):
        for wins in range(count + 1):
            ends = (
                statistics.wilson(wins, count) if z > 1 else statistics.wilson(wins, count, z)
            )  # 95 % unless told
            assert ends[0] <= wins / count <= ends[1]
            for end in ends:
                assert (wins / count - end) ** 2 == pytest.approx(z * z * end * (1 - end) / count, abs=1e-12)


@pytest.mark.parametrize(("b", "c", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (10, 2, 0.038574), (3, 3, 1.0)])
def test_mcnemar_is_the_exact_binomial(b: int, c: int, p: float) -> None:
    first = {seed: seed < b or seed >= b + c for seed in range(b + c + 7)}
    second = {seed: seed >= b for seed in range(b + c + 7)}
    found = stats.mcnemar(first, second)
    assert (found.only_first, found.only_second, found.pairs) == (b, c, b + c + 7)
    assert found.p_value == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize(
    ("table", "found"),  # both, only the first, only the second, neither
    [
        ((36, 12, 2, 0), (0.2, 0.0569, 0.3404)),  # Newcombe 1998, its table of examples
        ((1, 1, 7, 12), (-0.2857, -0.5069, -0.0256)),
        ((20, 12, 2, 16), (0.2, 0.0562, 0.3292)),  # by its formula
        ((1, 0, 0, 1), (0.0, -0.5734, 0.5734)),  # and here of 1 nothing
        ((50, 0, 0, 0), (0.0, -0.0713, 0.0713)),
        ((0, 0, 0, 0), (0.0, -1.0, 1.0)),
    ],
)
def test_a_paired_difference_has_newcombes_interval(table: tuple[int, ...], found: tuple[float, ...]) -> None:
    outcomes = [(True, True), (True, False), (False, True), (False, False)]
    pairs = [pair for pair, count in zip(outcomes, table, strict=True) for _ in range(count)]
    first, second = ({seed: pair[side] for seed, pair in enumerate(pairs)} for side in (0, 1))
    assert stats.paired_difference(first, second) == pytest.approx(found, abs=5e-5)
    difference, low, high = stats.paired_difference(second, first)
    assert (-difference, -high, -low) == pytest.approx(found, abs=5e-5)


def test_outcomes_that_never_vary_have_no_correlation() -> None:
    """Newcombe takes it for 0 where one of the margins is."""
    first, second = dict.fromkeys(range(20), True), {seed: seed < 10 for seed in range(20)}
    low1, (low2, high2) = statistics.wilson(20, 20)[0], statistics.wilson(10, 20)
    wanted = 0.5, 0.5 - math.hypot(1 - low1, high2 - 0.5), 0.5 + (0.5 - low2)
    assert stats.paired_difference(first, second) == pytest.approx(wanted)


def test_the_power_of_an_exact_test_is_a_sum_over_what_it_shows() -> None:
    """Six pairs have to say the same; of seven all, or six and one that agrees."""
    for pairs, wanted in (
        (5, 0.0),
        (6, 0.5**6 + 0.25**6),
        (7, 0.5**7 + 0.25**7 + 7 / 4 * (0.5**6 + 0.25**6)),
    ):
        assert stats.mcnemar_power(pairs, 0.5, 0.25) == pytest.approx(wanted, abs=1e-12)
    assert stats.mcnemar_power(6, 0.75, 0.25) == pytest.approx(0.75**6 + 0.25**6)  # none agrees


def test_pairs_that_are_needed_are_connors_where_that_is_enough() -> None:
    """n = (z_a sqrt(p) + z_b sqrt(p - d^2))^2 / d^2, rounded up."""
    for pairs, first, second in ((1000, 30, 20), (100, 20, 10), (40, 12, 5), (1000, 20, 30)):
        p, d = (first + second) / pairs, abs(first - second) / pairs
        connor = (1.959963984540054 * p**0.5 + 0.8416212335729143 * (p - d * d) ** 0.5) ** 2 / d**2
        assert stats.pairs_needed(pairs, first, second) == math.ceil(connor)
    for pairs, first, second in ((10, 9, 0), (20, 19, 0), (20, 0, 19), (6, 5, 1)):  # of few pairs: the least
        needed = stats.pairs_needed(pairs, first, second)
        assert needed is not None
        powers = [stats.mcnemar_power(n, first / pairs, second / pairs) for n in (needed - 1, needed)]
        assert powers[0] < 0.75 <= powers[1]
    assert stats.pairs_needed(5, 5, 0) == 6  # five that all say the same show nothing: p = 0.0625
    assert stats.pairs_needed(20, 3, 3) is None


def test_amortized_rate_is_that_of_table_8() -> None:
    for steps, latency, rate in ((1, 358.4, 2.8), (8, 391.7, 20.4), (50, 457.0, 109.4)):
        assert stats.amortized_rate(steps, latency) == pytest.approx(rate, abs=0.05)


def test_percentiles_are_observed_values() -> None:
    assert statistics.summarize([1.0, 2.0, 10.0]) == {
        "mean": 4.3333,
        "p50": 2.0,
        "p95": 10.0,
        "p99": 10.0,
        "max": 10.0,
    }
    assert statistics.summarize([]) == {}
    assert (statistics.p99_of(100), statistics.p99_of(99)) == ("", "; their p99 is the largest")


def test_a_ratio_of_medians_has_an_interval_that_has_no_unit() -> None:
    before, now = [1.0, 2.0, 3.0, 4.0, 50.0], [2.0, 3.0, 4.0, 5.0, 6.0]
    ratio, low, high = statistics.ratio_of_medians(before, now)
    assert low < ratio == 4 / 3 < high
    assert statistics.ratio_of_medians([8 * x for x in before], [8 * x for x in now]) == (ratio, low, high)
    assert statistics.ratio_of_medians(before, [2 * x for x in now]) == (2 * ratio, 2 * low, 2 * high)
    assert statistics.ratio_of_medians([2.0] * 9, [3.0] * 5) == (1.5, 1.5, 1.5)
    spread = [
        1.0 + rank / 2000 for rank in range(1001)
    ]  # a bootstrap's median is of a rank 500 +- sqrt(1001) / 2
    _, low1, high1 = statistics.ratio_of_medians([1.0], spread)
    ends = [2000 * (end - 1.0) for end in (low1, high1)]
    assert ends == pytest.approx([500 - 1.96 * 1001**0.5 / 2, 500 + 1.96 * 1001**0.5 / 2], abs=1.2)
    wide = statistics.ratio_of_medians(before * 40, now * 40)  # of more samples it is narrower
    assert wide[2] - wide[1] < (high - low) / 2


def test_stages_and_answers_are_summed_up_by_name() -> None:
    whole = Timing(1.0, 2.0, 3.0, (4.0, 5.0), 6.0, 30.0, queue_ms=7.0, server_ms=40.0)
    found = statistics.stage_statistics([whole] * 2, [21.0, 23.0])
    assert list(found) == ["preprocess", "vision", "prefix", "steps", "head", "postprocess", "total"]
    assert [found[name]["mean"] for name in ("preprocess", "vision", "prefix", "head", "postprocess", "total")] == [
        1.0, 2.0, 3.0, 9.0, 6.0, 22.0,
    ]  # fmt: skip
    assert [step["max"] for step in found["steps"]] == [4.0, 5.0]
    graph = statistics.stage_statistics([Timing(step_ms=(8.0,))], [8.0], [whole])
    assert (graph["graph"]["max"], graph["head"]["max"], graph["vision"]["max"]) == (8.0, 9.0, 2.0)
    assert "steps" not in statistics.stage_statistics([Timing()], [1.0])
    chunk = ActionChunk(np.zeros((1, 1), np.float32), timing=whole, round_trip_ms=100.0)
    found = statistics.latencies([chunk])
    assert {tuple(each) for each in found.values()} == {("mean", "p50", "p90", "p95", "p99", "max")}
    seen = {name: each["p90"] for name, each in found.items()}
    assert seen == {
        "round trip": 100.0, "server total": 40.0, "queue": 7.0, "preprocess": 1.0, "vision": 2.0, "prefix": 3.0,
        "head": 9.0, "postprocess": 6.0, "policy total": 30.0, "overhead": 60.0, "outside the policy": 70.0,
    }  # fmt: skip
    assert stats.success([]) == {"wins": 0, "episodes": 0, "success": None, "interval": [0.0, 1.0]}
    assert stats.success([True, False]) == {
        "wins": 1,
        "episodes": 2,
        "success": 0.5,
        "interval": [0.094531206, 0.905468794],
    }
    for count in range(1, 201):  # one interval is printed alike wherever it is printed
        for wins in range(count + 1):
            kept = stats.success([True] * wins + [False] * (count - wins))["interval"]
            assert [f"{100 * end:.1f}" for end in kept] == [
                f"{100 * end:.1f}" for end in statistics.wilson(wins, count)
            ]
    assert stats.amortized_rate(8, 0.0) == math.inf


# ----------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "hz", "steps"),
    [("0", 20, {0}), ("3", 20, {3}), ("50ms", 20, {1}), ("60ms", 20, {2}), ("100ms", 60, {6})],
)
def test_fixed_latency_in_control_steps(text: str, hz: float, steps: set[int]) -> None:
    assert {Latency(text).steps(np.random.default_rng(0), hz)} == steps


def test_latency_distributions() -> None:
    def draws(text: str) -> list[int]:
        return [Latency(text).steps(np.random.default_rng([0, i]), 20.0) for i in range(200)]

    assert set(draws("uniform:1-4")) == {1, 2, 3, 4}
    assert set(draws("uniform:60-140ms")) == {2, 3}
    assert 1.5 < np.mean(draws("normal:80,20ms")) < 2.5
    assert Latency("uniform:1-4").milliseconds(20) == 125


@pytest.mark.parametrize("text", ["x", "1.5", "-1", "uniform:4-1", "uniform:3", "3-4", "normal:1", ""])
def test_bad_latency_is_refused(text: str) -> None:
    with pytest.raises(SinewError, match="latency"):
        Latency(text)


def test_sweeps_are_combinations() -> None:
    base = Variant("x.gguf")
    found = sweep(base, ["handover=aligned,naive", "latency=0,50,normal:80,20ms"])
    assert [(v.handover, v.latency.text) for v in found] == [
        (handover, latency)
        for handover in ("aligned", "naive")
        for latency in ("0ms", "50ms", "normal:80,20ms")
    ]
    rules = ["1", "disagreement:0.1,8", "full"]
    assert [v.show("replan") for v in sweep(base, ["replan=" + ",".join(rules)])] == rules
    _, other = variants(Variant("expert"), (), ["replan=disagreement:0.1,8,latency=normal:80,20ms"])
    assert (other.replan, other.latency.text) == ("disagreement:0.1,8", "normal:80,20ms")
    for bad in ("replan", "replan=", "replan=x", "speed=1", "handover=late"):
        with pytest.raises(SinewError):
            sweep(base, [bad])


# ----------------------------------------------------------------------------- hand-over, row by row


SEEN = {"images": {}, "state": np.zeros(1, np.float32)}


class World(gymnasium.Env):
    """Writes down what it is told to do; every frame is ``age`` steps old."""

    action_space = gymnasium.spaces.Box(-1e9, 1e9, (1,), np.float32)

    def __init__(self, steps: int, age: int = 0):
        self.steps, self.age = steps, age
        self.actions: list[float] = []

    def reset(self, *, seed=None, options=None):
        self.actions = []
        return dict(SEEN), {"frame_age": self.age / 20.0}

    def step(self, action):
        self.actions.append(float(action[0]))
        done = len(self.actions) >= self.steps
        return dict(SEEN), 0.0, False, done, {"frame_age": self.age / 20.0, "is_success": True}


class Coded:
    """Row r of chunk c is 100 c + r. ``seconds``: how long an inference takes on the clock."""

    committed_rows = 0
    served: ClassVar[dict[str, Any]] = {}
    motion = None

    def __init__(self, chunk_size: int, seconds: float = 0.0):
        self.chunk_size, self.seconds, self.calls = chunk_size, seconds, 0
        self.seeds: list[int] = []

    def start(self, env: object) -> None:
        self.calls = 0

    def infer(self, observation: object, seed: int) -> tuple[np.ndarray, float]:
        time.sleep(self.seconds)
        self.seeds.append(seed)
        rows = 100.0 * self.calls + np.arange(self.chunk_size, dtype=np.float32)
        self.calls += 1
        return rows[:, None], 1e3 * self.seconds

    def close(self) -> None: ...


def adapter_of(env: World) -> Any:
    return SimpleNamespace(
        control_hz=20.0,
        max_steps=env.steps,
        observation=lambda raw: raw,
        action=lambda row: row,
        hold=lambda last: np.array([HOLD]),
        success=lambda info, terminated, reward: info["is_success"],
        task=lambda info: "",
    )


@pytest.mark.parametrize(
    ("handover", "size", "replan", "latency", "age", "expected"),
    [
        ("aligned", 8, 4, "0", 0, [0, 1, 2, 3, 100, 101, 102, 103, 200, 201]),
        ("naive", 8, 4, "0", 0, [0, 1, 2, 3, 100, 101, 102, 103, 200, 201]),
        ("freeze", 8, 4, "0", 0, [0, 1, 2, 3, 100, 101, 102, 103, 200, 201]),
        # asked at 0, 4, 8; there at 2, 6, 10; the old chunk goes on meanwhile
        ("aligned", 8, 4, "2", 0, [HOLD, HOLD, 0, 1, 2, 3, 102, 103, 104, 105, 202]),
        ("aligned", 8, 4, "100ms", 0, [HOLD, HOLD, 0, 1, 2, 3, 102, 103, 104, 105, 202]),
        ("naive", 8, 4, "2", 0, [HOLD, HOLD, 0, 1, 2, 3, 100, 101, 102, 103, 200]),
        ("freeze", 8, 4, "2", 0, [HOLD, HOLD, 0, 1, 2, 3, HOLD, HOLD, 100, 101, 102, 103, HOLD]),
        # a chunk as long as the replan interval leaves nothing to execute while the next one is under way, and the
        # one that was asked for while the robot stood still starts at its first row
        ("aligned", 4, 4, "2", 0, [HOLD, HOLD, 0, 1, 2, 3, 102, 103, HOLD, HOLD, 200, 201, 202]),
        ("naive", 4, 4, "2", 0, [HOLD, HOLD, 0, 1, 2, 3, 100, 101, 102, 103]),
        # a frame that is one step old starts its chunk one row later, and only in aligned mode
        ("aligned", 8, 4, "0", 1, [1, 2, 3, 4, 101, 102, 103, 104, 201]),
        ("aligned", 8, 4, "1", 1, [HOLD, 1, 2, 3, 4, 102, 103, 104, 105]),
        ("naive", 8, 4, "0", 1, [0, 1, 2, 3, 100]),
        # slower than the replan interval: the next request waits for the answer
        ("aligned", 8, 2, "4", 0, [HOLD, HOLD, HOLD, HOLD, 0, 1, 2, 3, 104, 105, 106, 107, 204]),
        # the full chunk
        ("aligned", 3, 0, "0", 0, [0, 1, 2, 100, 101, 102, 200]),
        # a chunk that is over before it arrives
        ("aligned", 2, 2, "3", 0, [HOLD, HOLD, HOLD, 0, 1, HOLD, HOLD, HOLD, HOLD, 200, 201, HOLD]),
    ],
)
def test_handover(
    handover: str, size: int, replan: int, latency: str, age: int, expected: list[float]
) -> None:
    env = World(len(expected), age)
    conduct = EpisodeSettings(replan, Latency(latency), handover)
    episode = run_episode(env, adapter_of(env), Coded(size), conduct, seed=3)
    assert env.actions == expected
    assert episode.executed == sum(value != HOLD for value in expected)
    assert episode.steps == len(expected)


def test_misses_count_chunks_that_came_too_late() -> None:
    for handover, size, misses, held in (("aligned", 8, 0, 0), ("aligned", 4, 1, 2), ("freeze", 8, 1, 2)):
        env = World(12)
        episode = run_episode(
            env, adapter_of(env), Coded(size), EpisodeSettings(4, Latency("2"), handover), seed=3
        )
        assert (episode.misses, episode.held) == (misses, held)
        assert set(episode.delays) == {2}


def test_luck_depends_on_seed_and_chunk_only() -> None:
    seeds = {}
    for handover, latency in (("aligned", "0"), ("freeze", "uniform:0-3")):
        env, policy = World(40), Coded(8)
        run_episode(env, adapter_of(env), policy, EpisodeSettings(4, Latency(latency), handover), seed=7)
        seeds[handover] = policy.seeds
    count = min(map(len, seeds.values()))
    assert seeds["aligned"][:count] == seeds["freeze"][:count] == [chunk_seed(0, 7, k) for k in range(count)]
    assert len({chunk_seed(n, s, k) for n in range(2) for s in range(5) for k in range(5)}) == 50
    assert all(0 <= chunk_seed(0, 7, k) < 2**63 for k in range(100))


def test_real_time_measures_instead_of_simulating() -> None:
    env = World(16)
    policy = Coded(16, seconds=0.12)  # between two and three periods of 50 ms
    episode = run_episode(
        env, adapter_of(env), policy, EpisodeSettings(8, handover="aligned", realtime=True), seed=0
    )
    assert episode.wall_s > 0.7
    assert min(episode.delays) >= 2
    first = episode.delays[0]
    assert env.actions[:first] == [HOLD] * first
    assert env.actions[first] == 0
    later = next(value for value in env.actions if value >= 100)
    assert later == 100 + episode.delays[1]  # aligned: the row of the present


def test_a_world_that_is_slower_than_its_clock_misses_no_row() -> None:
    """Its time passes when it is acted on, so periods that went by without a step are late and nothing more."""

    class Slow(World):
        def step(self, action: Any) -> Any:
            time.sleep(0.12)  # more than two periods
            return super().step(action)

    env = Slow(8)
    conduct = EpisodeSettings(16, handover="aligned", realtime=True)
    episode = run_episode(env, adapter_of(env), Coded(16), conduct, seed=0)
    rows = [value for value in env.actions if value != HOLD]
    assert rows == [rows[0] + k for k in range(len(rows))]
    assert (episode.steps, len(rows)) == (8, episode.executed)
    assert episode.late_ticks >= 8


# ----------------------------------------------------------------------------- environments


def test_expert_solves_the_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = evaluate(capsys, "expert", "--episodes", 6, "--workers", 1)
    assert code == 0
    assert report["variants"][0]["wins"] == 6
    assert set(report["variants"][0]["by_task"]) >= {"red", "left"}


def test_timestamps_save_the_pen_from_latency(capsys: pytest.CaptureFixture[str]) -> None:
    """An expert that knows no more than its newest frame: 100 ms late, only the right row still catches."""
    options = ("--env", "sinew/Pen-v0", "--replan", 2, "--latency", "100ms", "--episodes", 8, "--workers", 1)
    _, report = evaluate(capsys, "expert", *options, "--compare", "handover=naive")
    aligned, naive = report["variants"]
    assert (aligned["wins"], naive["wins"]) == (8, 0)
    (found,) = report["comparisons"]
    assert found["p_value"] == pytest.approx(2 / 2**8, abs=1e-6)
    assert found["difference"] == -1.0
    assert found["difference_interval"][1] < 0
    assert comparison_cells(found)[-1] == "worse"
    unsure = {**found, "p_value": 1.0, "difference": -0.05, "difference_interval": [-0.24, 0.12]}
    assert comparison_cells(unsure)[-3:] == [
        *("-5.0 (-24.0 to +12.0)", "1", "no difference shown; 24 points worse are not excluded"),
    ]
    assert aligned["delay_steps"] == 6
    # A row is as old as its chunk's way, and the next chunk is there six steps later.
    assert aligned["age_ms"]["max"] == pytest.approx(1e3 * (6 + 5) / 60, abs=1e-3)


def test_mapped_environment() -> None:
    env = SimpleNamespace(
        action_space=gymnasium.spaces.Box(-1, 1, (2,), np.float32),
        metadata={"render_fps": 10},
        spec=SimpleNamespace(max_episode_steps=9),
    )
    env.unwrapped = SimpleNamespace(task_description="push")
    adapter = Mapped(env, Mapping({"top": "pixels/top"}, ("pos", "extra/vel")))
    frame = np.zeros((4, 4, 3), np.uint8)
    raw = {"pixels": {"top": frame}, "pos": np.array([0.5]), "extra": {"vel": 0.25}}
    observation = adapter.observation(raw)
    assert observation["images"]["top"] is frame
    assert observation["state"].tolist() == [0.5, 0.25]
    assert observation["prompt"] == "push"
    assert (adapter.control_hz, adapter.max_steps) == (10, 9)
    assert adapter.action(np.array([3.0, 0.0])).tolist() == [1.0, 0.0]
    assert adapter.hold(None).tolist() == [0.5, 0.25]  # absolute actions: stay where the state is
    with pytest.raises(SinewError, match="pixels/top"):
        adapter.observation({"pos": np.zeros(1)})


def test_mapping_file(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(
        '{"images": {"front": "images/front"}, "state": ["state"], "prompt": "p", "hold": "zero"}'
    )
    assert read_mapping(path).state == ("state",)
    _, adapter = make_env("sinew/Blocks-v0", str(path))
    assert adapter.control_hz == 20
    path.write_text('{"images": {}, "state": [], "sate": 1}')
    with pytest.raises(SinewError, match="expected an object with images and state"):
        read_mapping(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.gguf",), "no such file"),
        (
            ("expert", "--env", "mine/Nowhere-v0"),
            "pass your own environment as MODULE:CLASS, or as MODULE:ID if",
        ),
        (
            ("expert", "--env", "sinew_eval.sim.pen:sinew/Pen-v9"),
            "cannot make the environment sinew_eval.sim.pen:",
        ),
        (("expert", "--env", "sinew/Blocks-v0", "--env-options", "[1]"), "expected a JSON object"),
        (("expert", "--replan", "often"), "--replan"),
        (("expert", "--adapter", "nope"), "adapter: expected one of direct"),
        (("expert", "--realtime", "--latency", "3"), "--latency simulates a latency"),
        (("tcp://127.0.0.1:1", "--dtype", "float32"), "are settings of the server"),
        (("expert", "--compare", "replan=queue:0.75"), "already in the list"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert main(["eval", *arguments, "--episodes", "1"]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


# ----------------------------------------------------------------------------- many episodes


def content(episodes: list[Any]) -> list[dict[str, Any]]:
    """Without what the clock and the memory say."""
    return [
        {k: v for k, v in e.to_dict().items() if k not in ("latency_ms", "wall_s", "peak_bytes")}
        for e in episodes
    ]


@needs_pen
def test_the_same_twice_and_in_parallel() -> None:
    task = Task("sinew/Pen-v0")
    variants = [Variant(str(PEN), 4, Latency("uniform:0-4")), Variant(str(PEN), 8, Latency("67ms"), "naive")]
    once, twice = (campaign.run(task, variants, range(3), workers=workers) for workers in (1, 2))
    for a, b in zip(once, twice, strict=True):
        assert content(a) == content(b)
    assert [e.seed for e in once[0]] == list(range(3))


@needs_pen
def test_killed_run_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--env", "sinew/Pen-v0", "--replan", "full", "--latency", "3"]
    command = [
        sys.executable,
        "-m",
        "sinew",
        "eval",
        str(PEN),
        *options,
        "--workers",
        "2",
        "--episodes",
        "4000",
        "--out",
        str(tmp_path),
    ]
    log = tmp_path / campaign.LOG
    with processes.Process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not log.is_file() or log.read_bytes().count(b"\n") < 6:
            assert process.poll() is None
            time.sleep(0.05)
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
    with log.open("a") as file:
        file.write('{"key": "cut sho')
    before = campaign.read_log(log)
    assert len(before) >= 6
    while any(Path(f"/proc/{pid}").exists() for pid in workers):  # none outlives its parent
        time.sleep(0.1)

    episodes = len(before) + 2  # two workers: every finished seed is below this, or nearly
    code, report = evaluate(capsys, PEN, *options, "--workers", 1, "--episodes", episodes, "--out", tmp_path)
    assert code == 0
    assert report["variants"][0]["episodes"] == episodes
    lines = log.read_text().splitlines()
    assert sum(line.startswith('{"key": "cut') for line in lines) == 1
    played = len(lines) - 1 - len(before)
    assert 0 < played <= 6  # not from the beginning
    # The verb settles what is chosen automatically, and it is part of the key.
    names = ("dtype", "device", "engine", "handover")
    settled = {name: json.loads(json.loads(lines[0])["key"])[name] for name in names}
    task, variant = Task("sinew/Pen-v0"), Variant(str(PEN), 0, Latency("3"), **settled)
    fresh = campaign.run(task, [variant], range(5000, 5002))
    resumed = campaign.run(task, [variant], range(5000, 5002), out=tmp_path)
    assert content(fresh[0]) == content(resumed[0])
    assert len(log.read_text().splitlines()) == len(lines)


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found


@needs_pen
def test_a_changed_bundle_is_played_anew(tmp_path: Path) -> None:
    copy = tmp_path / "other.gguf"
    copy.write_bytes(PEN.read_bytes())
    task = Task("sinew/Pen-v0")
    same = campaign.key(task, Variant(str(copy)))
    assert same == campaign.key(task, Variant(str(PEN)))  # the bytes count, not the name
    other = tmp_path / "changed.gguf"
    other.write_bytes(PEN.read_bytes() + b"\0")
    assert campaign.key(task, Variant(str(other))) != same
    assert campaign.key(task, Variant(str(copy), replan=3)) != same


@needs_pen
def test_figures_that_cannot_be_drawn_are_told_before_an_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were told after hours of them."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    out = tmp_path / "out"
    assert main(["eval", str(PEN), "--env", "sinew/Pen-v0", "--episodes", "1", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert "a figure needs matplotlib" in said
    assert "pip install" in said
    assert not out.exists()


@needs_pen
def test_report_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    code, report = evaluate(
        capsys, PEN, "--env", "sinew/Pen-v0", "--episodes", 2, "--workers", 1, "--out", tmp_path,
        "--sweep", "replan=2,full", "--sweep", "latency=0,100ms", "--solver-steps", 2,
    )  # fmt: skip
    assert code == 0
    written = json.loads((tmp_path / "report.json").read_text())
    outcomes = written.pop("outcomes")
    assert written == report
    assert [len(each) for each in outcomes] == [2] * 4
    assert {path.name for path in tmp_path.glob("*.png")} == {"success_replan.png", "success_latency.png"}
    page = (tmp_path / "report.md").read_text()
    for text in ("| replan full, latency 100ms |", "McNemar", "control, Hz", "deadline misses"):
        assert text in page
    entry = report["variants"][0]
    assert entry["policy"]["kind"] == "bundle"
    assert entry["dtype"] == "fp32"
    assert entry["latency_ms"]["p99"] >= entry["latency_ms"]["p50"] > 0
    assert math.isclose(
        entry["control_rate_hz"], entry["chunk_rate_hz"] * entry["actions_per_chunk"], rel_tol=0.01
    )

    def interrupted(*given: Any, **options: Any) -> Any:
        raise KeyboardInterrupt  # as Ctrl-C does, at any place

    monkeypatch.setattr("sinew_eval.sim.pen.PenEnv.step", interrupted)
    # The report of something else is not replaced by this one's, and a run that is interrupted says what is kept.
    other = ["eval", str(PEN), "--env", "sinew/Pen-v0", "--episodes", "1", "--workers", "1", "--out"]
    assert main([*other, str(tmp_path)]) == 1
    wrong = "the folder contains the report of another evaluation (replan 2, latency 0ms, replan 2"
    assert wrong in " ".join(capsys.readouterr().err.split())
    assert "outcomes" in json.loads((tmp_path / "report.json").read_text())
    assert main([*other, str(tmp_path / "new")]) == 130
    kept = f"interrupted after 0 episodes; run the same command to continue from {tmp_path / 'new'}"
    assert kept in " ".join(capsys.readouterr().err.split())


@needs_pen
def test_server_plays_the_same_episodes(tmp_path: Path) -> None:
    task, seeds = Task("sinew/Pen-v0"), range(2)
    here = campaign.run(task, [Variant(str(PEN), 8)], seeds)[0]
    with serving(PEN, tmp_path / "serve.log", "--threads", "1") as address:
        there = campaign.run(task, [Variant(address, 8)], seeds, out=tmp_path)[0]
    assert content(here) == content(there)
    assert "server" not in content(there)[0]
    lines = (tmp_path / campaign.LOG).read_text().splitlines()
    assert "smolvla" in json.loads(lines[0])["key"]


WITH_A_SERVER = """
import sys, time
from pathlib import Path
from sinew_eval.foreign.server import serving
with serving(Path(sys.argv[1]), Path(sys.argv[2]), "--threads", "1") as address:
    print(address, flush=True)
    time.sleep(600)
"""


@needs_pen
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_evaluation_that_a_signal_ends(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", WITH_A_SERVER, str(PEN), str(tmp_path / "serve.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        ServerPolicy(address, None, timeout=60).close()  # it answers
        process.send_signal(number)
        assert process.wait(120) == (128 + number if number == signal.SIGTERM else -number)
    # Who is killed has not waited for its server, which may still be ending
    with pytest.raises(SinewError, match="no answer|broke before the answer arrived"):
        ask_for(120, address)


def ask_for(seconds: float, address: str) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ServerPolicy(address, None, timeout=0.2).close()


def test_unreachable_server() -> None:
    with pytest.raises(SinewError, match="no answer"):
        ServerPolicy("tcp://127.0.0.1:1", None, timeout=0.2)


# ----------------------------------------------------------------------------- gate


def gate_of(failed: tuple[int, ...], episodes: int = 200) -> Gate:
    return Gate(read_gate(Path("pen")).protocol, 0, episodes, failed, {})


def episodes_with(failures: int, count: int) -> list[Any]:
    return [SimpleNamespace(seed=seed, success=seed >= failures) for seed in range(count)]


def test_gate_rules(tmp_path: Path) -> None:
    gate = gate_of(failed=(50, 60))  # 198/200, interval 96.4 to 99.7 %
    assert gate.judge(episodes_with(2, 200))[0]
    assert gate.judge(episodes_with(7, 200))[0]  # 96.5 %
    passed, text = gate.judge(episodes_with(8, 200))  # 96.0 %
    assert not passed
    assert "below the recorded interval" in text
    assert "p < 0.01" in gate.judge(episodes_with(20, 200))[1]
    assert "is below 85 %" in gate.judge(episodes_with(60, 200))[1]
    # fewer episodes are compared with the record of just these seeds: 20/20, lower end 83.9 %
    assert gate.judge(episodes_with(3, 20))[0]
    assert not gate.judge(episodes_with(4, 20))[0]
    with pytest.raises(SinewError, match="the record has seeds 0 to 199"):
        gate.judge(episodes_with(0, 201))
    for episodes, least in ((200, 8), (20, 4), (10, 3), (4, 2), (1, 1)):
        # A gate says what its episodes can see: with so many lost it fails, with one less it passes.
        assert gate.fails_from(range(episodes)) == least
        lost = episodes_with(least, episodes)
        for episode in lost[least:]:
            episode.success = True  # also those that the reference lost
        assert not gate.judge(lost)[0]
        assert gate.judge([*episodes_with(least - 1, episodes)])[0]
        assert f"; of {episodes} episodes, at most {least - 1} may be lost" in gate.judge(lost)[1]
    assert Gate({}, 0, 5, tuple(range(5)), {}).fails_from(range(5)) == 0  # nothing that could be lost
    gate.write(tmp_path / "gate.json")
    assert read_gate(tmp_path / "gate.json") == gate
    never = replace(gate, rule=GateRule(0.0, 1.0, 0.0, False))
    assert never.fails_from(range(200)) == 0
    (tmp_path / "gate.json").write_text("{}")
    with pytest.raises(SinewError, match="not a gate file"):
        read_gate(tmp_path / "gate.json")
    assert read_gate(Path("pen")) == read_gate(GATES / "pen.json")
    with pytest.raises(SinewError, match="pens: expected a gate's file, or one of act, blocks, pen"):
        read_gate(Path("pens"))


@needs_pen
def test_gate_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate = tmp_path / "pen.json"
    options = ("--env", "sinew/Pen-v0", "--replan", 2, "--episodes", 5, "--solver-steps", 2, "--workers", 1)
    assert evaluate(capsys, PEN, *options, "--record-gate", gate)[0] == 0
    recorded = read_gate(gate)
    assert (recorded.protocol["env"], recorded.protocol["replan"]) == ("sinew/Pen-v0", 2)
    code, report = evaluate(capsys, PEN, "--gate", gate, "--episodes", 4, "--workers", 1)
    assert (code, report["gate"]["passed"]) == (0, True)
    late = ("--latency", "200ms", "--handover", "naive")
    code, report = evaluate(capsys, PEN, "--gate", gate, *late, "--workers", 1)
    assert (code, report["gate"]["passed"]) == (1, False)
    assert main(["eval", str(PEN), "--gate", str(gate), "--env", "sinew/Blocks-v0"]) == 1
    assert "--env: the gate requires" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bundle", "count"),
    some([(BLOCKS, 8), (PEN, 5), (ACT, 8)], (BLOCKS, 8)),  # pen: test_gate_exit_codes
    ids=["blocks", "pen", "act"],
)
def test_embedded_policies_pass_their_gates(
    capsys: pytest.CaptureFixture[str], bundle: Path, count: int
) -> None:
    if not bundle.exists():
        pytest.skip(f"no trained policy at sinew/assets/{bundle.name}")
    gate = GATES / f"{bundle.stem}.json"
    code, report = evaluate(capsys, bundle, "--gate", gate, "--episodes", count, "--workers", 1)
    assert code == 0, report["gate"]


@pytest.mark.slow
@needs_blocks
def test_embedded_policy_passes_the_whole_gate(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = evaluate(capsys, BLOCKS, "--gate", GATES / "blocks.json")
    assert code == 0, report["gate"]


@pytest.mark.slow  # eval/tests/test_sim.py plays them by hand
@needs_blocks
def test_instruction_decides() -> None:
    """The same scenes with another instruction end in another bin: a policy that ignored it would fail these."""
    for color, side in (("red", "right"), ("blue", "left")):
        task = Task(reset_options={"color": color, "side": side})
        episodes = campaign.run(task, [Variant(str(BLOCKS))], range(5000, 5004))[0]
        assert {e.task for e in episodes} == {f"{color}/{side}"}
        assert sum(e.success for e in episodes) >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--future",), "future: needs a motion"),
        (("--motion", '{"kind": "odd"}'), "motion.kind: expected one of as is, absolute"),
        (("--motion", '{"kind": "relative", "action": ["a"], "state": [0]}'), "motion: invalid literal"),
    ],
)
def test_a_motion_that_is_none_is_named(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "expert", "--env", "sinew/Pen-v0", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_future_state_is_what_the_robot_will_have() -> None:
    """Rows are absolute and the state is one number: the state that goes out is the last row of the delay."""
    env, seen = World(12, 0), []

    class Watched(Coded):
        def infer(self, observation: Any, seed: int) -> Any:
            seen.append(float(observation["state"][0]))
            return super().infer(observation, seed)

    conduct = EpisodeSettings(4, Latency("2"), "aligned", motion={"kind": "absolute"}, future=True)
    adapter = adapter_of(env)
    adapter.observation = lambda _: {"state": np.float32([-5])}
    run_episode(env, adapter, Watched(8), conduct, seed=3)
    # Asked at 0, 4 and 8; chunk 0 is there at 2, so rows 2 and 3 are under way at 4, and rows 104 and 105 at 8.
    assert seen == [-5, 3, 105]


# ----------------------------------------------------------------------------- demo


@needs_blocks
def test_the_demos_early_end_keeps_its_intervals() -> None:
    """Exact, by all numbers of successes: one look costs no coverage, as it ends at the ends alone."""
    from sinew_eval.demo.closed_loop import LOOK, SWEEP_EPISODES, SWEEP_LOOK

    chances = np.linspace(0.001, 0.999, 999)

    def binomial(n: int, k: int) -> np.ndarray:
        return math.comb(n, k) * chances**k * (1 - chances) ** (n - k)

    def coverage(look: int, most: int) -> np.ndarray:
        covered = np.zeros_like(chances)

        def add(wins: int, played: int, weight: np.ndarray) -> None:
            low, high = statistics.wilson(wins, played)
            covered[:] += weight * ((low <= chances) & (chances <= high))

        for wins in range(look + 1):
            first = binomial(look, wins)
            if wins in (0, look):
                add(wins, look, first)
                continue
            for more in range(most - look + 1):
                add(wins + more, most, first * binomial(most - look, more))
        return covered

    for look, most in ((LOOK, 50), (SWEEP_LOOK, SWEEP_EPISODES)):
        found, fixed = coverage(look, most), coverage(most, most)
        assert found.mean() > 0.95
        assert found.min() > 0.92
        assert fixed.min() < 0.87


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    from PIL import Image
    from rich.console import Console

    from sinew_eval.demo import closed_loop as demo
    from sinew_eval.sim import film as renderer

    monkeypatch.setattr(renderer, "BACKENDS", ())  # as on a machine without them
    renderer.backend.cache_clear()
    monkeypatch.setattr(demo, "SWEEP", ("handover={default}", "latency=0,100ms"))
    monkeypatch.setattr(demo, "SWEEP_LOOK", 2)  # both succeed, with 0 ms at least
    text = io.StringIO()
    report = demo.run(tmp_path, 2, Console(file=text, width=120), sweep_episodes=3)
    played = report["injected_latency"]["variants"]
    assert [each["episodes"] for each in played] == [2 if each["wins"] in (0, 2) else 3 for each in played]
    assert played[0]["episodes"] == 2
    assert report["injected_latency"]["seeds"]["count"] == max(each["episodes"] for each in played)
    renderer.backend.cache_clear()
    assert report["variants"][0]["episodes"] == 2
    assert "film       none, so a GIF shows small frames: a film needs OpenGL" in text.getvalue()
    assert "95 % interval" in text.getvalue()
    assert "round trip" in text.getvalue()
    assert "default    hand-over freeze: the policy states that actions are delta actions" in text.getvalue()
    assert "red/left" in text.getvalue()
    with Image.open(tmp_path / demo.GIF) as film:
        assert film.n_frames > 40  # two episodes of at least twenty steps
        assert film.size == (384, 300)
    assert (tmp_path / "success_latency.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "report.json").read_text())["injected_latency"]["variants"]
