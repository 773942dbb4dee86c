"""Compare predictions and advice of Sinew with played episodes: the built-in tasks in simulated time.

    python -m benchmarks.truth need|advise|delays|skip [--episodes N] [--out FOLDER]

* ``need``: success that `sinew perf need --success` predicts at a latency, and the success of new episodes
* ``advise``: success with the settings of a recorded run, and with the settings that `sinew recording advise` prints
  for its recording
* ``delays``: success of a robot with a late camera that states no times, by the ``camera_delay`` of its settings
* ``skip``: success of policies without some layers (`sinew skip`)

All variants of a comparison play the same seeds with the same noise. The results are stored in
benchmarks/results/truth. The figures in docs/figures are drawn from them (benchmarks.figures).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import torch
from sinew_client.control import AS_IS, SimulatedPace
from sinew_client.control.listeners.keep import Keep
from sinew_client.control.run import Run
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.episodes.runner import Episode, EpisodeSettings, run_episode, settings_of
from sinew_eval.episodes.settings import Latency
from sinew_eval.episodes.sources import Simulated
from sinew_eval.report.stats import mcnemar, paired_difference
from sinew_perf.success import LatencySpread, Way

from benchmarks.handovers import draw_when_asked
from benchmarks.side_by_side import SideBySide
from sinew.cli.run_leader import FrameKeeper
from sinew.core import machine
from sinew.core.statistics import wilson
from sinew.policy import load

ROOT = Path(__file__).parents[1]
ASSETS, RESULTS = ROOT / "sinew" / "assets", ROOT / "benchmarks" / "results" / "truth"
TASKS = {
    "pen": ("pen", "sinew/Pen-v0", 60.0),
    "blocks": ("blocks", "sinew/Blocks-v0", 20.0),
    "shove": ("blocks", "sinew/BlocksShove-v0", 20.0),
}
LIMIT = 400  # largest number of control steps of an episode
FIRST = 30_000  # first seed: no policy was trained, and no surface was measured with the seeds from here on

# The measured curve of `need`: for each latency in control steps, the successes of 100 episodes
# (research/log/measurements-closed-loop.md). Its prediction is compared with new episodes at other latencies: the mean
# and the standard deviation in ms.
CURVE = {0: 98, 2: 98, 5: 96, 6: 98, 8: 63, 11: 22, 12: 10, 14: 1, 17: 0}
ASKED = ((87, 0), (110, 0), (142, 0), (90, 30), (125, 20))

# A recorded run: the task, and the settings that are not good. The last has limits that are too low for the task.
RECORDED: tuple[tuple[str, dict[str, str]], ...] = (
    ("pen", {"replan": "2", "latency": "33ms", "handover": "naive"}),
    ("pen", {"replan": "2", "latency": "33ms", "handover": "freeze"}),
    ("pen", {"replan": "full", "latency": "17ms"}),
    ("blocks", {"replan": "8", "latency": "50ms", "velocity": "0.5"}),
    ("shove", {"replan": "full", "latency": "50ms"}),
)
RECORDED_EPISODES, RECORDED_FIRST = 8, 20_000

# Delays of the camera setting in s, for a camera that is two frames late at 30 Hz. A frame is at most one control step
# older, so its mean age is 75 ms.
CAMERA_S, SETTINGS_S = 2 / 30, (0.0, 0.075, 0.072, 0.078)

SKIPPED = ("", "vision=1", "vision=2", "vision=0", "language=2+3,expert=2+3", "language=0+1,expert=0+1")


class Unstated(gymnasium.Wrapper):
    """A task whose robot does not state how old its frames are."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        return observation, _without_age(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, done, timeout, info = self.env.step(action)
        return observation, reward, done, timeout, _without_age(info)


def _without_age(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name != "frame_age"}


