"""Measure whether a policy uses its inputs: change one input, and compare the actions.

A policy may ignore an input: a camera that it did not need in training, or an instruction that was always the same.
Each change of the actions is compared with the change that the sampler's noise and rounding cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from sinew.checks.validate.parity import spread_of
from sinew.core import Moment, Observation
from sinew.policy import Policy

OBSERVATIONS = 3  # the changes of the actions are averaged over this many observations
SLOW_S = 2.0  # if one inference takes longer, only one observation is measured
# Seeds of the noise; the spread of the noise is the mean distance of the three pairs of chunks.
SEEDS = (1, 2, 3)
OTHER_PROMPTS = ("move back to the start", "open the gripper", "do nothing")
BLANK = {"grey": 128, "black": 0}  # name of a blank frame -> its level, 0 to 255
# An episode has about a hundred chunks, which average the sampler's noise to a tenth of its spread. A smaller change
# does not affect where the robot goes.
NOISE_SHARE = 0.1
# Share of the spread of the actions. It is about two rounding steps of bfloat16 (2^-8). Rounding may hide a smaller
# change in a bfloat16 policy, and the motors of common arms do not follow such a change.
LEAST_SHARE = 0.01
# Share of the spread of the actions: eight rounding steps of float32. A smaller change can come from the order of a
# sum.
ROUNDING = 2.0**-20

Verdict = Literal["used", "weak", "no effect", "not read"]


@dataclass(frozen=True)
class Effect:
    """The measured effect on the actions if one input of the policy is changed.

    Attributes:
        input: "instruction", "state", or "camera NAME".
        change: Description of the change.
        share: Root mean square change of the actions, as a share of their spread in training.
        threshold: Share below which the change is weak; see :func:`measure`.
        rounding: Largest share that rounding alone explains.
        verdict: "used"; "weak" below the threshold; "no effect" up to ``rounding``; "not read" if the policy does not
            read the input at all.
    """

    input: str
    change: str
    share: float
    threshold: float
    rounding: float
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Effects:
    """The effects of all inputs of a policy on its actions.

    Attributes:
        effects: One entry for each change of an input.
        noise: Root mean square distance of two chunks of the same observation with other noise, as a share of the
            spread; 0 for a policy without noise.
        rounding: Share that the smallest change of an input causes: one pixel by one level, or the last bit of each
            number of the state.
        observations: Number of observations over which the effects were averaged.
    """

    effects: tuple[Effect, ...]
    noise: float
    rounding: float
    observations: int

    @property
    def unused(self) -> list[str]:
        """Return the inputs that the policy reads although every change of them has at most a weak effect."""
        names = dict.fromkeys(each.input for each in self.effects if each.verdict != "not read")
        used = {each.input for each in self.effects if each.verdict == "used"}
        return [name for name in names if name not in used]

    def to_dict(self) -> dict[str, Any]:
        return {
            "effects": [each.to_dict() for each in self.effects],
            "noise": self.noise,
            "rounding": self.rounding,
            "observations": self.observations,
            "unused": self.unused,
        }

    def text(self) -> str:
        """Return a sentence that names the inputs without an effect and the effect of the noise."""
        if self.noise:
            compared = f"the sampler's noise changes the actions by {100 * self.noise:.2g} %"
        else:
            compared = "the policy has no noise"
        if not self.unused:
            return f"the actions depend on every input; {compared}"
        return f"the actions hardly depend on: {', '.join(self.unused)}; {compared}"


def measure(
    policy: Policy, observations: Sequence[Observation], progress: Callable[[], None] = lambda: None
) -> Effects:
    """Measure how much a policy's actions change if one input changes.

    For one observation, all chunks start from the same noise, so a difference comes only from the input. A change is
    "weak" below the larger of two thresholds: a tenth of the sampler's own spread, which 100 chunks average out, and
    1 % of the spread of the actions, about two rounding steps of bfloat16. A change has "no effect" if it is not larger
    than the response to the smallest possible change of an input.

    Args:
        policy: The policy.
        observations: Observations that the policy accepts. Only the first :data:`OBSERVATIONS` are used.
        progress: Called before each inference.

    Returns:
        The effects of all changes.
    """
    spread = spread_of(policy)

    def infer(observation: Observation, seed: int = SEEDS[0]) -> np.ndarray:
        progress()
        return np.asarray(policy.infer(replace(observation, seed=seed)).actions, np.float64) / spread

    shares: dict[tuple[str, str], list[float]] = {}
    noises, rounds, count = [], [ROUNDING], 0
    for observation in observations[:OBSERVATIONS]:
        began = time.monotonic()
        base = infer(observation)
        slow = time.monotonic() - began > SLOW_S
        if policy.spec.noise_dim:
            others = [base, *(infer(observation, seed) for seed in SEEDS[1:])]
            noises += [_apart(others[a], others[b]) for a, b in ((0, 1), (0, 2), (1, 2))]
        rounds += [_apart(infer(each), base) for each in _smallest(observation)]
        for name, change, changed in changes(policy, observation, observations):
            shares.setdefault((name, change), []).append(_apart(infer(changed), base))
        count += 1
        if slow:
            break
    noise = float(np.sqrt(np.mean(np.square(noises)))) if noises else 0.0
    rounding = max(rounds)
    threshold = max(NOISE_SHARE * noise, LEAST_SHARE)
    effects = []
    for (name, change), each in shares.items():
        share = float(np.sqrt(np.mean(np.square(each))))
        verdict: Verdict = "no effect" if share <= rounding else "weak" if share < threshold else "used"
        effects.append(Effect(name, change, share, threshold, rounding, verdict))
    if not reads_instruction(policy):
        effects.append(Effect("instruction", "any", 0.0, threshold, rounding, "not read"))
    return Effects(tuple(effects), noise, rounding, count)


def changes(
    policy: Policy, observation: Observation, others: Sequence[Observation]
) -> Iterator[tuple[str, str, Observation]]:
    """Yield the changes of all inputs of an observation.

    Args:
        policy: The policy.
        observation: The observation to change.
        others: Other observations. The state that differs most replaces the state.

    Yields:
        Name of the input, description of the change, and the changed observation.
    """
    if reads_instruction(policy) and observation.tokens is None:
        for prompt in OTHER_PROMPTS:
            if prompt != observation.prompt:
                yield "instruction", f"{prompt!r}", replace(observation, prompt=prompt)
    names = list(observation.images)
    for at, name in enumerate(names):
        for change, level in BLANK.items():
            yield f"camera {name}", change, _with_frame(observation, name, partial(_blank, name, level))
        other = names[(at + 1) % len(names)]
        if not np.array_equal(observation.images[name], observation.images[other]):
            yield (
                f"camera {name}",
                f"the frame of {other}",
                _with_frame(observation, name, itemgetter(other)),
            )
    if policy.spec.state.dim:
        yield "state", "changed by one standard deviation", _with_state(observation, state_step(policy))
        far = max(others, key=lambda each: float(np.linalg.norm(each.state - observation.state)))
        if not np.array_equal(far.state, observation.state):
            yield (
                "state",
                "replaced by the state of another observation",
                _with_state(observation, far.state - observation.state),
            )


def reads_instruction(policy: Policy) -> bool:
    """Return True if the policy's prompt contains the instruction, so that the instruction can change the actions."""
    return policy.spec.max_prompt_tokens > 1


