"""An observation is prepared once: what a policy checks is what it computes with."""

from __future__ import annotations

import threading
import tracemalloc
from collections import Counter
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.bundle.schema import Normalization
from sinew.core import BundleError, Moment, Observation, ObservationError, SinewError
from sinew.models.solvers import FLOW, SINGLE, NoiseLevels, Solver
from sinew.policy import Policy, load
from sinew.processing import ModelInputs, batch_key, processor, stack
from sinew.processing.batch import BUCKET
from sinew.processing.conditioning import advantage_of, scale_of
from sinew.processing.image import prepare_frame
from sinew.processing.normalize import Normalizer
from sinew.processing.processor import Processor
from sinew.processing.prompt import Prompter
from sinew.steps.prompt.advantage import Advantage
from sinew.steps.prompt.base import PromptRecipe
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.vector.add_state import AddState
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
    views = shapes = len(observation.images)  # A frame is checked once for each camera and shape.
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
        pairs = [(name, (90, width, 3)) for width in range(100, 200) for name in observation.images]
        assert known == set(pairs[: processor.MOST_SHAPES])
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
        with pytest.raises(SinewError, match="a batch: expected views and frames of one shape, got"):
            stack([member([5]), other], recipe)
    frames = [tuple(np.full((2, 2, 3), value, np.uint8) for value in pair) for pair in ((1, 2), (3, 4))]
    together = stack([member([5], 2, each) for each in frames], recipe)
    assert [int(frame[0, 0, 0]) for frame in together.frames] == [1, 2, 3, 4]
    assert [int(frame[0, 0, 0]) for frame in together.part(slice(1, 2)).frames] == [3, 4]


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
        (
            without,
            {"advantage": ""},
            "advantage: expected none for this policy, because its prompt contains no advantage",
        ),
        (
            known,
            {"advantage": "bin3", "tokens": tokens},
            "advantage: expected no advantage together with tokens",
        ),
        (known, {"advantage": "x"}, f"advantage: expected one of {shown}, ..., or an empty text"),
        (
            PromptRecipe(8, 9, 0, (Advantage(names[:8]),)),
            {"advantage": "x"},
            f"one of {shown}, or an empty text",
        ),
        (known, {"guidance_scale": True}, "guidance_scale: expected a number, got bool"),
        (known, {"guidance_scale": -1e-9}, "guidance_scale: expected a number from 0 to 100, got -1e-09"),
        (known, {"guidance_scale": 100.01}, "guidance_scale: expected a number from 0 to 100, got 100.01"),
        (known, {"guidance_scale": 123.4567}, "guidance_scale: expected a number from 0 to 100, got 123.457"),
        (known, {"guidance_scale": 10**400}, "guidance_scale: expected a number from 0 to 100, got 1000000"),
        (known, {"guidance_scale": float("nan")}, "guidance_scale: expected a number from 0 to 100, got nan"),
        (without, {"guidance_scale": 1.0}, "guidance_scale: expected none for this policy"),
        (
            known,
            {"guidance_scale": 1.0, "tokens": tokens},
            "guidance_scale: expected none together with tokens",
        ),
    ):
        with pytest.raises(ObservationError) as error:
            scale_of(asked(**fields), recipe, advantage_of(asked(**fields), recipe))
        assert message in str(error.value)
        assert len(str(error.value)) < 200
    with pytest.raises(ObservationError, match=f"an advantage with it, such as {shown}, got none"):
        scale_of(asked(guidance_scale=0.0), known, "")


def test_moments_before_are_counted_and_looked_at():
    """Of a policy that reads three: two before the newest at most."""
    moment, seen = Moment({}, np.zeros(1, np.float32)), []
    reads = SimpleNamespace(spec=SimpleNamespace(history=3), _check_images=lambda _, name: seen.append(name))
    Processor._check_earlier(reads, asked(earlier=[moment, moment]))
    assert seen == ["earlier[0].", "earlier[1]."]
    for earlier, message in (
        ([moment] * 3, "earlier: expected at most 2, because this policy reads 3, got 3 observation steps"),
        ("before", "earlier: expected a list of observation steps, got str"),
        ((moment, {}), "earlier[1]: expected a Moment, got dict"),
    ):
        with pytest.raises(ObservationError) as error:
            Processor._check_earlier(reads, asked(earlier=earlier))
        assert str(error.value) == message
    reads.spec.history = 1
    with pytest.raises(
        ObservationError, match="^earlier: expected none for this policy, got 1 observation steps$"
    ):
        Processor._check_earlier(reads, asked(earlier=(moment,)))


