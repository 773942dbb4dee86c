"""Use the parts of a vectorised gymnasium environment as separate environments, which are reset and stepped at the
same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from sinew.core import SinewError

from sinew_eval.episodes.adapters import time_limit
from sinew_eval.episodes.lockstep import RESET, STEP

# Attributes that adapters read from an environment, in addition to its spec.
ADAPTER_ATTRIBUTES = ("control_hz", "max_steps", "task_description")


class VectorParts:
    """The parts of a vectorised environment in lockstep (:class:`sinew_eval.episodes.lockstep.Shared`).

    With ``AutoresetMode.DISABLED``, a part begins its next episode at once. The other modes begin the next episode by
    themselves, without its seed. Then every part waits for the last one, and all parts are reset together.

    Attributes:
        together: True if all parts are reset together.

    Raises:
        SinewError: The environment does not state its reset mode.
    """

    def __init__(self, env: gymnasium.vector.VectorEnv):
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise SinewError(
                f"env: expected metadata with autoreset_mode, one of AutoresetMode, got {mode!r}"
            )
        self.env, self.mode = env, mode
        self.together = mode is not AutoresetMode.DISABLED
        self._rest = np.zeros(env.single_action_space.shape or (), env.single_action_space.dtype)
        self._last: list[Any] = [self._rest] * env.num_envs
        self._over = np.zeros(env.num_envs, bool)
        self._fresh = True

    def parts(self) -> list[gymnasium.Env]:
        """Return one gymnasium environment for each part of the vectorised environment."""
        self._parts = [Part(self.env, index) for index in range(self.env.num_envs)]
        return list(self._parts)

    def attend(self, ask: Callable[[int, str, Any], Any]) -> None:
        for part in self._parts:
            part.ask = ask

    def reset(self, requests: Mapping[int, Any]) -> dict[int, Any]:
        """Reset the parts that requested it.

        Args:
            requests: For each part that requested a reset, by its number: (seed, options).

        Returns:
            For each of these parts: (observation, info).
        """
        options = next(iter(requests.values()))[1]
        observations, infos = self._reset({part: seed for part, (seed, _) in requests.items()}, options)
        return {part: (observations[part], _of(infos, part)) for part in requests}

    def step(self, requests: Mapping[int, Any]) -> dict[int, Any]:
        """Step all parts at the same time.

        Args:
            requests: The action of each part that requested a step, by the part's number. A part whose episode has
                ended repeats its last action.

        Returns:
            The result of the step for each part in ``requests``, by the part's number.
        """
        for part, action in requests.items():
            self._last[part] = np.asarray(action, self._rest.dtype)
        idle = {int(part): 0 for part in np.flatnonzero(self._over) if part not in requests}
        if idle and not self.together:
            # An environment whose episode has ended cannot be stepped, so reset it.
            self._reset(idle, None)
        seen, rewards, ends, cuts, infos = self.env.step(np.stack(self._last))
        observations, self._over = self._apart(seen), np.asarray(ends) | np.asarray(cuts)
        steps = {}
        for part in requests:
            shown, info = observations[part], infos
            if self._over[part] and self.mode is AutoresetMode.SAME_STEP:
                shown, info = infos["final_obs"][part], infos["final_info"]
            steps[part] = (shown, rewards[part], bool(ends[part]), bool(cuts[part]), _of(info, part))
        return steps

    def _reset(self, seeds: Mapping[int, int], options: dict[str, Any] | None) -> tuple[list[Any], Any]:
        spare = next(iter(seeds.values()))
        all_seeds = [seeds.get(part, spare) for part in range(self.env.num_envs)]
        if not self.together:
            # Reset every environment the first time, because an environment that was never reset cannot be stepped.
            mask = np.isin(np.arange(self.env.num_envs), list(seeds)) | self._fresh
            options = {**(options or {}), "reset_mask": mask}
            self._over &= ~mask
        self._fresh = False
        seen, infos = self.env.reset(seed=all_seeds, options=options)  # type: ignore[arg-type]
        return self._apart(seen), infos

    def _apart(self, observation: Any) -> list[Any]:
        if not getattr(self.env, "copy", True):
            # Copy the observations, because the next step overwrites them in place.
            observation = deepcopy(observation)
        return list(iterate(self.env.observation_space, observation))


class Part(gymnasium.Env):
    """One environment of a vectorised environment.

    Attributes:
        ask: Sends a request and waits until all parts have sent one.
    """

    ask: Callable[[int, str, Any], Any]

    def __init__(self, env: gymnasium.vector.VectorEnv, index: int):
        self._index = index
        self.action_space, self.observation_space = env.single_action_space, env.single_observation_space
        self.metadata = dict(env.metadata)
        # Environments of the vector in this process. The tuple is empty if the vector runs its environments in
        # other processes.
        copies: Sequence[gymnasium.Env] = getattr(env.unwrapped, "envs", ())
        self.spec = env.spec or (copies[0].spec if copies else None)
        for each in (*(copy.unwrapped for copy in copies[:1]), env.unwrapped):
            for name in ADAPTER_ATTRIBUTES:
                if hasattr(each, name):
                    setattr(self, name, getattr(each, name))
        if copies and (limit := time_limit(copies[0])):
            self.max_steps = limit

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self.ask(self._index, RESET, (seed, options))

    def step(self, action: Any) -> Any:
        return self.ask(self._index, STEP, action)


def _of(infos: Mapping[str, Any], part: int) -> dict[str, Any]:
    """Return the entries of a vectorised info dict that belong to one part. The masks in the dict (keys that begin with
    "_") state which parts have an entry.
    """
    entries = {}
    for name, value in infos.items():
        mask = infos.get(f"_{name}")
        if (name.startswith("_") and name[1:] in infos) or (mask is not None and not mask[part]):
            continue
        entries[name] = _of(value, part) if isinstance(value, Mapping) else value[part]
    return entries
