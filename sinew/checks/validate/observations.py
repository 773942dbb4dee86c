"""Observations for the comparison of engines: recorded observations, or random frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from sinew.core import Moment, Observation, SinewError
from sinew.policy import Policy
from sinew.records.recorder import read_records

SQUARE = 16  # side of the coloured squares in a random frame, in pixels
RANDOM = "random frames"

# For a policy that fits a task: the name of the source, and an endless iterator of observations from playing the task.
# None for a policy that fits no task.
Episodes = Callable[[Policy], "tuple[str, Iterator[Observation]] | None"]


def observations(
    reference: Policy, records: Path | None, episodes: Episodes
) -> tuple[str, Iterator[Observation]]:
    """Return the origin of observations, and the observations.

    Args:
        reference: The policy that reads the observations.
        records: A folder that `sinew serve --record` wrote; None to play a task instead.
        episodes: Plays a task. If no task fits this policy, random frames are used.
    """
    if records is not None:
        return f"records of {records}", recorded_observations(records, reference)
    return episodes(reference) or (RANDOM, random_observations(reference))


def random_observations(policy: Policy) -> Iterator[Observation]:
    """Yield random observations without end. Frames have coloured squares, and states are spread like training data."""
    spec, seed = policy.spec, 0
    while True:
        rng = np.random.default_rng(seed)
        # At the start of an episode, an observation history has fewer steps. Generate such observations too if the
        # policy masks the missing steps.
        fewer = seed % spec.history if spec.history_padding == "mask" else 0
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
    """Yield the observations that ``sinew serve --record`` wrote.

    Args:
        folder: The folder of the records.
        policy: The policy that reads the observations.

    Raises:
        SinewError: The policy rejects an observation, or the folder has no record with actions.
    """
    any_record = False
    for record in read_records(folder):
        if record.actions is not None:
            policy.check(record.observation)
            any_record = True
            yield record.observation
    if not any_record:
        raise SinewError(
            f"{folder}: expected records with actions, got only errors; record again with `sinew serve --record`"
        )