def test_preparing_waits_for_nobody(policy, observation):
    """It needs no lock: another observation may be computed meanwhile."""
    with policy.lock:
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


# ----------------------------------------------------------------------------- a processor without a model

PEN = Bundle(Path(__file__).parents[2] / "sinew" / "assets" / "pen.gguf").manifest  # cameras now and previous
PLAIN = Processor(PEN)
WIDE = Normalization("identity")
CONTINUED = {"previous": [[0.5]], "delay": 1, "horizon": 1, "rtc": "guided", "schedule": "exp"}


def reads(
    spec: dict[str, Any] | None = None, cameras: bool = False, adapter: str = "", **recipe
) -> Processor:
    changed = replace(PEN, spec=replace(PEN.spec, **spec or {}), processing=replace(PEN.processing, **recipe))
    return Processor(changed, cameras, PLAIN, adapter)


def seen(**fields) -> Observation:
    frames = {name: np.full((64, 64, 3), 90, np.uint8) for name in ("now", "previous")}
    return Observation(**{"images": frames, "state": [0.5], "prompt": "catch", "seed": 3, **fields})


def refusal(make) -> str:
    with pytest.raises(SinewError) as error:
        make()
    return str(error.value)


def test_whole_numbers_are_taken_from_the_lowest_to_the_highest():
    for good in (None, 2, 5, np.int64(3)):
        assert processor._integer(good, "n", 2, 5) is None
    for bad, message in (
        (1, "an integer from 2 to 5, got 1"),
        (6, "an integer from 2 to 5, got 6"),
        (True, "an integer, got bool"),
        (3.0, "an integer, got float"),
    ):
        assert refusal(partial(processor._integer, bad, "n", 2, 5)) == f"n: expected {message}"
    assert refusal(partial(processor._integer, 4, "n", 3, 3)) == "n: expected 3, got 4"
    for fields, message in (
        ({"seed": -1}, "seed: expected an integer from 0 to 18446744073709551615, got -1"),
        (
            {"seed": 1 << 64},
            "seed: expected an integer from 0 to 18446744073709551615, got 18446744073709551616",
        ),
        ({"solver_steps": 0}, "solver_steps: expected an integer from 1 to 100, got 0"),
        ({"solver_steps": 101}, "solver_steps: expected an integer from 1 to 100, got 101"),
        ({"time": np.nan}, "time: expected finite numbers, got nan at index 0"),
        ({"time": [1.0]}, "time: expected shape [], got shape [1]"),
        ({"adapter": "x"}, "adapter: expected none for this policy, got 'x'"),
        ({"delay": 1}, "delay: expected `previous` with it, the actions to continue, got none"),
        ({**CONTINUED, "beta": -1.0}, "beta: expected a number from 0 to 1000, got -1.0"),
    ):
        assert refusal(partial(PLAIN.check, seen(**fields))) == message
        assert refusal(partial(PLAIN.prepare, seen(**fields))) == message
    for fields in (
        {"seed": 0, "solver_steps": 1, "time": 1e300},
        {"seed": (1 << 64) - 1, "solver_steps": 100},
    ):
        PLAIN.check(seen(**fields))
    assert refusal(partial(reads(adapter="hand").check, seen())) == "adapter: expected 'hand', got ''"
    levels = Solver("diffusion", levels=NoiseLevels(100, spacing="even"))
    diffuses = reads({"solver": levels})
    diffuses.check(seen(solver_steps=50))
    assert (
        refusal(partial(diffuses.check, seen(solver_steps=49))) == "solver_steps: expected 34 or 50, got 49"
    )
    for count, most in ((1000, 100), (50, 50)):
        diffuses = reads({"solver": Solver("diffusion", levels=NoiseLevels(count))})
        said = f"solver_steps: expected an integer from 1 to {most}, got {most + 1}"
        assert refusal(partial(diffuses.check, seen(solver_steps=most + 1))) == said
    assert (
        refusal(partial(reads({"solver": SINGLE}).check, seen(solver_steps=2)))
        == "solver_steps: expected 1, got 2"
    )


