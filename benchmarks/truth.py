"""Compare predictions and advice of Sinew with played episodes: the built-in tasks in simulated time.

    python -m benchmarks.truth need|advise|delays|height|skip|fp8|views|choose|warm [--episodes N] [--out FOLDER]

* ``need``: success that `sinew perf need --success` predicts at a latency, and the success of new episodes
* ``advise``: success with the settings of a recorded run, and with the settings that `sinew recording advise` prints
  for its recording
* ``delays``: success of a robot with a late camera that states no times, by the ``camera_delay`` of its settings
* ``height``: success of the pen by the height of its fall, with a camera that is two frames late
* ``skip``: success of policies without some layers (`sinew skip`)
* ``fp8``: success of policies with the language model in FP8, by the references of the kernels of engine cuda
* ``views``: success and computed views if a camera's view is computed only when its rule needs it (`refresh`)
* ``choose``: cost of the modes that `sinew perf choose` chooses, and of always the same mode, in new episodes
* ``warm``: the first answer after a pause of servers with and without `--keep-warm-s`. It runs by the clock, on a
  socket, and N is the number of pairs for each pause (benchmarks.keep_warm)

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from sinew_client.control import AS_IS, SimulatedPace
from sinew_client.control.listeners.keep import Keep
from sinew_client.control.listeners.views import ViewRule
from sinew_client.control.run import Run
from sinew_eval.episodes.adapters import make_env
from sinew_eval.episodes.robot import SimulatedRobot
from sinew_eval.episodes.runner import Episode, EpisodeSettings, run_episode, settings_of
from sinew_eval.episodes.settings import Latency
from sinew_eval.episodes.sources import Simulated
from sinew_eval.report.stats import mcnemar, paired_difference
from sinew_perf.choosing import Mode, select
from sinew_perf.success import LatencySpread, Way

from benchmarks.handovers import draw_when_asked
from benchmarks.keep_warm import warm
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
FIRST = 30_000  # first seed: no policy was trained, and no surface was measured with the seeds from here on

# The measured curve of `need`: for each latency in control steps, the successes of 100 episodes
# (research/log/measurements-closed-loop.md). Its prediction is compared with new episodes at other latencies: the mean
# and the standard deviation in ms.
CURVE = {0: 98, 2: 98, 5: 96, 6: 98, 8: 63, 11: 22, 12: 10, 14: 1, 17: 0}
ASKED = ((87, 0), (110, 0), (142, 0), (90, 30), (125, 20))

# A recorded run: the task, and the settings that are not good. "velocity" is a limit that is too low for the task.
# "shove" is the task of the blocks in which the named block is moved during the episode.
RECORDED: tuple[tuple[str, dict[str, str]], ...] = (
    ("pen", {"replan": "full", "latency": "17ms", "handover": "aligned"}),
    ("pen", {"replan": "2", "latency": "33ms", "handover": "naive"}),
    ("pen", {"replan": "2", "latency": "33ms", "handover": "freeze"}),
    ("shove", {"replan": "full", "latency": "50ms", "handover": "freeze"}),
    ("shove", {"replan": "16", "latency": "50ms", "handover": "freeze"}),
    ("shove", {"replan": "8", "latency": "100ms", "handover": "naive"}),
    ("blocks", {"replan": "full", "latency": "50ms", "handover": "freeze"}),
    ("blocks", {"replan": "8", "latency": "50ms", "handover": "freeze", "velocity": "0.5"}),
)
RECORDED_EPISODES, RECORDED_FIRST = 8, 20_000
# Played in addition where the command advises nothing: settings that are known to be good for the task.
GOOD = {
    "pen": {"replan": "2", "handover": "aligned"},
    "blocks": {"replan": "8", "handover": "freeze"},
    "shove": {"replan": "8", "handover": "freeze"},
}

# Delays of the camera setting in s, for a camera that is two frames late at 30 Hz. A frame is at most one control step
# older, so its mean age is 75 ms.
CAMERA_S, SETTINGS_S = 2 / 30, (0.0, 0.075, 0.072, 0.078)

# Heights of the pen in metres, and pairs of the camera's delay in s and the policy's latency. The second pair is from
# "Running VLAs at Real-time Speed" with two views.
HEIGHTS_M = (0.22, 0.26, 0.30, 0.34)
HEIGHT_DELAYS = ((0.0, "0"), (CAMERA_S, "27.3ms"), (CAMERA_S, "67ms"))

SKIPPED = ("", "vision=1", "vision=2", "vision=0", "language=2+3,expert=2+3", "language=0+1,expert=0+1")

FP8_REPLAN = {"pen": "2"}

FRONT = ("all", "front:every:4", "front:change:4", "front:never")
RULES = {"blocks": (*FRONT, "wrist:every:2", "wrist:every:4"), "shove": FRONT}
VIEWS_REPLAN, VISION_REQUESTS = "4", 100

# Modes of the pen: latency, cost of an attempt, and share of attempts in which the mode is available.
MODES = {"robot": ("50ms", 1.0, 1.0), "edge": ("100ms", 0.3, 0.99), "cloud": ("normal:125,20ms", 0.1, 0.97)}
FAILURE_COSTS = (0.3, 0.6, 1.0, 5.0, 20.0, 200.0, 1000.0)
MEASURED_FIRST = 20_000  # first seed of the episodes from which a mode is chosen


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
    options: Mapping[str, Any] | None = None,
    stated: bool = True,
) -> list[bool]:
    """Play episodes of a task. Returns the outcome of each seed.

    Args:
        task: Name of the task.
        policy: The policy.
        seeds: Seeds of the episodes.
        conduct: Settings of the episodes.
        options: Options of the environment.
        stated: False if the robot does not state how old its frames are.
    """

    def episode(seed: int) -> Episode:
        env, adapter = make_env(TASKS[task][1], env_options=dict(options or {}))
        draw_when_asked(env)
        return run_episode(env if stated else Unstated(env), adapter, policy, conduct, seed)

    return [each.success for each in policy.play(episode, seeds)]


def opened(task: str, bundle: Path | None = None, engine: str = "plan") -> SideBySide:
    """Load the policy of a task for many episodes at once, with one thread."""
    torch.set_num_threads(1)
    return SideBySide(load(str(bundle or ASSETS / f"{TASKS[task][0]}.gguf"), "cpu", engine=engine, threads=1))


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
    """Record a run with settings that are not good, take the printed advice, and play both settings.

    Without advice that changes a setting, settings that are known to be good are played instead ("missed"), so that the
    result shows what the recording could not determine.
    """
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
        before = play(task, policy, seeds, conduct_of(settings))
        row = {
            "task": task,
            "recorded": settings,
            "advice": [f"{each['topic']}: {each['flags']}" for each in advice["advice"]],
            "unknown": [text.split(".")[0] for text in advice["unknown"]],
            "clipped": clipped,
            "before": share(before),
        }
        followed = changed != settings
        other = changed if followed else settings | GOOD[task]
        after = play(task, policy, seeds, conduct_of(other))
        yield row | {
            "advised" if followed else "missed": other,
            "after": share(after),
            **difference(after, before),
        }


def record(task: str, policy: SideBySide, settings: Mapping[str, str], folder: Path) -> tuple[Path, Path]:
    """Record episodes in simulated time, as `sinew run --record --frames` does in real time.

    Args:
        task: Key of ``TASKS``.
        policy: The task's policy.
        settings: Settings of the run: replan, latency and handover.
        folder: Existing folder for the recording.

    Returns:
        The decision log, and the folder of the observations.
    """
    name, env_id, hz = TASKS[task]
    log, frames = folder / "run.jsonl", folder / "frames"
    env, adapter = make_env(env_id)
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
    return log, frames


def advice_for(task: str, policy: SideBySide, settings: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Record episodes in simulated time, and return the advice that `sinew recording advise` prints."""
    log, frames = record(task, policy, settings, folder)
    again = ["--frames", str(frames), "--policy", TASKS[task][0], "--episodes", str(RECORDED_EPISODES)]
    text = sinew("recording", "advise", str(log), *again, "--draws", "2", "--engine", "onnx", "--json")
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
        settings["handover"],
        envelope=limits,
    )


