"""The observations of an environment against the header of a bundle: no weights, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from sinew.bundle.rename import parse_renames, rename_cameras
from sinew.core import Observation, SinewError
from sinew.eval.adapters import make_env
from sinew.eval.policies import EXPERT
from sinew.eval.settings import Task, Variant
from sinew.policy import open_bundle
from sinew.processing import Processor

TASKS = ("sinew/Blocks-v0", "sinew/Pen-v0", "sinew/Egg-v0")  # the embedded ones


def task_of(target: str, rename: Sequence[str] = (), allow_missing_cameras: bool = False) -> str:
    """Return the embedded task whose observations the policy of a bundle takes, and the first one if it takes none."""
    processor = _processor(target, tuple(rename), allow_missing_cameras)
    for task in TASKS:
        with suppress(SinewError):
            check_observation(Task(task), [processor])
            return task
    return TASKS[0]


def check_variants(task: Task, variants: Sequence[Variant]) -> float:
    """Check that the bundles of ``variants`` take what the task's environment shows; return its control rate in Hz.

    A server checks what it is sent. Raises :class:`SinewError` with the field that a policy does not take.
    """
    targets = {(v.target, v.rename, v.allow_missing_cameras) for v in variants}
    processors = [
        _processor(target, rename, missing)
        for target, rename, missing in sorted(targets)
        if target != EXPERT and "://" not in target
    ]
    return check_observation(task, processors)


def _processor(target: str, rename: tuple[str, ...], allow_missing_cameras: bool) -> Processor:
    manifest = open_bundle(target).manifest
    spec = rename_cameras(manifest.spec, parse_renames(rename))
    return Processor(replace(manifest, spec=spec), allow_missing_cameras)


def check_observation(task: Task, processors: Sequence[Processor]) -> float:
    """Check the first observation of a task's environment; return the control rate in Hz."""
    env, adapter = make_env(task.env, task.adapter, task.env_options)
    try:
        if processors:
            raw, _ = env.reset(seed=0, options=task.reset_options)
            observation = Observation.from_mapping(adapter.observation(raw))
            for processor in processors:
                processor.check(observation)
        return adapter.control_hz
    except SinewError as error:
        raise SinewError(f"{task.env}: the policy does not take its observations: {error}") from error
    finally:
        env.close()