def test_vectors_are_numbers_of_a_policys_own():
    given = np.float32([1, 2])
    found = processor._vector(given, "v", (2,))
    assert (found.dtype, found.tolist()) == (np.float32, [1, 2])
    assert not np.shares_memory(found, given)  # and nobody else's
    for other in ([1, 2], np.array([1.0, 2.0]), np.array([1, 2], np.uint8)):
        found = processor._vector(other, "v", (2,))
        assert (found.dtype, found.tolist()) == (np.float32, [1, 2])
    with np.errstate(all="raise"):
        for bad, message in (
            (np.zeros((1, 2)), "shape [2], got shape [1, 2]"),
            (np.array([0.0, 1e39]), "finite numbers, got inf at index 1"),
            (np.float32([np.nan, np.inf]), "finite numbers, got nan at index 0"),
            (np.zeros(2, bool), "numbers, got dtype bool"),
        ):
            assert refusal(partial(processor._vector, bad, "v", (2,))) == f"v: expected {message}"


def test_noise_is_what_the_solver_begins_with():
    draw, shape = np.random.default_rng(3), (24, 1)
    normal, uniform = (
        draw.standard_normal(shape, np.float32),
        np.random.default_rng(3).random(shape, np.float32),
    )
    found, seed = PLAIN.noise(seen())
    assert (seed, found.tolist()) == (3, normal.tolist())
    found, seed = reads({"solver": replace(FLOW, noise="uniform")}).noise(seen())
    assert (seed, found.tolist()) == (3, (2 * uniform - 1).tolist())
    found, seed = PLAIN.noise(seen(seed=None))
    again, other = PLAIN.noise(seen(seed=None))
    assert seed != other  # which each answer names, so that it can be repeated
    assert found.tolist() == PLAIN.noise(seen(seed=seed))[0].tolist() != again.tolist()
    found, seed = PLAIN.noise(seen(noise=normal + 1))
    assert (seed, found.tolist()) == (None, (normal + 1).tolist())
    zeros = reads({"solver": SINGLE})
    found, seed = zeros.noise(seen())
    assert (seed, found.tolist(), found.dtype) == (None, [[0.0]] * 24, np.float32)
    message = "noise: expected none, because this policy starts from zeros, got noise"
    assert refusal(partial(zeros.check, seen(noise=normal))) == message
    fresh = reads({"solver": Solver("diffusion", levels=NoiseLevels(10, fresh=True))})
    assert fresh.noise(seen(solver_steps=4))[0].shape == (4, 24, 1)


def test_cameras_that_may_be_missing():
    """As many as in training; more where the caller wants it, unless the policy needs all of them."""
    one = seen(images={"now": seen().images["now"]})
    whole = "a frame of each of the cameras ['now', 'previous'], got none"
    hint = " (allow_missing_cameras=True runs without)"
    for made, message in (
        (PLAIN, f"images.previous: expected {whole}{hint}"),
        (reads(all_cameras=True, empty_cameras=1), f"images.previous: expected {whole}"),
        (reads(cameras=True, all_cameras=True), f"images.previous: expected {whole}"),
        (reads(empty_cameras=1), ""),
        (reads(optional_cameras=1), ""),
        (reads(cameras=True), ""),
    ):
        if message:
            assert refusal(partial(made.check, one)) == message
            continue
        made.check(one)
        prepared = made.prepare(one)
        assert prepared.missing == ("previous",)
        assert prepared.inputs.camera_mask.tolist() == [True]
        assert refusal(partial(made.check, seen(images={}))).startswith(
            "images: expected at least one of the cam"
        )
    odd = {"now": one.images["now"], "x": one.images["now"]}
    known = "one of the cameras ['now', 'previous'], got an unknown camera"
    assert refusal(partial(PLAIN.check, seen(images=odd))) == (
        f"images.x: expected {known} (rename={{'x': 'previous'}} maps it)"
    )
    both = {**seen().images, "x": one.images["now"]}
    assert refusal(partial(PLAIN.check, seen(images=both))) == f"images.x: expected {known}"
    near = {"now": one.images["now"], "previus": one.images["now"]}
    assert refusal(partial(PLAIN.check, seen(images=near))).endswith("; did you mean 'previous'?")
    assert refusal(partial(PLAIN.check, seen(images=[1]))) == (
        "images: expected a mapping of camera names, got list"
    )


