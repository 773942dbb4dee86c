"""Several observations in one program of engine cuda, on a CPU: each gets its own actions, whoever stands beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from sinew.bundle.schema import COMPONENTS
from sinew.core import Observation, SinewError
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fp8.linear import Fp8Linear
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.kernels import fp8_quantize, weight_only_linear
from sinew.engine.cuda.lowbit.weights import WeightOnly
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.guidance import Inpainting, Ramp
from sinew.engine.plan.plan import Plan
from sinew.engine.watch import Watch
from sinew.policy import load
from sinew.processing import ModelInputs, stack
from sinew.serve.batching import Batcher
from tests.closeness import rounding
from tests.covering import pairs, some
from tests.engine.cpu.test_cpu_engine import RECIPES, stored
from tests.engine.cuda.cuda_cases import (
    ASSETS,
    CASES,
    CPU,
    ONE_PER_MODEL,
    Case,
    Frozen,
    golden_case,
    lowbit_case,
    shaken,
)
from tests.engines import run_one

STEPS = 2


@pytest.fixture
def open_case(golden, smolvla_bundle, pi_bundle):
    def make(name: str) -> Case:
        bundle = pi_bundle if name.startswith("pi") else smolvla_bundle
        return shaken(golden_case(golden, bundle, name))

    return make


def robots(case: Case, count: int, seed: int = 0) -> list[tuple[ModelInputs, np.ndarray]]:
    """Observations whose frames, masks, prompts, states and noise differ. Prompts have 3 to 15 tokens."""
    rng, like = np.random.default_rng(seed), case.inputs()
    found = []
    for k in range(count):
        length = int(rng.integers(3, 16))
        mask = like.camera_mask.copy()
        mask[-1] = bool(k % 3)  # a robot of three has no second camera
        frames = tuple(rng.integers(0, 256, frame.shape, dtype=np.uint8) for frame in like.frames)
        tokens = rng.integers(1, 60, length)
        state = rng.standard_normal(like.state.shape).astype(np.float32)
        inputs = ModelInputs(like.pixels, mask, tokens, np.ones(length, bool), state, frames)
        found.append((inputs, rng.standard_normal(case.noise.shape).astype(np.float32)))
    return found


def together(case: Case, engine, members, guidance=None, apart: bool = False) -> np.ndarray:
    inputs, noise = zip(*members, strict=True)
    prompt = case.policy.manifest.processing.prompt
    return engine.run(stack(inputs, prompt), np.stack(noise), STEPS, guidance, Watch(apart=apart))


def refusal(case: Case, inputs: ModelInputs, noise: np.ndarray, found: np.ndarray) -> str:
    """Return the reason why ``found`` cannot be what eager computes for one observation alone."""
    prepared = case.prepared(inputs)
    return rounding(lambda: run_one(case.reference, prepared, noise, STEPS)[0]).refusal(found)


@pytest.mark.parametrize(
    ("name", "options"),
    pairs(
        CASES,
        ({}, {"kernels": False}, {"apart": True}),
        ("pi05-2cam", {}),
        ("pi0-2cam", {"apart": True}),
        ("smolvla-2cam", {"kernels": False}),
    ),
    ids=str,
)
def test_each_robot_gets_its_own_actions(open_case, name, options):
    """Four observations in one program give the actions of each alone, within rounding: a library sums more rows in
    another order."""
    case, options = open_case(name), dict(options)
    apart = options.pop("apart", False)  # whether the stages run one by one
    engine, members = case.engine(Frozen(), **options), robots(case, 4)
    found = together(case, engine, members, apart=apart)
    assert [key.batch for key in engine.programs.keys()] == [4]  # noqa: SIM118
    alone = case.engine(**options)
    for (inputs, noise), chunk in zip(members, found, strict=True):
        assert not refusal(case, inputs, noise, chunk)
        wanted, _ = run_one(alone, inputs, noise, STEPS)
        assert np.abs(chunk - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert refusal(case, *members[1], found[0])  # the robots' actions differ


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_neighbours_change_nothing(open_case, name):
    """One robot beside different neighbours, to the bit; at another place within what rounding does."""
    case = open_case(name)
    engine, (first, own, *others) = case.engine(Frozen()), robots(case, 4)
    wanted = together(case, engine, [first, own, *others])[1]
    for seed in (5, 6):
        strangers = robots(case, 4, seed)
        found = together(case, engine, [strangers[0], own, *strangers[2:]])
        assert np.array_equal(found[1], wanted)
        assert not np.array_equal(found[0], wanted)
        moved = together(case, engine, [*strangers[1:], own])
        assert not refusal(case, *own, moved[3])
    nothing = replace(own[0], frames=tuple(np.zeros_like(frame) for frame in own[0].frames))
    assert np.array_equal(together(case, engine, [(nothing, own[1]), own, *others])[1], wanted)


KINDS = ("int8", "q8_0", "q4_0")
FP8 = (("language",), ("language.mlp",))


@pytest.fixture
def open_lowbit(case_bundle, tmp_path):
    def make(name: str, kind: str, parts: tuple[str, ...] = COMPONENTS) -> Case:
        return lowbit_case(stored(case_bundle(name), RECIPES[kind], tmp_path / f"{name}-{kind}.gguf"), parts)

    return make


def products(engine) -> set[str]:
    """Return the formats of the engine's low-bit and FP8 layers."""
    found = set()
    for layer in engine.model.modules():
        if isinstance(store := getattr(layer, "store", None), WeightOnly):
            found.add(store.name)
        found |= {"fp8"} if isinstance(layer, Fp8Linear) else set()
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["whole", "apart"])
@pytest.mark.parametrize(("name", "kind"), pairs(ONE_PER_MODEL, KINDS, ("pi0-2cam", "q4_0")))
def test_low_bit_weights_in_a_batch(open_lowbit, name, kind, apart):
    """One, two and four observations give the actions of each alone, within rounding, as with float weights."""
    case = open_lowbit(name, kind)
    members, alone = robots(case, 4), case.engine()
    assert kind in products(alone)
    wanted = [run_one(alone, *member, STEPS)[0] for member in members]
    for count in (1, 2, 4):
        engine = case.engine(Frozen())
        found = together(case, engine, members[:count], apart=apart)
        assert [key.batch for key in engine.programs.keys()] == [count]  # noqa: SIM118
        for (inputs, noise), chunk, own in zip(members, found, wanted, strict=False):
            assert not refusal(case, inputs, noise, chunk)
            assert np.abs(chunk - own).max() <= 1e-5 * np.abs(own).max()
    assert refusal(case, *members[1], found[0])


