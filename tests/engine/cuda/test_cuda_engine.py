"""The fused engine against eager on a CPU, where the kernels' references compute; and that the proof can fail."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from sinew.core import ObservationError
from sinew.policy import load
from tests.covering import pairs, some
from tests.engine.cuda.cuda_cases import BOUND, CASES, ONE_PER_MODEL, asset_case, golden_case, shaken
from tests.engines import run_one
from tests.golden import Golden, assert_parity, relative_l2

LADDER = {
    "fused": {},
    "plain": {"kernels": False},
}

PAIRS = [(1, 4), (2, 1), (3, 10)]  # every number of views and of steps; all their pairs are slow
SIZES = [
    pair if pair in PAIRS else pytest.param(*pair, marks=pytest.mark.slow)
    for pair in product((1, 2, 3), (1, 4, 10))
]


@pytest.fixture
def open_case(golden, smolvla_bundle, pi_bundle):
    def make(name: str, dtype: str = "float32"):
        bundle = pi_bundle if name.startswith("pi") else smolvla_bundle
        return golden_case(golden, bundle, name, dtype)

    return make


# ----------------------------------------------------------------------------- proofs


@pytest.mark.parametrize("name", some(CASES, "smolvla-3cam-padded", "pi05-2cam"))
def test_every_rung_computes_the_same(open_case, name):
    """From frames and from pixels; with the fixture's weights, and with norms and biases shaken."""
    case = open_case(name)
    for _ in range(2):
        wanted = case.eager(steps=4)
        for rung, options in LADDER.items():
            engine = case.engine(**options)
            assert case.gap(engine, wanted=wanted) <= BOUND, rung
            assert case.gap(engine, case.inputs(pixels=True), wanted=wanted) <= BOUND, rung
        shaken(case)


@pytest.mark.proves(engine="cuda references")
@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_the_policy_matches_the_reference(open_case, golden, name):
    case = open_case(name)
    policy = load(case.policy.bundle.path, engine="cuda", device="cpu")
    assert (policy.engine_name, policy.dtype, str(policy.device)) == ("cuda", "fp32", "cpu")
    chunk = policy.infer(case.observation)
    assert_parity(chunk.actions, Golden(golden / name).numpy("actions")[0])
    assert (policy.describe()["unguided"], policy.capabilities.guidance) == ("", ("no-jacobian", "ramp"))
    refusal = (
        "rtc: expected no-jacobian or ramp on engine cuda; engine cpu, plan or eager supports all values"
    )
    with pytest.raises(ObservationError, match=refusal):
        policy.check({**Golden(golden / name).observation(), "previous": chunk.actions, "rtc": "guided"})
    assert policy.engine.programs.keys()[0].sizes == ((480, 640), (480, 640))  # raw frames reached the engine


@pytest.mark.parametrize("rtc", ["no-jacobian", "ramp"])
@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_a_running_chunk_is_continued_as_eager_does(open_case, golden, name, rtc):
    """What guides a step stands between two replays; vision, prefix and step are recorded apart."""
    case = open_case(name)
    policy = load(case.policy.bundle.path, engine="cuda", device="cpu")
    seen = Golden(golden / name).observation()
    running = case.policy.infer(case.observation).actions[5:] + 0.1
    asked = {**seen, "previous": running, "rtc": rtc, "delay": 2}
    wanted = case.policy.infer(asked).actions
    found = policy.infer(asked).actions
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= BOUND * scale
    assert np.abs(wanted - case.policy.infer(seen).actions).max() > 100 * BOUND * scale  # it was guided
    assert np.array_equal(policy.infer(asked).actions, found)


@pytest.mark.parametrize(("views", "steps"), SIZES)
@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "smolvla-2cam"))
def test_views_and_steps(open_case, name, views, steps):
    """Frames of several sizes, neighbours of one size among them."""
    case = shaken(open_case(name))
    rng = np.random.default_rng(views)
    sizes = [(48, 64), (30, 20), (30, 20)][:views]
    frames = tuple(rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes)
    inputs = replace(case.inputs(), frames=frames, camera_mask=np.ones(views, bool))
    assert case.gap(case.engine(), inputs, steps) <= BOUND


