"""Interface for `sinew`: observations of a simulated task that a policy fits, and its success gate.

The entry point `sinew.judges` names this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinew.core import Observation, ObservationError, SinewError, progress
from sinew.core.extras import MissingPackageError
from sinew.engine.backend import EngineChoice
from sinew.policy import Policy, open_bundle
from sinew.processing import Processor

from sinew_eval.episodes.outside import TypedNames
from sinew_eval.episodes.settings import Latency, Variant
from sinew_eval.report.gate import GATES, Gate, read_gate

# First seed of the observations. Neither training nor the gates use these episodes.
FIRST_SEED = 9000
REPLAN = 8


def observations(policy: Policy) -> tuple[str, Iterator[Observation]] | None:
    """Play a task and yield the policy's observations, to measure the cost of another engine or precision.

    Args:
        policy: The policy, which computes the chunks.

    Returns:
        The built-in task that the policy fits, and the observations of its endless episodes, one for each chunk. None
            if it fits no task, or if no simulator is installed.
    """
    try:
        from sinew_eval.episodes.adapters import make_env
        from sinew_eval.episodes.fitting import TASKS
    except ModuleNotFoundError:
        # The package was installed without its dependencies gymnasium and mujoco.
        return None
    for task in TASKS:
        env, adapter = make_env(task, "", None)
        raw, _ = env.reset(seed=FIRST_SEED)
        try:
            policy.check(adapter.observation(raw))
            fits = env.action_space.shape == (policy.spec.action.dim,)
        except ObservationError:
            fits = False
        if fits:
            return f"episodes of {task}", _play(policy, env, adapter)
        env.close()
    return None


def _play(policy: Policy, env: Any, adapter: Any) -> Iterator[Observation]:
    seed = FIRST_SEED
    while True:
        raw, _ = env.reset(seed=seed)
        done, replan = False, 0
        while not done:
            observation = Observation.from_mapping({**adapter.observation(raw), "seed": seed + replan})
            yield observation
            for row in policy.infer(observation).actions[:REPLAN]:
                raw, _, terminated, truncated, _ = env.step(adapter.action(row))
                if done := bool(terminated or truncated):
                    break
            replan += 1
        seed += 1


@dataclass(frozen=True)
class SuccessGate:
    """A gate with the names that may be used on this machine.

    Attributes:
        gate: The recorded run.
        typed: The names that the person at this machine typed. None if there are none.
    """

    gate: Gate
    typed: TypedNames | None = None

    def play(
        self, bundle: Path, choice: EngineChoice, episodes: int, ignore_recipe: bool = False
    ) -> dict[str, Any]:
        """Play episodes of the gate.

        Args:
            bundle: The bundle.
            choice: The engine.
            episodes: Number of episodes, from the first one of the gate.
            ignore_recipe: True to ignore the bundle's quantisation recipe.

        Returns:
            The verdict, ready for JSON.

        Raises:
            UntypedNameError: The gate uses names that are neither built in nor typed.
        """
        from sinew_eval.episodes import campaign

        protocol = self.gate.protocol
        count = min(episodes, self.gate.episodes)
        variant = Variant(
            str(bundle),
            protocol["replan"],
            Latency(protocol["latency"]),
            protocol["handover"],
            protocol["solver_steps"],
            choice.options.dtype,
            choice.options.device,
            choice.engine,
            ignore_recipe,
        )
        seeds = range(self.gate.first_seed, self.gate.first_seed + count)
        with progress.task(f"playing {count} episodes of {protocol['env']}", count) as advance:
            task = self.gate.task(self.typed)
            (played,) = campaign.run(task, [variant], seeds, on_episode=lambda *_: advance(""))
        passed, text = self.gate.judge(played)
        outcomes = self.gate.outcomes
        return {
            "env": protocol["env"],
            "episodes": count,
            "wins": sum(episode.success for episode in played),
            "recorded_wins": sum(outcomes[episode.seed] for episode in played),
            "passed": passed,
            "text": text,
        }


def gate(
    path: Path,
    env: str = "",
    adapter: str = "",
    env_options: dict[str, Any] | None = None,
    reset_options: dict[str, Any] | None = None,
) -> SuccessGate:
    """Read a gate, and check that its names may be used on this machine.

    Args:
        path: The file.
        env: Environment that the person typed. "" if there is none.
        adapter: Adapter that the person typed. "" if there is none.
        env_options: Arguments of the environment's constructor that the person typed.
        reset_options: Options of the reset that the person typed.

    Returns:
        The gate.

    Raises:
        UntypedNameError: The gate uses names that are neither built in nor typed.
        SinewError: The file is not a gate.
    """
    success = SuccessGate(read_gate(path), TypedNames(env, adapter, env_options, reset_options))
    success.gate.task(success.typed)
    return success


def gate_of(bundle: Path) -> tuple[SuccessGate | None, str]:
    """Return the built-in gate whose task a bundle can play, or None, and the reason as a text."""
    try:
        from sinew_eval.episodes.fitting import check_observation
    except ModuleNotFoundError as error:
        return None, str(MissingPackageError("the gates of built-in tasks", error.name or "mujoco"))
    processor = Processor(open_bundle(bundle).manifest)
    for path in sorted(GATES.glob("*.json")):
        recorded = read_gate(path)
        task = recorded.task()
        try:
            check_observation(task, [processor])
        except SinewError:
            continue
        return SuccessGate(recorded), f"the policy takes the observations of {task.env}"
    return None, "no built-in task has the cameras and the state of this policy; pass --gate to choose a gate"
