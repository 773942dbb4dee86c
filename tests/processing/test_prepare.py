"""An observation is prepared once: what a policy checks is what it computes with."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from sinew.core import Moment, Observation, ObservationError, SinewError
from sinew.policy import Policy, load
from sinew.processing import ModelInputs, processor, stack
from sinew.processing.conditioning import advantage_of, scale_of
from sinew.processing.image import prepare_frame
from sinew.processing.normalize import Normalizer
from sinew.processing.processor import Processor
from sinew.processing.prompt import Prompter
from sinew.steps.prompt.advantage import Advantage
from sinew.steps.prompt.base import PromptRecipe
from tests.golden import Golden

CASE = "smolvla-2cam"


@pytest.fixture(scope="module")
def policy(smolvla_bundle) -> Policy:
    return load(smolvla_bundle(CASE), engine="eager")


@pytest.fixture
def observation(golden) -> Observation:
    return Observation.from_mapping(Golden(golden / CASE).observation())


def test_every_step_runs_once_for_a_request(policy, observation, monkeypatch):
    calls: Counter[str] = Counter()

    def count(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for owner, name in (
        (processor, "check_frame"),
        (processor, "prepare_frame"),
        (Processor, "state"),
        (Processor, "_noise"),
        (Normalizer, "normalize"),
        (Normalizer, "unnormalize"),
        (Prompter, "encode"),
    ):
        count(owner, name)
    policy.processor._fitting.clear()
    policy.infer(observation)
    views, shapes = len(observation.images), len({each.shape for each in observation.images.values()})
    assert calls == {
        "check_frame": shapes,
        "prepare_frame": views,
        "state": 1,
        "_noise": 1,
        "normalize": 1,
        "unnormalize": 1,
        "encode": 1,
    }
    policy.infer(observation)  # whose frames have the shape of those that were looked at
    assert (calls["check_frame"], calls["prepare_frame"]) == (shapes, 2 * views)
    other = {name: np.zeros((*frame.shape[:2], 4), np.uint8) for name, frame in observation.images.items()}
    with pytest.raises(ObservationError, match="expected an RGB image"):
        policy.infer(replace(observation, images=other))


def test_of_frames_that_fit_so_many_shapes_are_remembered(policy, observation):
    """Shapes come from clients; one that is not remembered is looked at each time."""
    known = policy.processor._fitting
    known.clear()
    try:
        for width in range(100, 200):
            frames = {name: np.zeros((90, width, 3), np.uint8) for name in observation.images}
            policy.check(replace(observation, images=frames))
        assert known == {(90, width, 3) for width in range(100, 100 + processor.MOST_SHAPES)}
    finally:
        known.clear()


def test_what_is_remembered_of_an_instruction_is_nobodys_to_change(policy, observation):
    prompter = policy.processor.prompter
    first = prompter.encode(observation.prompt, observation.state)
    wanted = first.tolist()
    first[:] = 0
    assert prompter.encode(observation.prompt, observation.state).tolist() == wanted


def test_a_cameras_frames_are_read_where_they_lie(policy, observation):
    """Frames of 1080 x 1920 that may not be written to, as a driver lends them: preparing allocates what the policy
    reads and tables of the resize, less than a tenth of one frame."""
    frames = {name: np.full((1080, 1920, 3), 90, np.uint8) for name in observation.images}
    for frame in frames.values():
        frame.flags.writeable = False
    given = {"images": frames, "state": observation.state, "prompt": observation.prompt}
    policy.prepare(Observation.from_mapping(given))  # makes the tables
    tracemalloc.start()
    try:
        read = policy.prepare(Observation.from_mapping(given)).inputs.pixels
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3 * read.nbytes + frames[next(iter(frames))].nbytes / 10


def test_the_halves_are_the_whole(policy, observation):
    whole = policy.infer(observation)
    prepared = policy.prepare(observation)
    first, second = policy.run(prepared), policy.run(prepared)  # it may be run again
    assert np.array_equal(whole.actions, first.actions)
    assert np.array_equal(first.actions, second.actions)
    assert first.timing.preprocess_ms == prepared.milliseconds > 0
    assert first.timing.total_ms > prepared.milliseconds
    assert (first.session, first.time) == (observation.session, observation.time)
    np.testing.assert_array_equal(
        policy.processor.prepare(observation).inputs.pixels, prepared.inputs.pixels
    )  # unless it is told to leave frames as they are


@pytest.mark.parametrize(
    ("side", "rows"), [("right", [[5, 9, 9], [6, 7, 8]]), ("left", [[9, 9, 5], [6, 7, 8]])]
)
def test_shorter_prompts_of_a_batch_are_padded_and_masked(side, rows):
    def member(tokens, views=1, frames=()) -> ModelInputs:
        shape = (views, 3, 2, 2)
        return ModelInputs(
            np.zeros(shape),
            np.ones(views, bool),
            np.array(tokens),
            np.ones(len(tokens), bool),
            np.zeros(2),
            frames,
        )

    recipe = PromptRecipe(8, 10, 9, padding_side=side)
    found = stack([member([5]), member([6, 7, 8])], recipe)
    assert found.tokens.tolist() == rows
    assert found.token_mask.tolist() == [[each != 9 for each in row] for row in rows]
    assert (found.pixels.shape, found.state.shape) == ((2, 1, 3, 2, 2), (2, 2))
    alone = stack([member([5], frames=(np.zeros((2, 2, 3), np.uint8),))], recipe)
    assert (alone.tokens.tolist(), len(alone.frames)) == ([[5]], 1)
    for other in (member([6], views=2), member([6], frames=(np.zeros((2, 2, 3), np.uint8),))):
        with pytest.raises(SinewError, match="a batch: expected prepared views of one shape, got"):
            stack([member([5]), other], recipe)


def asked(**fields) -> Observation:
    return Observation({}, np.zeros(1, np.float32), **fields)


def test_an_advantage_and_its_scale_are_taken_or_refused_by_name():
    names = tuple((f"bin{k}", f" {k}") for k in range(9))
    known, without = (PromptRecipe(8, 9, 0, steps) for steps in ((Advantage(names, usual="bin3"),), ()))
    assert [advantage_of(asked(), recipe) for recipe in (known, without)] == ["bin3", ""]
    assert [advantage_of(asked(advantage=each), known) for each in ("", "bin8")] == ["", "bin8"]
    assert [
        scale_of(asked(guidance_scale=each), known, "bin3") for each in (None, 0, 100, np.float32(0.5))
    ] == [
        1.0,
        0.0,
        100.0,
        0.5,
    ]
    tokens = np.zeros(3, np.int64)
    shown = "bin0, bin1, bin2, bin3, bin4, bin5, bin6, bin7"
    for recipe, fields, message in (
        (known, {"advantage": 1}, "advantage: expected text, got int"),
        (without, {"advantage": ""}, "advantage: expected none for this policy, whose prompt has no place"),
        (known, {"advantage": "bin3", "tokens": tokens}, "advantage: expected none beside tokens"),
        (known, {"advantage": "x"}, f"advantage: expected one of {shown}, ..., or an empty text"),
        (
            PromptRecipe(8, 9, 0, (Advantage(names[:8]),)),
            {"advantage": "x"},
            f"one of {shown}, or an empty text",
        ),
        (known, {"guidance_scale": True}, "guidance_scale: expected a number, got bool"),
        (known, {"guidance_scale": -1e-9}, "guidance_scale: expected a number from 0 to 100, got -1e-09"),
        (known, {"guidance_scale": 100.01}, "guidance_scale: expected a number from 0 to 100, got 100.01"),
        (known, {"guidance_scale": 10**400}, "guidance_scale: expected a number from 0 to 100, got 1000000"),
        (known, {"guidance_scale": float("nan")}, "guidance_scale: expected a number from 0 to 100, got nan"),
        (without, {"guidance_scale": 1.0}, "guidance_scale: expected none for this policy"),
        (known, {"guidance_scale": 1.0, "tokens": tokens}, "guidance_scale: expected none beside tokens"),
    ):
        with pytest.raises(ObservationError) as error:
            scale_of(asked(**fields), recipe, advantage_of(asked(**fields), recipe))
        assert message in str(error.value)
    with pytest.raises(ObservationError, match=f"an advantage beside it, as {shown}, got none"):
        scale_of(asked(guidance_scale=0.0), known, "")


def test_moments_before_are_counted_and_looked_at():
    """Of a policy that reads three: two before the newest at most."""
    moment, seen = Moment({}, np.zeros(1, np.float32)), []
    reads = SimpleNamespace(spec=SimpleNamespace(history=3), _check_images=lambda _, name: seen.append(name))
    Processor._check_earlier(reads, asked(earlier=[moment, moment]))
    assert seen == ["earlier[0].", "earlier[1]."]
    for earlier, message in (
        ([moment] * 3, "earlier: expected at most 2, as this policy reads 3, got 3 moments"),
        ("before", "earlier: expected a list of moments, got str"),
        ((moment, {}), "earlier[1]: expected a Moment, got dict"),
    ):
        with pytest.raises(ObservationError) as error:
            Processor._check_earlier(reads, asked(earlier=earlier))
        assert str(error.value) == message
    reads.spec.history = 1
    with pytest.raises(ObservationError, match="^earlier: expected none for this policy, got 1 moments$"):
        Processor._check_earlier(reads, asked(earlier=(moment,)))


def test_preparing_waits_for_nobody(policy, observation):
    """It needs no lock: another observation may be computed meanwhile."""
    with policy._lock:
        ready: list[object] = []
        thread = threading.Thread(target=lambda: ready.append(policy.prepare(observation)))
        thread.start()
        thread.join(60)
    assert len(ready) == 1


def test_preparing_refuses_what_checking_refuses(policy, observation):
    for name, value in (("state", np.zeros(99)), ("prompt", ""), ("seed", -1), ("solver_steps", 0)):
        bad = {**{f: getattr(observation, f) for f in ("images", "state", "prompt", "seed")}, name: value}
        for half in (policy.prepare, policy.check):
            with pytest.raises(ObservationError) as error:
                half(bad)
            assert error.value.field == name


def test_a_picture_that_moments_share_is_prepared_once(policy, observation, monkeypatch):
    """Though each moment of a wire brings an array of its own; numbers of another type are another picture."""
    (moving, goal), wide = observation.images, np.zeros((2, 2, 3), np.uint8) + 1
    random, made = np.random.default_rng(0), []
    plain = policy.processor
    shape = observation.images[moving].shape
    frames = [random.integers(0, 256, shape, np.uint8) for _ in range(4)]
    frames[1][:-1] = frames[0][:-1]  # only their last lines differ
    goals = [observation.images[goal].copy() for _ in range(2)] + [wide, wide.astype(np.float32)]
    *earlier, newest = (
        Moment({moving: frame, goal: there}, observation.state)
        for frame, there in zip(frames, goals, strict=True)
    )
    reads = copy(plain)
    monkeypatch.setattr(reads, "spec", replace(plain.spec, history=4))
    monkeypatch.setattr(
        processor, "prepare_frame", lambda *given: made.append(given) or prepare_frame(*given)
    )
    seen = replace(observation, images=newest.images, earlier=tuple(earlier))
    tokens = plain.prompter.encode(observation.prompt, observation.state)
    given = reads._assemble(seen, np.zeros((4, 1), np.float32), tokens, False, True)
    assert len(made) == 4 + 3
    wanted = [
        prepare_frame(each, plain._images[name])
        for pair in zip(frames, goals, strict=True)
        for name, each in zip((moving, goal), pair, strict=True)
    ]
    np.testing.assert_array_equal(given.pixels, np.stack(wanted))