@pytest.mark.parametrize(
    ("kernels", "name"), pairs((True, False), ONE_PER_MODEL, (True, "pi05-2cam"), (False, "smolvla-2cam"))
)
def test_prompt_buckets_change_nothing(open_case, name, kernels):
    """Padded and masked against the very length, under the same engine and under eager."""
    case = shaken(open_case(name))
    for length in (3, 17):
        tokens = np.arange(length) % 40 + 5
        inputs = replace(case.inputs(), tokens=tokens, token_mask=np.ones(length, bool))
        exact = case.engine(prompt_buckets=(length,), kernels=kernels)
        padded = case.engine(prompt_buckets=(length + 13,), kernels=kernels)
        assert case.gap(exact, inputs) <= BOUND
        assert case.gap(padded, inputs) <= BOUND
        assert [key.tokens for e in (exact, padded) for key in e.programs.keys()]  # noqa: SIM118 == [length, length + 13]


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi0-2cam"))
def test_masked_cameras_and_tokens_are_not_read(open_case, name):
    case = shaken(open_case(name))
    inputs = replace(case.inputs(pixels=True), camera_mask=np.array([True, False]))
    other = replace(inputs, pixels=np.stack([inputs.pixels[0], -inputs.pixels[1]]))
    engine = case.engine()
    assert case.gap(engine, inputs) <= BOUND
    assert np.array_equal(run_one(engine, inputs, case.noise, 2)[0], run_one(engine, other, case.noise, 2)[0])


@pytest.mark.parametrize(("asset", "bound"), [("pen", BOUND), ("blocks", 5e-5)])
def test_trained_policies(asset, bound):
    """blocks amplifies one rounding of its grey frames to 7e-6 (test_plan.py has the numbers)."""
    case = asset_case(asset)
    for options in LADDER.values():
        assert case.gap(case.engine(**options)) <= bound


@pytest.mark.proves(engine="cuda references", precision="bf16")
@pytest.mark.parametrize("name", ["smolvla-bf16-vlm", "pi0-2cam", "pi05-2cam"])
def test_half_precision_has_a_bound(open_case, name):
    """bfloat16 weights: relative L2 against float32 on the same weights, in units of eager's own."""
    case, exact = open_case(name, "bfloat16"), open_case(name).eager()
    wanted = torch.from_numpy(exact)
    own = relative_l2(torch.from_numpy(case.eager()), wanted)
    assert 1e-4 < own < 2.5e-2
    for rung, options in LADDER.items():
        got, _ = run_one(case.engine(**options), case.inputs(), case.noise, 10)
        assert relative_l2(torch.from_numpy(got), wanted) <= 1.5 * own, rung


def test_a_bundle_of_mixed_precision_runs(open_case):
    """bfloat16 language model, float32 expert: as the file has them."""
    case = open_case("smolvla-bf16-vlm", "native")
    exact = torch.from_numpy(open_case("smolvla-bf16-vlm").eager())
    own = relative_l2(torch.from_numpy(case.eager()), exact)
    got, _ = run_one(case.engine(), case.inputs(), case.noise, 10)
    assert relative_l2(torch.from_numpy(got), exact) <= 1.5 * own


# ----------------------------------------------------------------------------- frames


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "smolvla-2cam"))
def test_patches_are_those_of_the_processor(open_case, name):
    case = open_case(name)
    engine = case.engine()
    inputs = case.inputs()
    run_one(engine, inputs, case.noise, 1)
    (key,) = engine.programs.keys()
    rows = engine.programs[key].patches.rows
    patch = case.model.config.vision.patch_size
    wanted = nn.functional.unfold(torch.from_numpy(case.prepared(inputs).pixels), patch, stride=patch)
    values = wanted.shape[1]
    assert values == 3 * patch**2
    assert float((rows[..., :values] - wanted.transpose(1, 2)).abs().max()) <= 1e-6
    assert not rows[..., values:].any()
    assert rows.shape[2] % 16 == 0