def play(
    task: str,
    policy: SideBySide,
    seeds: Sequence[int],
    conduct: EpisodeSettings,
    camera_delay: float | None = None,
) -> list[bool]:
    """Play episodes of a task. Returns the outcome of each seed.

    Args:
        task: Name of the task.
        policy: The policy.
        seeds: Seeds of the episodes.
        conduct: Settings of the episodes.
        camera_delay: Delay of a camera whose frames have no stated age, in seconds. None for the task's own camera.
    """

    def episode(seed: int) -> Episode:
        options = {"max_episode_steps": LIMIT} if camera_delay is None else {"camera_delay": camera_delay}
        env, adapter = make_env(TASKS[task][1], env_options=options)
        draw_when_asked(env)
        return run_episode(env if camera_delay is None else Unstated(env), adapter, policy, conduct, seed)

    return [each.success for each in policy.play(episode, seeds)]


def opened(task: str, bundle: Path | None = None) -> SideBySide:
    """Load the policy of a task for many episodes at once, on the engine plan with one thread."""
    torch.set_num_threads(1)
    return SideBySide(load(str(bundle or ASSETS / f"{TASKS[task][0]}.gguf"), "cpu", engine="plan", threads=1))


def share(won: Sequence[bool]) -> dict[str, Any]:
    """Return the successes with their 95 % interval, and the outcome of each seed as a digit."""
    low, high = wilson(sum(won), len(won))
    return {
        "wins": sum(won),
        "episodes": len(won),
        "interval": [round(low, 4), round(high, 4)],
        "outcomes": "".join(str(int(each)) for each in won),
    }


