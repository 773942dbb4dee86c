"""Play episodes of one task in this process, one after the other or several in lockstep."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
from sinew.core import SinewError
from sinew.engine.backend import BACKENDS
from sinew_client.target import EXPERT, LOCAL, Target

from sinew_eval.episodes.adapters import EnvAdapter, make_env
from sinew_eval.episodes.lockstep import WorkerSlot, play_together
from sinew_eval.episodes.policies import (
    EpisodePolicy,
    EvalPolicy,
    InProcess,
    ServerPolicy,
    identity,
    open_policy,
)
from sinew_eval.episodes.runner import Episode, EpisodeSettings, run_episode, run_stream_episode
from sinew_eval.episodes.settings import StreamCosts, Task, Variant

# In lockstep, a group has this many episodes for each seat (one of the environments that step together). Near the end
# of a group some seats are idle, so more episodes for each seat keep the batches fuller.
TURNS = 4


def key(task: Task, variant: Variant) -> str:
    """Return a text that identifies everything that determines an episode, except its seed.

    Episodes with the same key and seed need not be played again. A bundle is identified by its content and not by its
    file name.

    Args:
        task: The task.
        variant: The variant.

    Returns:
        A JSON text.
    """
    what = {**task.to_dict(), **variant.to_dict(), "target": identity(variant.target)["id"]}
    if variant.edge_adapter:
        what["edge_adapter"] = identity(variant.edge_adapter)["id"]
    return json.dumps(what, sort_keys=True)


def groups(variant: Variant, seeds: Sequence[int]) -> list[tuple[int, ...]]:
    """Divide seeds into groups that are played together.

    An answer's last bits depend on the size of its batch and on its place in the batch. Therefore the groups follow
    from the variant and the seeds alone, and not from which process is free. Episodes in a batch do not influence
    each other otherwise.

    Args:
        variant: The variant. Its ``batch`` is the number of episodes in lockstep.
        seeds: The seeds.

    Returns:
        Groups of seeds, in the order of ``seeds``. A group has one seed if ``batch`` is 1.
    """
    if variant.batch == 1:
        return [(seed,) for seed in seeds]
    found: dict[int, list[int]] = {}
    for seed in seeds:
        found.setdefault(seed // (TURNS * variant.batch), []).append(seed)
    return [tuple(group) for group in found.values()]


class EpisodePlayer:
    """Plays episodes of one task. It keeps its environments and the last policy open.

    Args:
        task: The task.
        make: Makes an environment and its adapter. None to use the environment that the task names.
    """

    def __init__(self, task: Task, make: Callable[[], tuple[gymnasium.Env, EnvAdapter]] | None = None):
        self.task = task
        self._make = make or (lambda: make_env(task.env, task.adapter, task.env_options))
        self.env, self.adapter = self._make()
        # For episodes in lockstep: the further environments, each with its adapter.
        self._beside: list[tuple[gymnasium.Env, EnvAdapter]] = []
        self._policy: Any = None
        # True if the adapters are fitted to the policy's metadata.
        self._fits = False
        self._opened: tuple[Any, ...] = ()

    def play(self, variant: Variant, seed: int) -> Episode:
        policy, conduct = self.ready(variant), self.conduct(variant)
        if variant.stream:
            if not isinstance(policy, InProcess):
                raise SinewError(
                    "stream: expected a bundle, because a server streams in real time; use `sinew run --stream` with a"
                    " server"
                )
            costs = StreamCosts.parse(variant.stream)
            return run_stream_episode(self.env, self.adapter, policy.policy, conduct, seed, costs)
        return run_episode(self.env, self.adapter, policy, conduct, seed)

    def play_group(self, variant: Variant, seeds: Sequence[int]) -> list[Episode]:
        """Play a group of :func:`groups`.

        Args:
            variant: The variant.
            seeds: Seeds of the group.

        Returns:
            The episodes, in the order of ``seeds``.
        """
        if variant.batch == 1:
            return [self.play(variant, seed) for seed in seeds]
        policy, conduct = self.ready(variant), self.conduct(variant)
        seats = [WorkerSlot(*each) for each in self.beside(min(variant.batch, len(seeds)), policy)]
        return play_together(seats, policy, conduct, seeds)

    def beside(self, count: int, policy: EvalPolicy) -> list[tuple[gymnasium.Env, EnvAdapter]]:
        """Return environments that are fitted to a policy. Missing environments are made.

        Args:
            count: Number of environments.
            policy: The policy.

        Returns:
            The environments with their adapters.
        """
        while 1 + len(self._beside) < count:
            self._beside.append(self._make())
            self._fit(self._beside[-1][1], policy)
        return [(self.env, self.adapter), *self._beside][:count]

    def conduct(self, variant: Variant) -> EpisodeSettings:
        """Return the settings with which the episodes of a variant are played."""
        return EpisodeSettings(
            variant.replan,
            variant.latency,
            variant.handover,
            self.task.reset_options,
            self.task.noise,
            self.task.realtime,
            self.task.motion,
            self.task.future,
            variant.edge_adapter,
        )

    def ready(self, variant: Variant) -> Any:
        """Return the open policy of a variant. The last policy stays open until another one is needed."""
        opened = (variant.target, variant.device, variant.dtype, variant.solver_steps, variant.engine)
        what = (*opened, variant.batch > 1)
        if what != self._opened:
            self.close_policy()
            self._policy, self._opened = self._open(variant), what
            for adapter in (self.adapter, *(adapter for _, adapter in self._beside)):
                self._fit(adapter, self._policy)
        return self._policy

    def _open(self, variant: Variant) -> EvalPolicy:
        if variant.target == EXPERT and hasattr(self.env.unwrapped, "expert"):
            return EpisodePolicy(self.env.unwrapped.expert())
        policy = open_policy(variant, self.task.env)
        if variant.batch > 1 and (why := getattr(policy, "one_by_one", "")):
            policy.close()
            raise SinewError(f"batch {variant.batch}: {why}")
        self._fits = isinstance(policy, (InProcess, ServerPolicy))
        return policy

    def _fit(self, adapter: EnvAdapter, policy: EvalPolicy) -> None:
        if self._fits and hasattr(adapter, "fit"):
            adapter.fit(policy.served)

    def close_policy(self) -> None:
        if self._policy is not None:
            self._policy.close()
        self._policy, self._opened, self._fits = None, (), False

    def close(self) -> None:
        self.close_policy()
        for env, _ in [(self.env, self.adapter), *self._beside]:
            env.close()


class one_thread:  # noqa: N801 - used like a function: with one_thread():
    """Context manager in which torch uses one compute thread, as in worker processes.

    The number of threads decides how sums are split, and therefore their last bits.
    """

    def __init__(self, variants: Sequence[Variant]):
        # Do not import torch for a run that computes on a server or without torch.
        self.needed = any(
            Target.parse(variant.target).kind == LOCAL
            and (variant.engine is None or "torch" in BACKENDS[variant.engine].packages)
            and not Path(variant.target).is_dir()
            for variant in variants
        )

    def __enter__(self) -> None:
        if self.needed:
            import torch

            self.before = torch.get_num_threads()
            torch.set_num_threads(1)

    def __exit__(self, *exc_info: object) -> None:
        if self.needed:
            import torch

            torch.set_num_threads(self.before)
