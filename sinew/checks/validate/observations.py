"""Observations to hold engines against: recorded ones, or frames that no camera has seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from sinew.core import Moment, Observation, SinewError
from sinew.policy import Policy
from sinew.records.recorder import read_records

SQUARE = 16  # pixels of one colour in a random frame
RANDOM = "random frames"

# Where observations come from, and they, without end: what a policy sees when it plays a task that it fits. None for
# a policy that fits no task.
Episodes = Callable[[Policy], "tuple[str, Iterator[Observation]] | None"]


def observations(
    reference: Policy, records: Path | None, episodes: Episodes
) -> tuple[str, Iterator[Observation]]:
    """Return the origin of observations, and the observations.

    Args:
        reference: The policy that gets them.
        records: A folder that `sinew serve --record` wrote, to take them from.
        episodes: Plays a task. If it has none for this policy, frames are random.
    """
    if records is not None:
        return f"records of {records}", recorded_observations(records, reference)
    return episodes(reference) or (RANDOM, random_observations(reference))


def random_observations(policy: Policy) -> Iterator[Observation]:
    """Yield, without end, frames of coloured squares with states as spread as those of the training data."""
    spec, seed = policy.spec, 0
    while True:
        rng = np.random.default_rng(seed)
        fewer = seed % spec.history if spec.history_padding == "mask" else 0  # as an episode's start has
        *earlier, newest = [_random_moment(policy, rng) for _ in range(spec.history - fewer)]
        base = replace(policy.dummy_observation(), seed=seed)
        yield replace(base, images=newest.images, state=newest.state, earlier=tuple(earlier))
        seed += 1


def _random_moment(policy: Policy, rng: np.random.Generator) -> Moment:
    images = {}
    for camera in policy.spec.cameras:
        shape = -(-camera.height // SQUARE), -(-camera.width // SQUARE), 3
        squares = rng.integers(0, 256, shape, dtype=np.uint8)
        frame = squares.repeat(SQUARE, axis=0).repeat(SQUARE, axis=1)
        images[camera.name] = np.ascontiguousarray(frame[: camera.height, : camera.width])
    state = policy.processor.state_normalizer.unnormalize(
        rng.standard_normal(policy.processor.state_normalizer.width)
    )
    for step in policy.processor.recipe.state_steps:
        if step.choices:
            state[list(step.dims)] = rng.choice(step.choices)
    return Moment(images, np.asarray(state, np.float32))


def recorded_observations(folder: Path, policy: Policy) -> Iterator[Observation]:
    """Yield the observations of ``sinew serve --record``. Raises :class:`SinewError` for those that the policy
    rejects.
    """
    found = False
    for record in read_records(folder):
        if record.actions is not None:
            policy.check(record.observation)
            found = True
            yield record.observation
    if not found:
        raise SinewError(f"{folder}: expected records with actions, got only errors")