def state_step(policy: Policy) -> np.ndarray:
    """Return a change of the state that is about one standard deviation of each number in the training data, float32
    [D].
    """
    normalizer = policy.processor.state_normalizer
    low, high = (
        np.asarray(normalizer.unnormalize(np.full(normalizer.width, value, np.float32)), np.float64)
        for value in (0.0, 1.0)
    )
    step = np.abs(high - low)
    if step.shape != (policy.spec.state.dim,):
        return np.ones(policy.spec.state.dim, np.float32)
    return np.where(step > 0, step, 1.0).astype(np.float32)


def _apart(got: np.ndarray, base: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(got - base))))


def _smallest(observation: Observation) -> Iterator[Observation]:
    """Yield observations in which one input has the smallest possible change."""
    for name in observation.images:
        yield _with_frame(observation, name, partial(_one_level, name))
    state = np.asarray(observation.state, np.float32)
    if state.size:
        yield replace(observation, state=np.nextafter(state, np.float32(np.inf)))


def _one_level(name: str, images: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return a copy of a camera's frame in which the middle pixel differs by one of 256 levels.

    Args:
        name: Name of the camera.
        images: Camera -> frame.
    """
    changed = np.array(images[name])
    at = changed.shape[0] // 2, changed.shape[1] // 2, 0
    level = changed[at]
    one = 1 if changed.dtype == np.uint8 else 1.0 / 255
    changed[at] = level - one if level > one else level + one
    return changed


def _blank(name: str, level: int, images: Mapping[str, np.ndarray]) -> np.ndarray:
    frame = images[name]
    return np.full_like(frame, level if frame.dtype == np.uint8 else level / 255)


def _with_frame(
    observation: Observation, name: str, frame: Callable[[Mapping[str, np.ndarray]], np.ndarray]
) -> Observation:
    """Return an observation in which a camera shows another frame, in all of its observation steps."""

    def images(of: Any) -> dict[str, np.ndarray]:
        return {**of, name: frame(of)}

    earlier = tuple(Moment(images(each.images), each.state) for each in observation.earlier)
    return replace(observation, images=images(observation.images), earlier=earlier)


def _with_state(observation: Observation, step: np.ndarray) -> Observation:
    """Return an observation whose state differs by ``step`` [D], in all of its observation steps."""

    def moved(state: Any) -> np.ndarray:
        return (np.asarray(state, np.float32) + step).astype(np.float32)

    earlier = tuple(Moment(each.images, moved(each.state)) for each in observation.earlier)
    return replace(observation, state=moved(observation.state), earlier=earlier)