# A number whose float32 sum has another last bit may become another number of e4m3. If all frames change by 3e-5 of
# their values, a hundred times the rounding of a batch, the actions change by up to a third of the error of FP8.
FLIPS = 0.1


@pytest.mark.parametrize("lowbit", [False, True], ids=["float head", "low-bit head"])
@pytest.mark.parametrize(("name", "fp8"), pairs(ONE_PER_MODEL, FP8, ("pi05-2cam", FP8[0])), ids=str)
def test_fp8_weights_in_a_batch(open_case, open_lowbit, name, fp8, lowbit):
    """One, two and four observations give the actions of each alone. Scales are those of the calibration, and not of
    the batch."""
    case = open_lowbit(name, "q4_0", ("head",)) if lowbit else open_case(name)
    members, alone, plain = robots(case, 4), case.engine(fp8=fp8), case.engine()
    assert products(alone) == products(plain) | {"fp8"}
    assert ("q4_0" in products(plain)) == lowbit
    wanted = [run_one(alone, *member, STEPS)[0] for member in members]
    errors = [
        np.abs(run_one(plain, *member, STEPS)[0] - own).max()
        for member, own in zip(members, wanted, strict=True)
    ]
    for count in (1, 2, 4):
        engine = case.engine(Frozen(), fp8=fp8)
        found = together(case, engine, members[:count])
        assert [key.batch for key in engine.programs.keys()] == [count]  # noqa: SIM118
        for chunk, own, error in zip(found, wanted, errors, strict=False):
            assert error > 1e-5 * np.abs(own).max()  # something was converted
            assert np.abs(chunk - own).max() <= 1e-5 * np.abs(own).max() + FLIPS * error
    assert np.abs(found[0] - wanted[1]).max() > 10 * errors[1]  # the robots' actions differ


