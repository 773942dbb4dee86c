"""Episodes for Rerun's viewer while they are played (``sinew eval --rerun``): every control step, every answer."""

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
    """A player whose episodes follow each other on a Rerun recording.

    ``camera/NAME``, ``state/JOINT``, ``prompt`` and ``action/JOINT``, what was executed, at every control step;
    ``answer/JOINT``, the first row of a chunk, and ``latency_ms`` where the policy was asked; ``success``, the share of
    the episodes so far; ``episode``, a line at the beginning and the end of each. Timelines: ``time``, seconds of
    simulated time over all episodes, ``step`` and ``episode``. labels: of several variants, whose entities then lie
    under these names; empty for one.

    target: of :func:`sinew.records.viewers.rerun_log.target_of`. Raises as :class:`RerunLog` does.
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
        said = f"seed {seed}: {'success' if episode.success else 'no success'} after {episode.steps} steps"
        self.log.text(self.root, "episode", said, level="INFO" if episode.success else "WARN")
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
        """Log what was shown before a control step and what it executed."""
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
        """Log an answer of the policy, at the step that asked."""
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
    """A policy that tells a player of every answer."""

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
    """Return names of the state's and the action's numbers, as far as a policy says them."""
    if (loaded := getattr(policy, "policy", None)) is not None:
        return {"state": loaded.spec.state.names, "action": loaded.spec.action.names}
    served = getattr(policy, "served", {})
    return {kind: tuple(served.get(kind, {}).get("names") or ()) for kind in ("state", "action")}
