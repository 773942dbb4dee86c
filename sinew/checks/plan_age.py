"""Compares an old plan (a chunk of actions from an earlier observation) with a new plan for the same control steps.
Both start from the same noise.

A policy that samples its actions gives another chunk for each request, even if nothing has happened. The recorded
chunks cannot tell this noise from a change of the scene. Therefore each recorded observation is computed again with
the same seeds. The differences that all seeds have in common come from the observations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np

from sinew.core import ActionChunk, Observation, SinewError
from sinew.records.recorder import Record

LARGE = 1.0  # a change above this many standard deviations of the policy's own actions makes a plan outdated
COMPARED = 8  # two plans are compared over the next 1/8 of a chunk
SLIPS = 10  # a plan that is right, but early or late by up to 1/10 of a chunk, is not outdated


@dataclass(frozen=True)
class Episode:
    """The plans (chunks of actions) that were computed for one recorded episode.

    Attributes:
        name: Name of the episode in the recording.
        steps: Control step of each observation, ascending.
        frames: Index of the observation in which the frames of each observation first appeared.
        plans: float32 [T, N, H, D], a chunk for each observation and seed.
    """

    name: str
    steps: list[int]
    frames: list[int]
    plans: np.ndarray


@dataclass(frozen=True)
class Age:
    """How plans (chunks) of one age differ from the newest plans for the same control steps.

    Attributes:
        age: Age of the plans, in executed control steps.
        compared: Number of observations that were compared.
        outdated: Number of observations at which the old plan is outdated.
        episodes: Number of episodes with a compared observation.
        outdated_episodes: Number of episodes with at least one outdated plan.
        typical: Median change, in standard deviations of the actions, without the part of the noise.
    """

    age: int
    compared: int
    outdated: int
    episodes: int
    outdated_episodes: int
    typical: float


@dataclass(frozen=True)
class PlanAges:
    """The result of comparing old and new plans (chunks of actions) of one recording.

    Attributes:
        ages: One entry for each age at which at least half of the plans could be compared, ascending.
        noise: Standard deviation of the actions of equal observations with different seeds, in standard deviations of
            all actions.
        abrupt: (episode, control step) of each change that the plan of the observation before did not contain.
        episodes: Number of episodes.
        observations: Number of observations.
        draws: Number of seeds.
        size: H, actions in a chunk.
    """

    ages: list[Age]
    noise: float
    abrupt: list[tuple[str, int]]
    episodes: int
    observations: int
    draws: int
    size: int

    @property
    def abrupt_episodes(self) -> int:
        return len({name for name, _ in self.abrupt})


def plan_again(
    infer: Callable[[Observation], ActionChunk],
    records: Iterable[Record],
    hz: float,
    draws: int,
    oldest: int,
    done: Callable[[], None] = lambda: None,
) -> list[Episode]:
    """Compute each recorded observation again, with the same seeds.

    Args:
        infer: Computes a chunk.
        records: Records of ``sinew run --frames``, in their order.
        hz: Control steps per second.
        draws: Number of seeds.
        oldest: Largest age of a frame at its observation, in control steps. A frame that repeats byte for byte is as
            old as its first appearance, but at most this old.
        done: Called after each observation.

    Raises:
        SinewError: A record is not one of ``sinew run --frames``, or a human drove the robot in all of them.
    """
    episodes: list[Episode] = []
    for name, observations in groupby(_episodes(records, hz), itemgetter(0)):
        steps: list[int] = []
        frames: list[int] = []
        plans = []
        before: Observation | None = (
            None  # only one earlier observation stays in memory, because frames are large
        )
        for index, (_, step, observation) in enumerate(observations):
            repeats = oldest and before is not None and _same_frames(before, observation)
            frames.append(max(frames[-1], index - oldest) if repeats else index)
            chunks = [infer(replace(observation, noise=None, seed=seed)).actions for seed in range(draws)]
            plans.append(np.stack(chunks).astype(np.float32))
            steps.append(step)
            before = observation
            done()
        episodes.append(Episode(name[0], steps, frames, np.stack(plans)))
    if not episodes:
        raise SinewError("--frames: expected control steps in which the policy drove the robot, got none")
    return episodes


def compare(episodes: Sequence[Episode], ages: Sequence[int]) -> PlanAges:
    """Compare old and new plans for the same steps.

    For each seed, d is the difference of both plans in standard deviations of the actions. The mean of d_i * d_j over
    all pairs of different seeds is the squared change without the noise (an unbiased estimate of the square of the
    mean). With one seed, or with a policy without noise, it is the squared difference.

    Args:
        episodes: The plans.
        ages: Ages of plans, in executed control steps. 1 is added, because it shows abrupt changes.
    """
    everything = np.concatenate([each.plans.reshape(-1, each.plans.shape[-1]) for each in episodes])
    scale = everything.std(0)
    scale[scale < 1e-9] = 1.0
    draws, size = episodes[0].plans.shape[1:3]
    noise = 0.0
    if draws > 1:
        spread = [(each.plans / scale).var(1, ddof=1).mean() for each in episodes]
        noise = float(np.sqrt(np.average(spread, weights=[len(each.steps) for each in episodes])))
    rows: list[Age] = []
    abrupt: list[tuple[str, int]] = []
    for age in sorted({1, *ages}):
        changes: list[float] = []
        pairs = 0
        # For each episode that is long enough: the number of outdated plans.
        outdated: list[int] = []
        for each in episodes:
            pairs += max(0, len(each.steps) - age)
            compared = [
                (each.steps[now], change)
                for now in range(age, len(each.steps))
                if (change := _change(each, now - age, now, scale)) is not None
            ]
            if not compared:
                continue
            late = [step for step, change in compared if change > LARGE]
            changes += [change for _, change in compared]
            outdated.append(len(late))
            if age == 1:
                abrupt += [(each.name, step) for step in late]
        # The oldest plans end before the newest frames, except for the first frames of an episode, in which nothing has
        # happened yet. A share of these few comparisons would be misleading.
        if changes and len(changes) >= pairs / 2:
            typical = float(np.median(changes))
            rows.append(
                Age(age, len(changes), sum(outdated), len(outdated), sum(map(bool, outdated)), typical)
            )
    count = sum(len(each.steps) for each in episodes)
    return PlanAges(rows, noise, abrupt, len(episodes), count, draws, size)


def _change(episode: Episode, old: int, new: int, scale: np.ndarray) -> float | None:
    """Return how much two plans of an episode differ, in standard deviations of the actions.

    The smallest difference counts if the old plan may be early or late by some steps. The result is None if the plans
    have too few steps in common.

    Args:
        episode: The recorded episode with its plans.
        old: Index of the observation of the old plan.
        new: Index of the observation of the new plan.
        scale: Standard deviation of each number of an action, [D].
    """
    plans = episode.plans
    draws, size = plans.shape[1:3]
    rows, slip = max(2, size // COMPARED), max(1, size // SLIPS)
    apart = episode.frames[new] - episode.frames[old]
    # Index of the first action of the new plan whose control step has not passed yet.
    start = new - episode.frames[new]
    if start + apart + rows > size:
        return None
    best: float | None = None
    for shift in range(apart - slip, apart + slip + 1):
        first = max(start, -shift)
        count = min(rows, size - first - max(shift, 0))
        if count < rows:
            continue
        ahead = plans[old][:, first + shift : first + shift + count]
        difference = ((ahead - plans[new][:, first : first + count]) / scale).reshape(draws, -1)
        total = float((difference**2).sum())
        if draws > 1:
            common = difference.sum(0)
            total = (float(common @ common) - total) / (draws * (draws - 1))
        value = total / difference.shape[1]
        best = value if best is None else min(best, value)
    return None if best is None else float(np.sqrt(max(0.0, best)))


def _episodes(records: Iterable[Record], hz: float) -> Iterator[tuple[tuple[str, int], int, Observation]]:
    """Yield the episode, the control step and the observation of each record in which the policy drove the robot.

    An episode is (name, part). If a human drove the robot for some steps, the steps before and after are different
    parts.
    """
    name, part = "", 0
    for record in records:
        if record.wire != "run" or record.observation.time is None:
            raise SinewError(
                f"{record.path}: expected a record of `sinew run --frames`, got one of {record.wire or 'a server'}."
                " Pass the folder of --frames"
            )
        session = str(record.meta.get("session", ""))
        part += session != name or record.by == "human"
        name = session
        if record.by != "human":
            yield (name, part), round(record.observation.time * hz), record.observation


def _same_frames(before: Observation, now: Observation) -> bool:
    return before.images.keys() == now.images.keys() and all(
        np.array_equal(frame, now.images[name]) for name, frame in before.images.items()
    )