@pytest.mark.parametrize("kind", ["q4_0", "fp8"])
def test_neighbours_change_nothing_in_low_precision(open_case, open_lowbit, kind):
    """To the bit: no scale depends on another robot."""
    case = open_case("pi05-2cam") if kind == "fp8" else open_lowbit("pi05-2cam", kind)
    engine = case.engine(Frozen(), **({"fp8": ("language",)} if kind == "fp8" else {}))
    first, own, *others = robots(case, 4)
    wanted = together(case, engine, [first, own, *others])[1]
    strangers = robots(case, 4, 5)
    # One neighbour is far louder than all inputs of the calibration.
    loud = replace(strangers[0][0], state=1e3 * strangers[0][0].state)
    found = together(case, engine, [(loud, strangers[0][1]), own, *strangers[2:]])
    assert np.array_equal(found[1], wanted)
    assert not np.array_equal(found[0], wanted)


def scale_by_the_batch(engine, monkeypatch) -> None:
    """FP8 with the largest input of the batch as scale, in the place of the calibration."""
    right = fp8_quantize.reference

    def dynamic(x, x_scale=None):
        return right(x, x_scale=x.abs().max().float() / fp8_quantize.LARGEST)

    monkeypatch.setattr(fp8_quantize, "reference", dynamic)