def test_masked_and_padded_inputs_stand_for_what_is_missing():
    """As upstream computes them: empty images behind those that are there, and tokens up to the longest prompt."""
    one = seen(images={"now": seen().images["now"]})
    for changes, views in (
        ({"pad_missing_cameras": True, "empty_cameras": 2}, [True, False, False, False]),
        ({"empty_cameras": 2}, [True, False, False]),
    ):
        made = reads(cameras=True, prompt=replace(PEN.processing.prompt, padding="max_length"), **changes)
        plain, padded = made.inputs(one), made.inputs(one, padded=True)
        assert (plain.camera_mask.tolist(), padded.camera_mask.tolist()) == ([True], views)
        assert (plain.pixels.shape, padded.pixels.shape) == ((1, 3, 64, 64), (len(views), 3, 64, 64))
        assert (padded.pixels[1:] == -1).all()  # black
        assert len(plain.tokens) < len(padded.tokens) == 24
        assert padded.token_mask.sum() == len(plain.tokens) == plain.token_mask.sum()
    raw = PLAIN.inputs(seen(), pixels=False)
    assert (raw.pixels.shape, len(raw.frames), raw.camera_mask.tolist()) == ((0, 3, 64, 64), 2, [True] * 2)
    floats = {"now": seen().images["now"], "previous": np.ones((64, 64, 3), np.float32)}
    assert PLAIN.inputs(seen(images=floats), pixels=False).pixels.shape == (2, 3, 64, 64)


def test_of_moments_that_were_not_sent_the_oldest_stands_for_them_or_they_are_masked():
    moments = [Moment({name: np.full((64, 64, 3), 10 * n, np.uint8) for name in ("now", "previous")}, [float(n)])
               for n in (1, 2)]  # fmt: skip
    newest = seen(images=moments[1].images, state=moments[1].state, earlier=(moments[0],))
    for padding, state, views in (("repeat", [1, 1, 2], 6), ("mask", [0, 1, 2], 4)):
        made = reads({"history": 3, "history_padding": padding}, state=WIDE, padded_state_dim=6)
        for pixels in (True, False):
            prepared = made.prepare(newest, pixels)
            assert prepared.unsent == 1
            assert prepared.inputs.state.reshape(3, 2).tolist() == [[each, 0] for each in state]
            assert prepared.inputs.camera_mask.tolist() == [True] * views
            found = (
                prepared.inputs.pixels[:, 0, 0, 0] if pixels else [f[0, 0, 0] for f in prepared.inputs.frames]
            )
            bytes_of = np.rint((np.asarray(found) + 1) * 127.5) if pixels else found
            assert list(bytes_of) == [10] * (views - 2) + [20] * 2
        assert made.model_state(np.array([7.0])).reshape(3, 2)[-1].tolist() == [7, 0]
    newest_alone = reads({"history": 3, "history_states": False}, state=WIDE, padded_state_dim=2)
    again = "convert the checkpoint again"
    prepared = newest_alone.prepare(newest)
    assert prepared.inputs.state.tolist() == [2, 0]
    assert len(prepared.inputs.pixels) == 6  # of all steps
    assert newest_alone.model_state(np.array([7.0])).tolist() == [7, 0]
    with pytest.raises(
        BundleError,
        match=f"^a vector of 3 normalised numbers does not fit the model's 2; {again}$",
    ):
        reads({"history": 3}, padded_state_dim=2)
    with pytest.raises(
        BundleError,
        match=f"^a vector of 1 normalised numbers does not fit the model's 0; {again}$",
    ):
        reads(padded_action_dim=0)


def test_a_chunk_in_world_units_is_finite_and_the_policys_own():
    made = reads({"chunk_size": 2}, action=WIDE, first_row=1, padded_action_dim=2)
    chunk = np.arange(8.0).reshape(4, 2)
    found = made.finish(chunk, np.zeros(1))
    assert (found.tolist(), found.dtype, found.flags.c_contiguous) == ([[2], [4]], np.float32, True)
    assert made.actions(chunk, seen()).tolist() == [[2], [4]]
    assert made.finish(chunk[:, :1], np.zeros(1), normalized=False).tolist() == [[2], [4]]
    stays = PLAIN.finish(np.zeros((24, 1)), np.zeros(1))
    assert stays[0, 0] == pytest.approx(PEN.processing.action.stats["mean"][0])
    chunk[2, 0] = np.nan
    assert (
        refusal(partial(made.finish, chunk, np.zeros(1)))
        == "the model produced actions that are not finite; check the weights with `sinew doctor`"
    )
    relative = reads(action=WIDE, action_steps=(AddState((0,)),))
    assert relative.finish(np.zeros((24, 1)), np.array([5.0])).tolist() == [[5]] * 24


