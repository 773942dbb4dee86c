"""Diffusion Policy's checkpoints: what is read of them and what is refused; moments of an observation."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sinew_perf.machine.measure import MeasuredSizes
from sinew_perf.machine.measure_engine import measure_engine, requests_of
from sinew_perf.program import PublishedProgram

from sinew.bench.measure import describe, make_observation
from sinew.bundle import Bundle
from sinew.checks.validate.observations import random_observations
from sinew.convert import convert
from sinew.convert.read.safetensors import read_safetensors
from sinew.convert.resnet import backbone
from sinew.core import BundleError, ConvertError, Moment, Observation, ObservationError, SinewError
from sinew.layers.resnet import ResNet, ResNetConfig
from sinew.models.solvers import solve
from sinew.policy import Policy, load
from sinew.processing.image import prepare_frame
from sinew.stream import Session, StreamSettings
from tests.golden import Golden
from tests.models.stages import observation

CASES = ("diffusion-ddim", "diffusion-ddpm")


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """The checkpoint of DDIM, which a test may spoil."""
    source = golden / "diffusion-ddim" / "checkpoint"
    shutil.copytree(source, tmp_path / "diffusion", copy_function=shutil.copyfile)
    return tmp_path / "diffusion"


def run(checkpoint: Path, without: tuple[str, ...] = (), **changes: object) -> Bundle:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if key not in without}
    (checkpoint / "config.json").write_text(json.dumps(kept))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"vision_backbone": "resnet50"},
            "vision_backbone: expected one of resnet18, resnet34, got 'resnet50'",
        ),
        ({"noise_scheduler_type": "DPM"}, "noise_scheduler_type: expected one of DDPM, DDIM, got 'DPM'"),
        (
            {"beta_schedule": "sigmoid"},
            "beta_schedule: expected one of squaredcos_cap_v2, linear, got 'sigmoid'",
        ),
        (
            {"prediction_type": "v_prediction"},
            "prediction_type: expected one of epsilon, sample, got 'v_pred",
        ),
        (
            {"beta_start": 0.5},
            "levels: expected first_beta up to last_beta from 5.96e-08 to below 1, got 0.5, 0.02",
        ),
        ({"beta_start": "0"}, "beta_start: expected a number above 0, got '0'"),
        ({"clip_sample_range": 0}, "clip_sample_range: expected a number above 0, got 0"),
        ({"clip_sample_range": True}, "clip_sample_range: expected a number above 0, got True"),
        ({"num_inference_steps": 101}, "num_inference_steps: expected a whole number from 1 to 100, got 101"),
        ({"n_obs_steps": 17}, "n_obs_steps: expected a whole number from 1 to 16, got 17"),
        ({"n_obs_steps": 3}, r"down_modules.0.0.cond_encoder.1.weight: shape \[64, 130\] does not split"),
        ({"n_action_steps": 16}, "n_action_steps: expected a whole number from 1 to 15, got 16"),
        ({"horizon": 18}, "chunk_size: expected a multiple of 4, got 18"),
        ({"crop_shape": [98, 84]}, "crop_shape: expected at most 97 x 99, got 98 x 84"),
        ({"crop_shape": [84]}, "crop_shape: expected height and width, got"),
        (
            {"crop_shape": [128, 84], "resize_shape": [64, 64], "crop_ratio": 0},
            "crop_ratio: expected a number above 0, got 0",
        ),
        ({"down_dims": [32, 48]}, "down_modules.1.2.bias is not a part of the model"),
        ({"down_dims": 32}, "down_dims: expected a list of widths, got 32"),
        ({"n_groups": 5}, "widths: expected multiples of num_groups 5, got 32"),
        ({"kernel_size": 4}, "kernel_size: expected an odd number, got 4"),
        ({"diffusion_step_embed_dim": 21}, "time_size: expected an even number of at least 4, got 21"),
        ({"use_film_scale_modulation": False}, r"film\.\S+ has shape|cond_encoder"),
        ({"use_separate_rgb_encoder_per_camera": True}, r"vision.1.tower.stem.weight is missing"),
        ({"use_group_norm": False}, r"norm|bias"),
        ({"resampling": "none"}, 'resampling="none" is not understood'),
    ],
)
def test_what_is_not_computed_is_refused(checkpoint: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


@pytest.mark.parametrize("key", ["horizon", "n_action_steps", "n_obs_steps", "crop_shape", "use_group_norm"])
def test_defaults_that_differ_between_versions_are_not_taken(checkpoint: Path, key: str) -> None:
    with pytest.raises(ConvertError, match=f"'{key}' is missing"):
        run(checkpoint, without=(key,))


def test_what_a_bundle_says(checkpoint: Path) -> None:
    manifest = run(checkpoint, without=("resize_shape", "crop_ratio")).manifest  # as LeRobot 0.4 wrote it
    spec, levels = manifest.spec, manifest.spec.solver.levels
    assert (spec.history, spec.chunk_size, spec.noise_shape, spec.views) == (2, 8, (16, 6), 4)
    assert manifest.processing.first_row == 1
    assert levels is not None
    assert (levels.count, levels.predicts, levels.clip, levels.fresh) == (100, "epsilon", 1.0, False)
    assert (spec.solver_steps, spec.noises(), spec.resizes_frames) == (10, (16, 6), True)
    assert run(checkpoint, clip_sample=False).manifest.spec.solver.levels.clip == 0.0
    ddpm = run(checkpoint, noise_scheduler_type="DDPM", num_inference_steps=None).manifest.spec
    assert (ddpm.solver_steps, ddpm.noises()) == (100, (100, 16, 6))


def test_a_crop_follows_its_ratio(checkpoint: Path) -> None:
    """As LeRobot derives it when it reads a configuration: what the file says of it does not count."""
    found = run(
        checkpoint, resize_shape=[90, 95], crop_ratio=0.95, crop_shape=[11, 12]
    ).manifest.processing.image
    assert str(found).startswith("bilinear_float to 90x95, middle 85x90")
    with pytest.raises(ConvertError, match=r"places has shape \[9, 2\]|pos_grid"):
        run(checkpoint, resize_shape=[120, 95], crop_ratio=1.0)


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_the_references(case: str, golden: Path, case_bundle: Any) -> None:
    """Resized in floats, then cut, at a place that is rounded to even."""
    policy, g = load(case_bundle(case), engine="eager"), Golden(golden / case)
    for index, camera in enumerate(g.cameras):
        recipe = policy.manifest.processing.image.of_camera(index)
        found = prepare_frame(g.numpy(f"frame.{camera}")[-1], recipe)
        np.testing.assert_allclose(found[None], g.numpy(f"encoder_input.{camera}"), rtol=0, atol=2e-6)
    pixels = policy.processor.inputs(observation(case, g)).pixels  # [T * V, 3, h, w], moment after moment
    # Of the newest moment alone, as the fixture has it; what becomes of both is compared in every later stage.
    stored = np.concatenate([g.numpy(f"encoder_input.{camera}") for camera in g.cameras])
    np.testing.assert_allclose(pixels[-len(stored) :], stored, rtol=0, atol=2e-6)


def test_a_frame_that_is_too_small_is_refused(golden: Path, case_bundle: Any) -> None:
    """LeRobot puts grey around it."""
    policy, given = opened("diffusion-ddim", golden, case_bundle)
    images = {name: frame[:80] for name, frame in given.images.items()}
    with pytest.raises(
        ObservationError, match="images.top: expected a frame that becomes 84 x 84, got 80 x 99"
    ):
        policy.infer(replace(given, images=images))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_the_whole_solution_is_the_references(case: str, golden: Path, case_bundle: Any) -> None:
    """All rows, those of the earlier moment too, which the chunk leaves out."""
    policy, given = opened(case, golden, case_bundle)
    model, g = policy.engine.model, Golden(golden / case)
    inputs = policy.processor.inputs(given)
    arrays = inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state
    pixels, *rest = (torch.from_numpy(array)[None] for array in arrays)
    context = model.read(model.embed_images(pixels), *rest)
    noise = torch.from_numpy(np.asarray(given.noise))[None]
    steps = policy.spec.solver_steps
    found = solve(
        lambda x, time: model.act(x, time, context),
        noise,
        model.solver.steps(steps),
        model.time_embeddings(steps),
    )
    np.testing.assert_allclose(found, g["sample_normalized"], rtol=0, atol=5e-5)
    rows = slice(1, 1 + policy.spec.chunk_size)
    np.testing.assert_array_equal(g["sample_normalized"][:, rows], g["chunk_normalized"])


def test_statistics_of_before_0_4_are_read(checkpoint: Path) -> None:
    """As buffers among the weights."""
    wanted = run(checkpoint).manifest.processing
    weights = load_file(checkpoint / "model.safetensors")
    for file in checkpoint.glob("policy_*"):
        if file.suffix == ".safetensors":
            for name, value in load_file(file).items():
                key, _, stat = name.rpartition(".")
                group = "unnormalize_outputs" if key == "action" else "normalize_inputs"
                weights[f"{group}.buffer_{key.replace('.', '_')}.{stat}"] = value
        file.unlink()
    save_file(weights, checkpoint / "model.safetensors")
    found = run(checkpoint).manifest.processing
    assert (found.image, found.state, found.action) == (wanted.image, wanted.state, wanted.action)


@torch.inference_mode()
def test_a_backbone_of_group_norms_is_torchvisions(golden: Path) -> None:
    """Norm by norm against a plain computation, on a picture of odd sides."""
    path = golden / "diffusion-ddim" / "checkpoint" / "model.safetensors"
    prefix = "diffusion.rgb_encoder.backbone."
    theirs = {name.removeprefix(prefix): value for name, value in load_file(path).items() if prefix in name}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        groups = x.unflatten(1, (-1, 16))
        variance, mean = torch.var_mean(groups, dim=(2, 3, 4), keepdim=True, correction=0)
        x = ((groups - mean) * (variance + 1e-5).rsqrt()).flatten(1, 2)
        return x * theirs[f"{name}.weight"][:, None, None] + theirs[f"{name}.bias"][:, None, None]

    def conv(x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        weight = theirs[f"{name}.weight"]
        return torch.nn.functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    pixels = torch.randn(1, 3, 61, 87, generator=torch.Generator().manual_seed(1))
    x = torch.nn.functional.max_pool2d(norm(conv(pixels, "0", 2), "1").relu(), 3, 2, 1)
    for stage in range(4, 8):
        for block in range(2):
            at, stride = f"{stage}.{block}", 2 if stage > 4 and block == 0 else 1
            y = norm(conv(x, f"{at}.conv1", stride), f"{at}.bn1").relu()
            y = norm(conv(y, f"{at}.conv2"), f"{at}.bn2")
            down = f"{at}.downsample"
            own = norm(conv(x, f"{down}.0", stride), f"{down}.1") if f"{down}.0.weight" in theirs else x
            x = (y + own).relu()
    ours = ResNet(ResNetConfig((2, 2, 2, 2), group=16))
    found = backbone(read_safetensors(path), prefix, "")
    ours.load_state_dict({name: values(found[name]) for name in ours.state_dict()})
    got = ours(pixels)
    assert (got - x).abs().max() <= 1e-5 * x.abs().max()


def values(source: Any) -> torch.Tensor:
    data = b"".join(map(bytes, source.data.blocks()))
    return torch.from_numpy(np.frombuffer(data, np.float32).reshape(source.shape).copy())


# ----------------------------------------------------------------------------- moments


def opened(case: str, golden: Path, case_bundle: Any) -> tuple[Policy, Observation]:
    return load(case_bundle(case), engine="eager", dtype="float32"), observation(case, Golden(golden / case))


def test_moments_that_are_not_sent_are_the_oldest_one(golden: Path, case_bundle: Any) -> None:
    policy, given = opened("diffusion-ddim", golden, case_bundle)
    both = policy.infer(given)
    assert not any("earlier" in warning for warning in both.warnings)
    alone = policy.infer(replace(given, earlier=()))
    assert any("uses 2 observation steps and got 1" in warning for warning in alone.warnings)
    twice = policy.infer(replace(given, earlier=(Moment(given.images, given.state),)))
    assert np.array_equal(alone.actions, twice.actions)
    assert not np.allclose(alone.actions, both.actions, atol=1e-3)
    assert not any("earlier" in warning for warning in twice.warnings)
    swapped = Observation(given.earlier[0].images, given.earlier[0].state, noise=given.noise)
    swapped = replace(swapped, earlier=(Moment(given.images, given.state),))
    assert not np.allclose(policy.infer(swapped).actions, both.actions, atol=1e-3)  # their order counts


def test_moments_are_checked_by_name(golden: Path, case_bundle: Any) -> None:
    policy, given = opened("diffusion-ddim", golden, case_bundle)
    (before,) = given.earlier
    frames = dict(before.images)
    for earlier, message in (
        (
            (before, before),
            r"^earlier: expected at most 1, because this policy reads 2, got 2 observation steps",
        ),
        (
            (Moment({"top": frames["top"]}, before.state),),
            r"^earlier\[0\].images.wrist: expected a frame of each",
        ),
        (
            (Moment(frames | {"top": frames["top"][:50]}, before.state),),
            r"^earlier\[0\].images.top: expected a frame",
        ),
        ((Moment(frames, before.state[1:]),), r"^earlier\[0\].state: expected shape \[7\], got shape \[6\]"),
        ((Moment(frames, before.state * np.nan),), r"^earlier\[0\].state: expected finite numbers"),
        ((None,), r"^earlier\[0\]: expected images and state of an observation step, got NoneType"),
        ("before", r"^earlier: expected a list of observation steps, got str"),
    ):
        with pytest.raises(ObservationError, match=message):
            policy.infer(replace(given, earlier=earlier))  # type: ignore[arg-type]
    torch_moment = {
        "images": {n: torch.from_numpy(f) for n, f in frames.items()},
        "state": before.state.tolist(),
    }
    again = policy.infer(replace(given, earlier=[torch_moment]))  # type: ignore[list-item]
    assert np.array_equal(again.actions, policy.infer(given).actions)


def test_a_policy_of_one_moment_takes_no_others(golden: Path, case_bundle: Any) -> None:
    policy, given = opened("act-2cam", golden, case_bundle)
    with pytest.raises(
        ObservationError, match="earlier: expected none for this policy, got 1 observation steps"
    ):
        policy.infer(replace(given, earlier=(Moment(given.images, given.state),)))


def test_a_stream_has_one_moment(golden: Path, case_bundle: Any) -> None:
    policy, _ = opened("diffusion-ddim", golden, case_bundle)
    with pytest.raises(
        SinewError,
        match="stream: expected a policy without an observation history, got one with 2 observation steps",
    ):
        Session(policy, StreamSettings(100.0, guidance="none"))


def test_noise_is_that_of_each_step(golden: Path, case_bundle: Any) -> None:
    """A request may choose fewer steps, and then has as many noises."""
    policy, given = opened("diffusion-ddpm", golden, case_bundle)
    seeded = replace(given, noise=None, seed=3, solver_steps=4)
    noise = np.random.default_rng(3).standard_normal((4, 16, 9), np.float32)
    chunk = policy.infer(seeded)
    assert chunk.actions.shape == (12, 9)
    assert np.array_equal(chunk.actions, policy.infer(replace(seeded, seed=None, noise=noise)).actions)
    with pytest.raises(ObservationError, match=r"noise: expected shape \[4, 16, 9\], got shape \[16, 9\]"):
        policy.infer(replace(seeded, noise=noise[0]))
    with pytest.raises(ObservationError, match="solver_steps: expected an integer from 1 to 100, got 101"):
        policy.infer(replace(seeded, solver_steps=101))


def test_a_running_chunk_is_not_continued(golden: Path, case_bundle: Any) -> None:
    """Guidance needs an estimate of the actions that Euler has."""
    policy, given = opened("diffusion-ddim", golden, case_bundle)
    assert policy.capabilities.guidance == ()
    with pytest.raises(ObservationError, match=r"^previous: .*diffusion"):
        policy.infer(replace(given, previous=np.zeros((4, 6), np.float32)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": {"history": 3}}, "does not fit processing.padded_state_dim|first_row|history"),
        ({"spec": {"history": 17}}, "spec.history: expected 1 to 16"),
        (
            {"processing": {"first_row": 9}},
            "processing.first_row: expected a row of the solution that is followed by a whole chunk",
        ),
        (
            {"processing": {"first_row": -1}},
            "processing.first_row: expected a row of the solution that is followed by a whole chunk",
        ),
        (
            {"processing": {"all_cameras": False}},
            "spec.history: expected 1 unless processing.all_cameras is true",
        ),
    ],
)
def test_a_bundle_that_contradicts_itself_is_refused(checkpoint: Path, changes: dict, message: str) -> None:
    manifest = run(checkpoint).manifest
    for name, values_ in changes.items():
        manifest = replace(manifest, **{name: replace(getattr(manifest, name), **values_)})
    with pytest.raises(BundleError, match=message):
        manifest.check()


# ----------------------------------------------------------------------------- what no fixture holds


def with_environment(checkpoint: Path, count: int = 3) -> Bundle:
    """Return the bundle of the same checkpoint with a state of the environment, which blocks read at random."""
    config = json.loads((checkpoint / "config.json").read_text())
    features = config["input_features"] | {"observation.environment_state": {"type": "ENV", "shape": [count]}}
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, value in weights.items():
        if name.endswith("cond_encoder.1.weight"):
            more = torch.randn(len(value), 2 * count, generator=generator)
            weights[name] = torch.cat([value, more], dim=1)
    save_file(weights, checkpoint / "model.safetensors")
    return run(checkpoint, input_features=features)


def test_the_environments_state_stands_behind_each_moments_views(checkpoint: Path, golden: Path) -> None:
    """In LeRobot's order: the robot's state, its views, the environment's, and then the next moment's."""
    bundle = with_environment(checkpoint)
    policy, g = load(bundle.path, engine="eager"), Golden(golden / "diffusion-ddim")
    assert (policy.spec.state.dim, policy.manifest.processing.padded_state_dim) == (10, 20)
    assert [part.dim for part in policy.manifest.processing.state_parts] == [7, 3]
    given = observation("diffusion-ddim", g)
    (before,) = given.earlier
    rooms = np.float32([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    given = replace(
        given,
        state=np.concatenate([given.state, rooms[1]]),
        earlier=(Moment(before.images, np.concatenate([before.state, rooms[0]])),),
    )
    inputs = policy.processor.inputs(given)
    model: Any = policy.engine.model
    tokens = model.embed_images(torch.from_numpy(inputs.pixels)[None])
    found = model.condition(tokens, torch.from_numpy(inputs.state)[None]).detach()
    own = g["global_cond"].unflatten(1, (2, -1))
    wanted = torch.cat([own, torch.from_numpy(rooms)[None]], dim=-1).flatten(1)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert policy.infer(given).actions.shape == (8, 6)


@pytest.mark.parametrize("case", CASES)
def test_a_batch_is_its_members(case: str, golden: Path, case_bundle: Any) -> None:
    policy, given = opened(case, golden, case_bundle)
    alone = Observation(given.images, given.state, seed=1, solver_steps=5)
    members = [replace(given, noise=None, seed=2, solver_steps=5), alone]
    both = policy.run_batch([policy.prepare(member) for member in members])
    for chunk, member in zip(both, members, strict=True):
        np.testing.assert_allclose(chunk.actions, policy.infer(member).actions, rtol=0, atol=1e-4)
    assert [any("earlier" in each for each in chunk.warnings) for chunk in both] == [False, True]


def test_half_precision_has_a_bound(golden: Path, case_bundle: Any) -> None:
    exact, given = opened("diffusion-ddpm", golden, case_bundle)
    given = replace(given, noise=None, seed=4, solver_steps=5)
    half = load(case_bundle("diffusion-ddpm"), engine="eager", dtype="bfloat16")
    wanted, found = exact.infer(given).actions, half.infer(given).actions
    assert 0 < np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < 0.1


def test_verbs_count_the_views_of_all_moments(golden: Path, case_bundle: Any) -> None:
    """And the rows that the solver goes through, which are no other number: they halve from stage to stage."""
    path = case_bundle("diffusion-ddim")
    policy, _ = opened("diffusion-ddim", golden, case_bundle)
    program = PublishedProgram.load(path)
    assert program.fixed == {"cameras": 4, "chunk": 16}
    assert PublishedProgram.load("diffusion").fixed == {"cameras": 2, "chunk": 16}
    assert describe(policy, make_observation(policy.spec, None, "", None))["views"] == 4
    requests = requests_of(policy)
    assert requests == [MeasuredSizes(4, 1, 16)]
    assert {time.stage for time in measure_engine(policy, requests, runs=1)} == {"vision", "prefix", "head"}
    with pytest.raises(
        SinewError,
        match="views: expected 1 to 4, with the same cameras in each of 2 observation steps, got 3",
    ):
        measure_engine(policy, [MeasuredSizes(3, 1, 16)])
    assert all(component.operators for component in program.components("fused"))
    drawn = next(random_observations(policy))
    assert not np.array_equal(drawn.earlier[0].images["top"], drawn.images["top"])
    assert not any("earlier" in warning for warning in policy.infer(drawn).warnings)