def mix_the_rows(engine, monkeypatch) -> None:
    """A low-bit product that exchanges the rows of two observations."""
    right = weight_only_linear.reference

    def mixed(x, *weights, **options):
        return right(x.roll(len(x) // 2, 0), *weights, **options)

    monkeypatch.setattr(weight_only_linear, "reference", mixed)


@pytest.mark.parametrize(("kind", "fault"), [("fp8", scale_by_the_batch), ("q4_0", mix_the_rows)])
def test_a_low_precision_batch_that_mixes_its_robots_is_caught(
    open_case, open_lowbit, monkeypatch, kind, fault
):
    case = open_case("pi05-2cam") if kind == "fp8" else open_lowbit("pi05-2cam", kind)
    engine = case.engine(**({"fp8": ("language",)} if kind == "fp8" else {}))
    first, own = robots(case, 2)
    loud = replace(first[0], frames=tuple(255 - frame // 9 for frame in first[0].frames))
    wanted = together(case, engine, [first, own])[1]
    fault(engine, monkeypatch)
    before, after = (together(case, engine, [other, own])[1] for other in (first, (loud, first[1])))
    assert not np.array_equal(before, after)
    assert np.abs(before - wanted).max() > 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("fp8", FP8, ids=str)
def test_fp8_over_low_bit_weights_is_rejected_by_name(open_lowbit, fp8):
    case = open_lowbit("pi05-2cam", "q4_0")
    words = rf"fp8: {fp8[0]}: these weights are stored as .*q4_0, and a layer has one format"
    with pytest.raises(SinewError, match=words):
        CudaEngine(
            Plan.of(case.model, rewrites=ON_CUDA),
            CPU,
            processing=case.policy.manifest.processing,
            options=CudaOptions(fp8=fp8),
            scales={},
        )


def test_a_batch_that_mixes_its_robots_is_caught(open_case, monkeypatch):
    """The proof can fail: keys of a neighbour in the attention."""
    case = open_case("pi05-2cam")
    engine, members = case.engine(), robots(case, 2)
    wanted = together(case, engine, members)
    ops = engine.model.expert.layers[0].attn.ops
    right = ops.packed_attention

    def mixed(q, kv, mask, own=None):
        return right(q, tuple(each.flip(0) for each in kv), mask, own)

    monkeypatch.setattr(ops, "packed_attention", mixed)
    found = together(case, engine, members)
    for (inputs, noise), good, wrong in zip(members, wanted, found, strict=True):
        assert not refusal(case, inputs, noise, good)
        assert refusal(case, inputs, noise, wrong)


def test_other_numbers_of_robots_run_in_parts(open_case):
    """Seven are four, two and one; the one runs the program of a robot alone, to the bit."""
    case = open_case("smolvla-2cam")
    engine, members = case.engine(), robots(case, 7)
    found = together(case, engine, members)
    assert [key.batch for key in engine.programs.keys()] == [4, 2, 1]  # noqa: SIM118
    assert np.array_equal(found[:4], together(case, engine, members[:4]))
    assert np.array_equal(found[4:6], together(case, engine, members[4:6]))
    assert len(engine.programs) == 3
    # The prompt of the last one is padded to those of the others, and the program pads both to the same length.
    assert np.array_equal(found[6], run_one(engine, *members[6], STEPS)[0])
    assert len(engine.programs) == 3


def test_parts_have_no_padding():
    options = CudaOptions(largest_batch=4)
    assert [[each.stop - each.start for each in options.parts(n)] for n in (1, 2, 3, 7, 9)] == [
        *([1], [2], [2, 1], [4, 2, 1], [4, 4, 1])
    ]
    assert options.parts(7) == [slice(0, 4), slice(4, 6), slice(6, 7)]
    assert (options.batches(3), options.batches(100)) == ([1, 2], [1, 2, 4])
    for wrong in (0, 3):
        with pytest.raises(SinewError, match=f"largest_batch: expected a power of two, got {wrong}"):
            CudaOptions(largest_batch=wrong)


def guided_one(arguments, guidance) -> np.ndarray:
    return run_one(*arguments, guidance=guidance)[0]


@pytest.mark.parametrize("kind", ["no-jacobian", "ramp"])
def test_each_robot_of_a_batch_continues_its_own_chunk(open_case, kind):
    """Also in parts: three are two and one."""
    case = open_case("pi05-2cam")
    engine, members = case.engine(Frozen()), robots(case, 3)
    rng = np.random.default_rng(1)
    shape = (3, *case.noise.shape)
    target, weights = (engine.place(rng.random(shape).astype(np.float32)) for _ in "ab")
    solver = case.policy.spec.solver
    guidance = Ramp(weights) if kind == "ramp" else Inpainting(solver, target, weights, 5.0, jacobian=False)
    found = together(case, engine, members, guidance)
    free = together(case, engine, members)
    for k, (inputs, noise) in enumerate(members):
        arguments = case.policy.engine, case.prepared(inputs), noise, STEPS
        wanted = rounding(partial(guided_one, arguments, guidance.part(slice(k, k + 1))))
        assert not wanted.refusal(found[k])
        assert wanted.refusal(free[k])


def test_a_policy_computes_several_observations_from_their_frames(open_case):
    """Frames of other sizes, and other numbers of cameras, are another batch."""
    case = open_case("smolvla-2cam")
    policy = load(case.policy.bundle.path, engine="cuda", device="cpu", allow_missing_cameras=True)
    assert not policy.unbatched
    rng, like = np.random.default_rng(0), policy.dummy_observation()

    def observation(k: int, size: tuple[int, int], cameras: int = 2) -> Observation:
        names = [*like.images][:cameras]
        images = {name: rng.integers(0, 256, (*size, 3), dtype=np.uint8) for name in names}
        return replace(like, images=images, seed=k, prompt="reach"[: 3 + k % 3])

    asked = [observation(k, (48, 64)) for k in range(3)]
    asked += [observation(3, (30, 20)), observation(4, (48, 64), 1), observation(5, (30, 20))]
    found = policy.infer_all(asked)
    assert [each.timing.batch for each in found] == [3, 3, 3, 2, 1, 2]
    for each, chunk in zip(asked, found, strict=True):
        wanted = policy.infer(each).actions
        assert np.abs(chunk.actions - wanted).max() <= 1e-5 * np.abs(wanted).max()
    members = [policy.prepare(each) for each in (asked[0], asked[3])]
    with pytest.raises(SinewError, match="the same batch_key"):
        policy.run_batch(members)
    with pytest.raises(SinewError, match="a batch: expected views and frames of one shape"):
        stack([member.inputs for member in members], policy.manifest.processing.prompt)


def test_batches_are_recorded_before_they_are_needed():
    """As many prompt lengths for each number of robots as for one, and none goes."""
    policy = load(ASSETS / "blocks.gguf", engine="cuda", device="cpu")
    policy.warm_up()
    one = policy.engine.programs.keys()
    policy.warm_batches(5)
    found = policy.engine.programs.keys()
    assert {key.batch for key in found} == {1, 2, 4}
    for batch in (1, 2, 4):
        assert [key for key in found if key.batch == batch] == [replace(key, batch=batch) for key in one]
    policy.infer_all([policy.dummy_observation()] * 5)
    assert len(policy.engine.programs) == len(found)


def test_a_server_batches_with_engine_cuda():
    """`--max-batch`: the requests that wait share a program."""
    policy = load(ASSETS / "blocks.gguf", engine="cuda", device="cpu")
    batcher = Batcher(2)
    batcher.calibrate(policy)
    assert batcher.limit == 2
    assert batcher.reason.startswith("measured 1: ")
    assert {key.batch for key in policy.engine.programs.keys()} == {1, 2}  # noqa: SIM118