def test_a_batch_of_one_is_its_only_member():
    inputs = PLAIN.inputs(seen())
    alone = inputs.batched().alone()
    for name in ("pixels", "camera_mask", "tokens", "token_mask", "state"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(inputs, name))
    two = stack([inputs, inputs], PEN.processing.prompt)
    assert refusal(two.alone) == "a batch: expected one observation, got 2; pass one at a time"


def test_prompts_are_mixed_that_end_in_one_bucket():
    """16 tokens end the first bucket, 17 begin the second, which 32 end."""
    prepared = PLAIN.prepare(seen())

    def key(n):
        return batch_key(replace(prepared, inputs=replace(prepared.inputs, tokens=np.zeros(n))))

    assert key(1) == key(BUCKET) != key(BUCKET + 1) == key(2 * BUCKET) != key(2 * BUCKET + 1)


def test_what_is_asked_for_is_kept_beside_the_inputs(monkeypatch):
    clock = iter((1.0, 1.25))
    monkeypatch.setattr(processor.time, "perf_counter", lambda: next(clock))
    prepared = PLAIN.prepare(seen(solver_steps=4, session="a", time=7.0))
    assert (prepared.milliseconds, prepared.steps, prepared.session, prepared.time) == (250.0, 4, "a", 7.0)
    monkeypatch.undo()
    prepared = PLAIN.prepare(seen())
    assert (prepared.steps, prepared.continuation, prepared.words, prepared.unsent) == (10, None, None, 0)
    assert (prepared.unconditional, prepared.scale, prepared.missing, prepared.adapter) == (None, 1.0, (), "")
    rows = np.full((3, 1), 0.5)
    continued = PLAIN.prepare(seen(previous=rows, delay=1)).continuation
    assert continued is not None
    assert continued.kind == "guided"
    for fields, message in (
        ({"prompt": 1}, "prompt: expected text, got int"),
        ({"tokens": [1, 2]}, "tokens: expected either a prompt or tokens, got both"),
        ({"question": 1}, "question: expected a string, got int"),
        ({"subtask": 1}, "subtask: expected true or false, got int"),
        ({"text_only": "x"}, "text_only: expected true or false, got str"),
        ({"text_tokens": 0}, "text_tokens: expected an integer from 1 to 256, got 0"),
        ({"question": "a", "subtask": True}, "question: expected only one of question and subtask, got both"),
        (
            {"text_only": True},
            "text_only: expected a subtask or a question together with it, got neither",
        ),
    ):
        assert refusal(partial(PLAIN.check, seen(**fields))) == message
    assert refusal(partial(PLAIN.check, seen(prompt=""))).startswith("prompt: expected ")
    named = reads({"default_prompt": "catch"})
    assert named.prepare(seen(prompt="")).inputs.tokens.tolist() == prepared.inputs.tokens.tolist()
    told = PLAIN.prepare(seen(prompt="", tokens=prepared.inputs.tokens))
    assert told.inputs.tokens.tolist() == prepared.inputs.tokens.tolist()


def test_a_prompt_without_its_advantage_is_read_where_the_scale_asks_for_it():
    names = (("good", " the pen"),)
    made = reads(prompt=replace(PEN.processing.prompt, steps=(Advantage(names, usual="good"), Instruction())))
    usual, without = made.prepare(seen()), made.prepare(seen(advantage=""))
    assert usual.inputs.tokens.tolist() != without.inputs.tokens.tolist()
    assert (usual.scale, usual.unconditional) == (1.0, None)
    twice = made.prepare(seen(guidance_scale=2.0))
    assert twice.scale == 2.0
    assert twice.inputs.tokens.tolist() == usual.inputs.tokens.tolist()
    assert twice.unconditional.tolist() == without.inputs.tokens.tolist()
    none = made.prepare(seen(guidance_scale=0.0))
    assert (none.scale, none.unconditional) == (0.0, None)
    assert none.inputs.tokens.tolist() == without.inputs.tokens.tolist()
    named = replace(made.spec, default_prompt="catch")
    made.spec = named
    assert (
        made.prepare(seen(prompt="", guidance_scale=2.0)).unconditional.tolist()
        == without.inputs.tokens.tolist()
    )
