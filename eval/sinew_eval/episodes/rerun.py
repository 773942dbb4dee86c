"""Send episodes to the Rerun viewer while they are played (``sinew eval --rerun``): every control step and every
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from sinew.records.viewers.rerun_log import RerunLog

from sinew_eval.episodes.player import EpisodePlayer
from sinew_eval.episodes.policies import EvalPolicy
from sinew_eval.episodes.runner import Episode
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.episodes.watched import WatchedSteps


class LoggedPlayer(EpisodePlayer):
    """A player that logs its episodes to one Rerun recording, one after the other.

    Entities at every control step: ``camera/NAME``, ``state/JOINT``, ``prompt`` and ``action/JOINT``, the executed
    action. Entities at every answer: ``answer/JOINT``, the first action of the chunk, and ``latency_ms``. Entities
    per episode: ``success``, the share of successful episodes so far, and ``episode``, a line of text at its
    beginning and end. Timelines: ``time`` (simulated seconds over all episodes), ``step`` and ``episode``.

    Args:
        task: The task.
        target: File or address, as :func:`sinew.records.viewers.rerun_log.target_of` returns it.
        labels: For each variant, the prefix of the names of its entities. Empty for a single variant.

    Raises:
        SinewError: The recording cannot be opened, see :class:`RerunLog`.
    """

    def __init__(self, task: Task, target: Path | str, labels: Mapping[Variant, str]):
        self.log = RerunLog(target, simulated=True)
        try:
            super().__init__(task)
        except BaseException:
            self.log.discard()
            raise
        self.env = WatchedSteps(self.env, self.stepped)
        self._labels = labels
        self._steps = self._episodes = 0
        self._wins: dict[str, list[bool]] = {}
        self.root: tuple[str, ...] = ()
        self.names: dict[str, tuple[str, ...]] = {"state": (), "action": ()}

    def play(self, variant: Variant, seed: int) -> Episode:
        label = self._labels.get(variant, "")
        self.root = (label,) if label else ()
        self._mark()
        self.log.text(self.root, "episode", f"seed {seed} begins")
        episode = super().play(variant, seed)
        wins = self._wins.setdefault(label, [])
        wins.append(episode.success)
        self._mark()
        outcome = f"seed {seed}: {'success' if episode.success else 'no success'} after {episode.steps} steps"
        self.log.text(self.root, "episode", outcome, level="INFO" if episode.success else "WARN")
        self.log.number(self.root, "success", sum(wins) / len(wins))
        self.log.send()
        self._episodes += 1
        return episode

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.log.close()

    def stepped(self, raw: Any, action: Any, _step: int) -> None:
        """Log the observation and the action of a control step.

        Args:
            raw: Observation of the environment before the step.
            action: Action that the environment executes.
        """
        seen = self.adapter.observation(raw)
        self._mark()
        if not self._steps:
            self.log.arrange(self.root, seen["images"], ("action", "state", "latency_ms"))
        self.log.pictures(self.root, seen["images"])
        self.log.values(self.root, "state", self.names["state"], seen["state"])
        self.log.values(self.root, "action", self.names["action"], action)
        if prompt := str(seen.get("prompt", "")):
            self.log.text(self.root, "prompt", prompt)
        self._steps += 1

    def answered(self, actions: np.ndarray, milliseconds: float) -> None:
        """Log an answer of the policy at the control step of its request.

        Args:
            actions: Actions of the chunk, [H, D].
            milliseconds: Latency of the answer.
        """
        self._mark()
        self.log.values(self.root, "answer", self.names["action"], actions[0])
        self.log.number(self.root, "latency_ms", milliseconds)

    def _mark(self) -> None:
        self.log.at(self._steps / self.adapter.control_hz, step=self._steps, episode=self._episodes)

    def _open(self, variant: Variant) -> EvalPolicy:
        policy: Any = super()._open(variant)
        scene: Any = self.env.unwrapped
        # Use the policy's names of the joints, or else the environment's names.
        self.names = {
            kind: found or tuple(getattr(scene, f"{kind}_names", ()))
            for kind, found in _names(policy).items()
        }
        return _Heard(policy, self)


class _Heard:
    """Wraps a policy, and passes every answer of the policy to a player, which logs it."""

    def __init__(self, policy: EvalPolicy, player: LoggedPlayer):
        self._policy, self._player = policy, player
        self.chunk_size, self.committed_rows = policy.chunk_size, policy.committed_rows
        self.motion, self.served = policy.motion, policy.served

    def start(self, env: gymnasium.Env) -> None:
        self._policy.start(env)

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        actions, milliseconds = self._policy.infer(observation, seed)
        self._player.answered(actions, milliseconds)
        return actions, milliseconds

    def close(self) -> None:
        self._policy.close()


def _names(policy: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of the state's and the action's numbers, if the policy states them."""
    if (loaded := getattr(policy, "policy", None)) is not None:
        return {"state": loaded.spec.state.names, "action": loaded.spec.action.names}
    served = getattr(policy, "served", {})
    return {kind: tuple(served.get(kind, {}).get("names") or ()) for kind in ("state", "action")}