def delays(episodes: int) -> Iterator[dict[str, Any]]:
    """Play the pen with a late camera whose delay the robot does not state, for several values of ``camera_delay``."""
    policy = opened("pen")
    none: list[bool] = []
    for setting in SETTINGS_S:
        conduct = EpisodeSettings("2", Latency("33ms"), "aligned", envelope={"camera_delay": setting})
        won = play("pen", policy, range(FIRST, FIRST + episodes), conduct, {"camera_delay": CAMERA_S}, False)
        none = none or won
        yield {"camera_delay": setting, "played": share(won), **difference(won, none)}


def height(episodes: int) -> Iterator[dict[str, Any]]:
    """Let pens fall from several heights, with several delays of the camera and of the policy."""
    policy = opened("pen")
    for camera, latency in HEIGHT_DELAYS:
        conduct = EpisodeSettings("2", Latency(latency), "aligned")
        for above in HEIGHTS_M:
            options = {"camera_delay": camera, "heights": (above, above)}
            won = play("pen", policy, range(FIRST, FIRST + episodes), conduct, options)
            yield {
                "camera_delay": round(camera, 4),
                "latency": latency,
                "height_m": above,
                "played": share(won),
            }


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


def fp8(episodes: int) -> Iterator[dict[str, Any]]:
    """Play with the language model in FP8, on engine cuda. On a CPU, the references of its kernels compute."""
    for task, replan in FP8_REPLAN.items():
        conduct, seeds = EpisodeSettings(replan), range(FIRST, FIRST + episodes)
        whole = play(task, opened(task, engine="cuda"), seeds, conduct)
        with tempfile.TemporaryDirectory() as folder:
            won = play(task, with_fp8(task, Path(folder)), seeds, conduct)
        yield {"task": task, "before": share(whole), "after": share(won), **difference(won, whole)}