def test_float_frames_take_the_processors_path(open_case):
    case = open_case("pi0-2cam")
    first, *rest = case.observation.images
    images = dict(case.observation.images)
    images[first] = images[first].astype(np.float32) / 255
    policy = load(case.policy.bundle.path, engine="cuda", device="cpu")
    mixed = replace(case.observation, images=images)
    inputs = policy.processor.inputs(mixed, pixels=False)
    assert not inputs.frames
    assert len(inputs.pixels) == len(images) == len(inputs.camera_mask)
    got = policy.infer(mixed).actions
    assert policy.engine.programs.keys()[0].sizes == ()
    wanted = case.policy.infer(mixed).actions
    assert np.abs(got - wanted).max() <= BOUND * np.abs(wanted).max()
    assert rest


def test_missing_cameras_and_bad_frames(open_case):
    case = open_case("pi05-2cam")
    path = case.policy.bundle.path
    policy = load(path, engine="cuda", device="cpu", allow_missing_cameras=True)
    eager = load(path, engine="eager", device="cpu", dtype="float32", allow_missing_cameras=True)
    name, frame = next(iter(case.observation.images.items()))
    alone = replace(case.observation, images={name: frame})
    wanted = eager.infer(alone).actions
    assert np.abs(policy.infer(alone).actions - wanted).max() <= BOUND * np.abs(wanted).max()
    with pytest.raises(ObservationError, match=f"images.{name}: expected uint8"):
        policy.infer(replace(case.observation, images={name: frame.astype(np.int32)}))


# ----------------------------------------------------------------------------- the proof can fail


def scale_a_norm(model) -> None:
    layer = model.language.layers[0].attn.qkv_proj
    layer.weight = nn.Parameter(layer.weight * 0.999)


def swap_gate_and_up(model) -> None:
    packed = model.expert.layers[0].mlp.gate_up_proj
    packed.weight = nn.Parameter(packed.weight.roll(len(packed.weight) // 2, dims=0))


def forget_the_prefix_mask(model) -> None:
    ops = model.expert.layers[0].attn.ops
    right = ops.packed_attention
    ops.packed_attention = lambda q, kv, mask, own=None: right(q, kv, torch.ones_like(mask), own)


def lose_the_residual(model) -> None:
    ops = model.expert.layers[0].ops
    right = ops.stream_linear
    ops.stream_linear = lambda x, weight, **rest: right(x, weight, **rest | {"residual": None})


def shift_the_patches(model) -> None:
    model.vision.patch_weight = model.vision.patch_weight.roll(1, dims=1)


def rotate_by_one_more(model) -> None:
    ops = model.language.layers[0].ops
    right = ops.qkv_rope
    ops.qkv_rope = lambda x, w, cos, sin, heads, **rest: right(
        x, w, cos.roll(1, 0), sin.roll(1, 0), heads, **rest
    )


FAULTS = [
    scale_a_norm,
    swap_gate_and_up,
    forget_the_prefix_mask,
    lose_the_residual,
    shift_the_patches,
    rotate_by_one_more,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_a_wrong_piece_is_caught(open_case, name, fault):
    case = shaken(open_case(name))
    engine = case.engine()
    assert case.gap(engine, steps=2) <= BOUND
    fault(engine.model)
    assert case.gap(engine, steps=2) > BOUND


def test_a_table_of_other_norms_is_caught(open_case):
    case = shaken(open_case("pi05-2cam"))
    engine = case.engine()
    readers = engine.model.readers()
    engine.model.readers = lambda: [readers[2], readers[1], readers[0], *readers[3:]]
    assert case.gap(engine, steps=2) > BOUND
