"""Check whether a bundle fits the observations of an environment. Only the bundle's header is read, without weights
or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Unpack

import gymnasium
import numpy as np
from sinew.bundle.rename import parse_renames, rename_cameras, renames_for
from sinew.core import Observation, PolicySpec, SinewError
from sinew.policy import open_bundle
from sinew.processing import Allowed, Processor
from sinew_client.target import LOCAL, Target

from sinew_eval.episodes.adapters import Direct, EnvAdapter, make_env
from sinew_eval.episodes.settings import Task, Variant

# Key: a built-in task. Value: the built-in policy that plays it.
TASKS = {
    "sinew/Blocks-v0": "blocks",
    "sinew/BlocksGoal-v0": "act",
    "sinew/Pen-v0": "pen",
    "sinew/Egg-v0": "egg",
}


def task_of(target: str, rename: Sequence[str] = (), **allowed: Unpack[Allowed]) -> str:
    """Choose the built-in task that fits a bundle.

    Args:
        target: The bundle.
        rename: Renamed cameras, as ``NEW=OLD``.
        **allowed: Options of :class:`sinew.processing.Processor`.

    Returns:
        The first built-in task that fits. If none fits, the first built-in task.
    """
    processor = _processor(target, tuple(rename), **allowed)
    for task in TASKS:
        with suppress(SinewError):
            check_observation(Task(task), [processor])
            return task
    return next(iter(TASKS))


def check_variants(task: Task, variants: Sequence[Variant]) -> float:
    """Check that the bundles of ``variants`` accept the observations of the task. Variants on a server are not checked
    here, because a server checks its requests itself.

    Args:
        task: The task.
        variants: The variants.

    Returns:
        The control rate of the task, in Hz.

    Raises:
        SinewError: A policy does not fit. The message names the field.
    """
    targets = {(v.target, v.rename, v.allow_missing_cameras, v.allow_empty_prompt) for v in variants}
    processors = [
        _processor(target, rename, allow_missing_cameras=missing, allow_empty_prompt=empty)
        for target, rename, missing, empty in sorted(targets)
        if Target.parse(target).kind == LOCAL
    ]
    try:
        return check_observation(task, processors)
    except MisfitError as error:
        raise SinewError(f"{error}; {_advice(task.env, error)}") from error


class MisfitError(SinewError):
    """A policy does not accept the observations of an environment.

    Attributes:
        spec: Specification of the policy.
        shown: What the environment has: the names of its cameras, the number of values in its state, and the number of
            values in its action.
    """

    def __init__(self, text: str, spec: PolicySpec, shown: tuple[tuple[str, ...], int, int]):
        super().__init__(text)
        self.spec, self.shown = spec, shown


def _advice(env: str, error: MisfitError) -> str:
    """Return a text with the options of the command line that may help if a policy does not fit the environment
    ``env``.
    """
    spec, (cameras, state, action) = error.spec, error.shown
    plays = [task for task in TASKS if task != env and _plays(spec, task)]
    others = [f"this policy fits {plays[0]}"] if plays else []
    if env in TASKS:
        others.append(f"`sinew eval {TASKS[env]} --env {env}` plays this environment")
    if (spec.state.dim, spec.action.dim) != (state, action):
        sizes = (
            f"the policy's state and actions have {spec.state.dim} and {spec.action.dim} numbers, the environment's"
            " have"
            f" {state} and {action}, so they do not fit"
        )
        if not plays and spec.name not in TASKS.values():
            others = ["pass its own environment as --env ID, MODULE:CLASS or a suite's task"]
        return ", ".join([sizes, *others])
    renames = renames_for([camera.name for camera in spec.cameras], cameras)
    return ", ".join([f"rename the cameras with {renames}"] * bool(renames) + others) or "choose an --adapter"


def _plays(spec: PolicySpec, env: str) -> bool:
    own = open_bundle(TASKS[env]).manifest.spec
    return (spec.cameras, spec.state.dim, spec.action.dim) == (own.cameras, own.state.dim, own.action.dim)


def _processor(target: str, rename: tuple[str, ...], **allowed: Unpack[Allowed]) -> Processor:
    manifest = open_bundle(target).manifest
    spec = rename_cameras(manifest.spec, parse_renames(rename))
    return Processor(replace(manifest, spec=spec), **allowed)


def check_observation(task: Task, processors: Sequence[Processor]) -> float:
    """Check the first observation of a task's environment.

    Args:
        task: The task.
        processors: Preprocessing of the policies.

    Returns:
        The control rate in Hz.

    Raises:
        MisfitError: A policy does not fit.
    """
    env, adapter = make_env(task.env, task.adapter, task.env_options)
    try:
        if processors:
            raw, _ = env.reset(seed=0, options=task.reset_options)
            observation = Observation.from_mapping(adapter.observation(raw))
            for processor in processors:
                _check(task, env, adapter, processor, observation)
        return adapter.control_hz
    finally:
        env.close()


def _check(
    task: Task, env: gymnasium.Env, adapter: EnvAdapter, processor: Processor, observation: Observation
) -> None:
    width = (env.action_space.shape or (0,))[0]
    shown = tuple(map(str, observation.images)), int(np.size(observation.state)), width
    spec, begins = processor.spec, f"{task.env} and {processor.spec.name} do not fit"
    try:
        processor.check(observation)
    except SinewError as error:
        raise MisfitError(f"{begins}: {error}", spec, shown) from error
    if isinstance(adapter, Direct) and spec.action.dim != width:
        got = f"actions: the policy has {spec.action.dim} numbers, the environment expects {width}"
        raise MisfitError(f"{begins}: {got}", spec, shown)