def with_fp8(task: str, folder: Path) -> SideBySide:
    """Load the policy of a task on engine cuda, with its language model in FP8."""
    bundle = folder / "fp8.gguf"
    line = ("quantize", str(ASSETS / f"{TASKS[task][0]}.gguf"), "--recipe", "language=fp8", "--episodes", "0")
    sinew(*line, "--out", str(bundle))
    return opened(task, bundle, "cuda")


def views(episodes: int) -> Iterator[dict[str, Any]]:
    """Play with an older frame of a camera in the requests that do not need its newest frame, by the rule.

    A policy that was loaded with ``reuse=True`` has stored the features of the older frame. Its vision tower does not
    run for this view, and the actions are those of that frame. The rule "all" always uses all newest frames.
    """
    vision_ms = {new: vision_time(new) for new in (1, 2)}
    policy = opened("blocks")
    for task, rules in RULES.items():
        whole: list[bool] = []
        for text in rules:
            won, requests, older = play_views(task, policy, text, range(FIRST, FIRST + episodes))
            whole = whole or won
            yield {
                "task": task,
                "rule": text,
                "played": share(won),
                "requests_per_episode": round(requests / episodes, 1),
                "views_per_episode": round((2 * requests - older) / episodes, 1),
                "vision_ms_per_episode": round(
                    (vision_ms[2] * (requests - older) + vision_ms[1] * older) / episodes, 1
                ),
                **difference(won, whole),
            }


def play_views(task: str, policy: SideBySide, text: str, seeds: Sequence[int]) -> tuple[list[bool], int, int]:
    """Play episodes with a rule. Returns their outcomes, the requests, and the requests with an older frame."""
    rules: list[ViewRule] = []

    class Refreshed:
        """The policy for one episode, which gets the frames that the rule chooses."""

        def __init__(self) -> None:
            self.rule = ViewRule("front:every:1" if text == "all" else text)
            rules.append(self.rule)

        def __getattr__(self, name: str) -> Any:
            return getattr(policy, name)

        def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
            images = {name: frame() for name, frame in observation["images"].items()}
            images[self.rule.camera] = self.rule.frame(images[self.rule.camera])
            return policy.infer({**observation, "images": images}, seed)

    def episode(seed: int) -> Episode:
        env, adapter = make_env(TASKS[task][1])
        draw_when_asked(env)
        return run_episode(env, adapter, Refreshed(), EpisodeSettings(VIEWS_REPLAN), seed)

    won = [each.success for each in policy.play(episode, seeds)]
    return won, sum(rule.requests for rule in rules), sum(rule.repeated for rule in rules)