def difference(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """Return the success of the first variant minus that of the second one, over the same seeds."""
    own, other = dict(enumerate(first)), dict(enumerate(second))
    return {
        "difference": [round(each, 4) for each in paired_difference(own, other)],
        "p": float(f"{mcnemar(own, other).p_value:.2g}"),
    }


def need(episodes: int) -> Iterator[dict[str, Any]]:
    """Compare predicted with played success, for latencies between the measured ones, and for distributions."""
    way = Way("aligned", "2", 60.0, {steps: (wins, 100) for steps, wins in CURVE.items()})
    policy = opened("pen")
    for mean, deviation in ASKED:
        predicted = way.of(LatencySpread(mean, deviation))
        assert predicted is not None
        text = f"normal:{mean},{deviation}ms" if deviation else f"{mean}ms"
        conduct = EpisodeSettings(way.replan, Latency(text), way.handover, motion=dict(AS_IS))
        rates = (predicted.success, predicted.low, predicted.high)
        yield {
            "task": "pen",
            "way": way.name,
            "latency": text,
            "predicted": [round(each, 4) for each in rates],
            "played": share(play("pen", policy, range(FIRST, FIRST + episodes), conduct)),
        }


def advise(episodes: int) -> Iterator[dict[str, Any]]:
    """Record a run with settings that are not good, take the printed advice, and play both settings."""
    for task, settings in RECORDED:
        policy = opened(task)
        with tempfile.TemporaryDirectory() as folder:
            advice = advice_for(task, policy, settings, Path(folder))
        flags = [each["flags"] for each in advice["advice"] if each["flags"]]
        changed = dict(settings)
        for flag in flags:
            name, value = flag.removeprefix("--").split(" ", 1)
            changed[name] = value
        clipped = {name: each["commands"] for name, each in advice["clipped"].items()}
        if "velocity" in settings and clipped:
            del changed["velocity"]  # the advice about limits is a text, which names the limit to raise
        seeds = range(FIRST, FIRST + episodes)
        before, after = (play(task, policy, seeds, conduct_of(each)) for each in (settings, changed))
        yield {
            "task": task,
            "recorded": settings,
            "advice": [f"{each['topic']}: {each['flags']}" for each in advice["advice"]],
            "unknown": [text.split(".")[0] for text in advice["unknown"]],
            "clipped": clipped,
            "advised": changed,
            "before": share(before),
            "after": share(after),
            **difference(after, before),
        }


def advice_for(task: str, policy: SideBySide, settings: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Record episodes in simulated time, as `sinew run --record --frames` does, and return the printed advice."""
    name, env_id, hz = TASKS[task]
    log, frames = folder / "run.jsonl", folder / "frames"
    env, adapter = make_env(env_id, env_options={"max_episode_steps": LIMIT})
    conduct = conduct_of(settings)

    def recorded(seed: int) -> None:
        robot = SimulatedRobot(env, adapter, RECORDED_EPISODES, seed)
        source = Simulated(policy, 0, seed, conduct.latency, hz)
        with (
            Run.open(
                policy.served,
                robot,
                settings_of(policy, conduct),
                prompt=None,
                source=source,
                pace=SimulatedPace(hz),
            ) as run,
            ExitStack() as stack,
        ):
            run.journal(log, robot=env_id, target=name)
            Keep(FrameKeeper(frames, run.plan, stack)).attach(run.loop)
            run.run()

    policy.play(recorded, [RECORDED_FIRST])
    again = ["--frames", str(frames), "--policy", name, "--episodes", str(RECORDED_EPISODES), "--draws", "2"]
    text = sinew("recording", "advise", str(log), *again, "--engine", "onnx", "--json")
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def sinew(*words: str) -> str:
    """Run a command of Sinew in a process of its own. Returns its output."""
    line = [sys.executable, "-m", "sinew", *words]
    return subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout


def conduct_of(settings: Mapping[str, str]) -> EpisodeSettings:
    """Return the settings of simulated episodes for the settings of a recorded run."""
    limits = {}
    if "velocity" in settings:
        speed = float(settings["velocity"])
        limits = {"limits": {"velocity": [speed, speed, speed, None], "still": [0.0, 0.0, 0.0, 1.0]}}
    replan = settings["replan"]
    return EpisodeSettings(
        0 if replan == "full" else replan,
        Latency(settings["latency"]),
        settings.get("handover", "aligned"),
        envelope=limits,
    )


def delays(episodes: int) -> Iterator[dict[str, Any]]:
    """Play the pen with a late camera whose delay the robot does not state, for several values of ``camera_delay``."""
    policy = opened("pen")
    none: list[bool] = []
    for setting in SETTINGS_S:
        conduct = EpisodeSettings("2", Latency("33ms"), "aligned", envelope={"camera_delay": setting})
        won = play("pen", policy, range(FIRST, FIRST + episodes), conduct, CAMERA_S)
        none = none or won
        yield {"camera_delay": setting, "played": share(won), **difference(won, none)}


def skip(episodes: int) -> Iterator[dict[str, Any]]:
    """Play the blocks with policies that lack some layers."""
    whole: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in SKIPPED:
            bundle = ASSETS / "blocks.gguf"
            if layers:
                bundle = Path(folder) / "short.gguf"
                bundle.unlink(missing_ok=True)
                sinew("skip", "blocks", "--layers", layers, "--out", str(bundle))
            won = play(
                "blocks", opened("blocks", bundle), range(FIRST, FIRST + episodes), EpisodeSettings("8")
            )
            whole = whole or won
            yield {"skipped": layers, "played": share(won), **difference(won, whole)}


IDEAS = {"need": (need, 200), "advise": (advise, 100), "delays": (delays, 100), "skip": (skip, 50)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("idea", choices=IDEAS)
    parser.add_argument("--episodes", type=int, help="episodes of each variant")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    run, episodes = IDEAS[arguments.idea]
    episodes = arguments.episodes or episodes
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, rows = arguments.out / f"{arguments.idea}.json", []
    for row in run(episodes):
        print(row, flush=True)
        rows.append(json.dumps(row))
        about = {
            "command": f"python -m benchmarks.truth {arguments.idea} --episodes {episodes}",
            "cpu": machine.cpu_model(),
            "load": [round(each, 1) for each in os.getloadavg()],
            "cpu_s": round(time.process_time()),
        }
        path.write_text(json.dumps(about)[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n")
    print(path)


if __name__ == "__main__":
    main()
