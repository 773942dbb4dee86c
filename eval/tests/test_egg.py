"""The egg's physics, its expert, and the policy that streams."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from research.policies.egg import ROWS, EggTask, drawn_states, out_of_date
from sinew.cli import main
from sinew.core import SinewError
from sinew.policy import load
from sinew.stream import Window

import sinew_eval.sim  # noqa: F401 - registers the environments
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.runner import EpisodeSettings, run_stream_episode
from sinew_eval.episodes.settings import Latency
from sinew_eval.episodes.sources import SimulatedLink, StreamCosts, way
from sinew_eval.sim.egg import CONTROL_HZ, CRUSH, SPEED, STIFFNESS, EggEnv, act

BUNDLE = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "egg.gguf"


def play(seed: int, reaction: int) -> EggEnv:
    """Play the expert with commands that are ``reaction`` steps old."""
    env = EggEnv(image_size=16)
    env.reset(seed=seed)
    commands = [np.zeros(1, np.float32)] * reaction
    done = False
    while not done:
        commands.append(act(env))
        *_, done, _, _ = env.step(commands[-1 - reaction])
    return env


def test_only_a_fast_reaction_holds_the_egg() -> None:
    breaks_within = CRUSH / STIFFNESS / (SPEED / CONTROL_HZ)  # steps from the touch
    assert breaks_within == pytest.approx(6.0)
    assert [play(seed, 1).outcome for seed in range(20)] == ["held"] * 20
    assert [play(seed, 7).outcome for seed in range(20)] == ["crushed"] * 20


def test_the_touch_is_felt_and_not_seen() -> None:
    env = gymnasium.make("sinew/Egg-v0", image_size=16).unwrapped
    frames, forces = set(), []
    env.reset(seed=1)
    done = False
    while not done:
        observation, _, done, _, info = env.step(act(env))
        frames.add(observation["images"]["front"].tobytes())
        forces.append(float(observation["state"][1]) * CRUSH)
    assert len(frames) == 2  # without the egg, and with it
    assert info["camera_age"] >= 2 / 30 - 1e-9
    touched = int(np.argmax(np.array(forces) > 0.5)) + 1
    assert touched / CONTROL_HZ - info["stimuli"]["sensor"] <= 2 / CONTROL_HZ
    assert env.opening < env.width
    with pytest.raises(ValueError, match="camera_fps"):
        EggEnv(camera_fps=50)
    with pytest.raises(ValueError, match="options"):
        env.reset(options={"width": 40})


def test_moments_for_training_are_of_the_task() -> None:
    rng = np.random.default_rng(0)
    batch = EggTask(4).batch(rng, 6, 0)
    assert batch.states is not None
    assert batch.chunks is not None
    assert batch.chunks.shape == (6, 4, ROWS, 1)
    assert set(batch.chunks.unique().tolist()) <= {-1.0, 1.0}  # stop or close
    states = drawn_states(rng, True, 2000)
    felt = states[:, 1] * CRUSH > 0.5
    assert 0.3 < felt.mean() < 0.6
    plans = out_of_date(rng, np.ones((40, 50, ROWS), np.float32))
    assert 0.4 < (plans[..., 0] < 1).mean() < 0.6


def test_the_policy_streams() -> None:
    env, adapter = make_env("sinew/Egg-v0", "", None)
    policy = load(BUNDLE, engine="eager", threads=1)
    episode = run_stream_episode(env, adapter, policy, EpisodeSettings(), 5000, StreamCosts.parse("33:2.1"))
    assert episode.success
    assert episode.misses == 0
    assert episode.reactions_ms["sensor"][0] <= 2e3 / CONTROL_HZ  # two runs of the head
    again = run_stream_episode(env, adapter, policy, EpisodeSettings(), 5000, StreamCosts.parse("33:2.1"))
    assert (again.steps, again.reactions_ms) == (episode.steps, episode.reactions_ms)


def test_a_stream_of_20_hz_ends() -> None:
    """A signature of the defect: 3 * (1 / 20) is more than 3 / 20, and simulated time waited for it for ever."""
    env, adapter = make_env("sinew/Pen-v0", "", None)
    adapter.control_hz, adapter.max_steps = 20.0, 6  # type: ignore[misc]
    policy = load(BUNDLE.with_name("pen.gguf"), engine="eager", threads=1)
    assert (
        run_stream_episode(env, adapter, policy, EpisodeSettings(), 5000, StreamCosts.parse("33:2.1")).steps
        == 6
    )


def test_eval_compares_streams_with_chunks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--env",
        "sinew/Egg-v0",
        "--engine",
        "eager",
        "--episodes",
        "1",
        "--workers",
        "1",
        "--out",
        str(tmp_path),
    ]
    said = (
        Path(__file__).parents[2] / "docs" / "stream.md"
    ).read_text()  # the page's own command, of which no egg is to be held
    (latency,) = re.findall(r"held\s+no\s+egg\s+\(`sinew eval egg (--latency \S+)`\)", said)
    chunks = [*latency.split(), "--replan", "1", "--solver-steps", "2"]
    compared = ["--compare", "stream=33:2.1,latency=0"]
    assert main(["--debug", "eval", str(BUNDLE), *flags, *chunks, *compared, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out.splitlines()[-1])["variants"]
    assert (first["wins"], second["wins"]) == (0, 1)
    assert second["reactions_ms"]["image"]["count"] == 1
    assert "reactions_ms" not in first
    assert main(["eval", str(BUNDLE), *flags, "--stream", "fast"]) == 1
    assert "stream: expected PREFIX:HEAD" in capsys.readouterr().err


def test_windows_that_take_longer_to_arrive() -> None:
    """Several windows are under way at once, in order; a latency that is no number of milliseconds is refused."""
    ready = iter(range(100))

    class Session:
        label, prompt, wants = "", "go", False

        def push_sample(self, _sample: Any) -> None:
            self.wants = True

        def compute(self) -> None:
            return None

        def run(self) -> Window | None:
            wants, self.wants = self.wants, False
            return Window(0, np.zeros((1, 1), np.float32), 0.0, 0.0, run=next(ready)) if wants else None

    now = [0.0]
    link = SimulatedLink(Session(), StreamCosts(0.0, 0.01), lambda: now[0], way(Latency("50ms")))  # type: ignore[arg-type]
    arrived = []
    for tick in range(10):
        now[0] = 0.02 * tick
        arrived.append([window.run for window in link.windows()])
        link.send([0.0], now[0])
    assert arrived == [[], [], [], [0], [1], [2], [3], [4], [5], [6]]  # 60 ms after its sample each
    for text in ("3", "uniform:1-4ms", "normal:80,20ms"):
        with pytest.raises(SinewError, match="^latency: with --stream, expected milliseconds"):
            way(Latency(text))
    assert way(Latency()) == 0.0


@pytest.mark.parametrize("text", ["", "33", "33:x", "33:2:nothing", "-1:2", "1:2:3:4"])
def test_costs_that_are_none(text: str) -> None:
    with pytest.raises(SinewError, match="^stream: expected PREFIX:HEAD"):
        StreamCosts.parse(text)