def vision_time(new: int) -> float:
    """Return the milliseconds of the vision tower of blocks for 1 or 2 new views of 2.

    The result is the median of the fastest fifth, which other programs disturb least.
    """
    policy, rng = load("blocks", "cpu", reuse=True, engine="plan", threads=1), np.random.default_rng(0)
    policy.warm_up()
    images = {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in ("front", "wrist")}
    taken = []
    for _ in range(VISION_REQUESTS):
        images |= {name: rng.integers(0, 256, (64, 64, 3), np.uint8) for name in list(images)[:new]}
        observation = {
            "images": dict(images),
            "state": np.zeros(4, np.float32),
            "prompt": "red left",
            "seed": 0,
        }
        chunk = policy.infer(observation)
        assert not taken or chunk.timing.reused_views == 2 - new
        taken.append(chunk.timing.vision_ms)
    return float(np.median(np.sort(taken)[: len(taken) // 5]))


def choose(episodes: int) -> Iterator[dict[str, Any]]:
    """Choose a mode from the episodes of some seeds, and compare its cost in new episodes with the other modes."""
    policy = opened("pen")
    modes, new = [], {}
    for name, (latency, cost, available) in MODES.items():
        conduct = EpisodeSettings("2", Latency(latency), "aligned", motion=dict(AS_IS))
        measured, new[name] = (
            play("pen", policy, range(first, first + episodes), conduct) for first in (MEASURED_FIRST, FIRST)
        )
        modes.append(Mode(name, sum(measured), episodes, cost, available))
        yield {
            "mode": name,
            "latency": latency,
            "cost": cost,
            "available": available,
            "measured": share(measured),
            "played": share(new[name]),
        }
    for failure in FAILURE_COSTS:
        chosen = select(modes, failure)
        # The cost of each new episode in each mode, in expectation over the availability of the mode.
        costs = {
            name: MODES[name][1] + (1.0 - MODES[name][2] * np.array(won)) * failure
            for name, won in new.items()
        }
        mode = chosen.chosen.mode.name
        yield {
            "failure_cost": failure,
            "chosen": mode,
            "sure": chosen.sure,
            "expected": round(chosen.chosen.expected, 4),
            "realised": {name: round(float(each.mean()), 4) for name, each in costs.items()},
            "more_than_chosen": {
                name: mean_interval(each - costs[mode]) for name, each in costs.items() if name != mode
            },
        }


def mean_interval(values: np.ndarray) -> list[float]:
    """Return the mean of paired differences with its 95 % interval, by the normal approximation."""
    mean, half = float(values.mean()), 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5
    return [round(each, 4) for each in (mean, mean - half, mean + half)]


def stored(idea: str) -> list[dict[str, Any]]:
    """Return the rows of a stored comparison."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{idea}.json").read_text())["rows"]
    return rows


def advised_run(row: dict[str, Any]) -> tuple[str, str]:
    """Return the settings of a recorded run and the advice for it, as a page states them. Without advice, the settings
    that were played instead.
    """
    settings = row["recorded"]
    flags = [f"`--replan {settings['replan']}`", f"`--handover {settings['handover']}`"]
    flags.append(settings["latency"].replace("ms", " ms"))
    if "velocity" in settings:
        flags.append(f"velocity limit {settings['velocity']}")
    task = {"shove": "moved block"}.get(row["task"], row["task"])
    advice = [f"`{text.partition(': ')[2]}`" for text in row["advice"] if text.partition(": ")[2]]
    if "velocity" in settings and "velocity" not in row.get("advised", settings):
        advice.append("raise the limit")
    if "missed" in row:
        played = (
            f"`--{name} {value}`" for name, value in row["missed"].items() if settings.get(name) != value
        )
        advice = [f"none (played: {', '.join(played)})"]
    return f"{task}, {', '.join(flags)}", ", ".join(advice)


# The function of each comparison, and its usual number of episodes.
IDEAS: dict[str, tuple[Callable[[int], Iterator[dict[str, Any]]], int]] = {
    "need": (need, 200),
    "advise": (advise, 100),
    "delays": (delays, 100),
    "height": (height, 50),
    "skip": (skip, 50),
    "fp8": (fp8, 100),
    "views": (views, 50),
    "choose": (choose, 200),
    "warm": (warm, 14),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("idea", choices=IDEAS)
    parser.add_argument("--episodes", type=int, help="episodes of each variant, or pairs of each pause")
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
            "instructions": machine.instructions(),
            "load": [round(each, 1) for each in os.getloadavg()],
            "cpu_s": round(time.process_time()),
        }
        path.write_text(json.dumps(about)[:-1] + ', "rows": [\n' + ",\n".join(rows) + "\n]}\n")
    print(path)


if __name__ == "__main__":
    main()
