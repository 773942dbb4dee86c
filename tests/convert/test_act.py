"""ACT's checkpoints: what is read of them, what is refused, and where statistics come from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert, read
from sinew.convert.options import ConvertOptions
from sinew.convert.read.safetensors import read_safetensors
from sinew.convert.resnet import backbone
from sinew.core import BundleError, ConvertError, ObservationError
from sinew.core.fields import from_builtins
from sinew.families.act.convert import BACKBONE
from sinew.families.act.model import ACT, ActConfig
from sinew.layers.resnet import LAYERS, ResNet, ResNetConfig
from sinew.models.solvers import FLOW
from sinew.policy import load
from tests.golden import Golden
from tests.models.stages import observation

CASES = ("act-2cam", "act-env")


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """The checkpoint of two cameras, which a test may spoil."""
    shutil.copytree(golden / "act-2cam" / "checkpoint", tmp_path / "act", copy_function=shutil.copyfile)
    return tmp_path / "act"


def run(checkpoint: Path, **changes: object) -> Bundle:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | changes))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feedforward_activation": "glu"}, "feedforward_activation: expected one of relu, gelu, got 'glu'"),
        ({"replace_final_stride_with_dilation": True}, "replace_final_stride_with_dilation=true is not supp"),
        (
            {"vision_backbone": "resnet50"},
            "vision_backbone: expected one of resnet18, resnet34, got 'resnet50'",
        ),
        ({"n_obs_steps": 2}, "n_obs_steps=2 is not supported yet, expected 1"),
        ({"n_decoder_layers": 2}, r"n_decoder_layers|decoder\.1\.\S+ is missing|decoder.layers.1"),
        ({"n_encoder_layers": 2}, r"model.encoder.layers.2.\S+ is not a part of the model"),
        ({"chunk_size": 21}, r"decoder_pos_embed.weight has shape \[20, 48\], expected \[21, 48\]"),
        ({"n_heads": 7}, "hidden_size: expected a multiple of 4 and of num_heads 7, got 48"),
        ({"pre_norm": True}, "encoder_norm|encoder.norm"),
        ({"state_noise": 0.1}, "state_noise=0.1 is not understood"),
    ],
)
def test_what_is_not_computed_is_refused(checkpoint: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


def test_what_no_engine_would_open_is_not_written(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a converter of somebody's own: a head that answers at once is no velocity, which would be added to
    noise without a word; and a view that weights fix may not be missing."""
    found, out = read(checkpoint, ConvertOptions()), checkpoint.parent / "out.gguf"
    spec, width = found.spec, found.processing.padded_action_dim
    velocity = replace(found, spec=replace(spec, solver=FLOW, noise_dim=width))
    with pytest.raises(
        ConvertError,
        match=r"spec.solver: expected single, because act computes its actions in one pass, got euler",
    ):
        velocity.write(out, "arm", ConvertOptions())
    monkeypatch.setattr(ACT, "views", property(lambda self: 2))
    with pytest.raises(
        ConvertError, match="expected true and 2 views, as the weights require, got 2, of which"
    ):
        replace(found, processing=replace(found.processing, all_cameras=False)).write(
            out, "arm", ConvertOptions()
        )
    assert not out.exists()


def test_cameras_of_two_sizes_keep_them(checkpoint: Path) -> None:
    """Weights do not depend on sizes. Cameras of one size have no sizes of their own in the bundle."""
    plain = run(checkpoint).manifest
    assert (plain.processing.image.sizes, plain.config["frames"]) == ((), [])
    features = json.loads((checkpoint / "config.json").read_text())["input_features"]
    features["observation.images.wrist"]["shape"] = [3, 120, 96]
    bundle = run(checkpoint, input_features=features)
    image, config = bundle.manifest.processing.image, bundle.manifest.config
    assert (image.height, image.width, image.sizes) == (120, 132, ((100, 132), (120, 96)))
    assert (config["frames"], config["rows"], config["cols"]) == ([[100, 132], [120, 96]], 4, 5)
    assert bundle.infos["view_places"].shape == (4 * 5 + 4 * 3, 48)
    assert str(image).startswith("each camera's own size as they come")


def test_a_bundle_without_frames_opens(case_bundle: Callable[[str], Path]) -> None:
    """Bundles that were written before cameras had sizes of their own."""
    config = dict(Bundle(case_bundle("act-2cam")).manifest.config)
    assert config.pop("frames") == []
    assert from_builtins(config, ActConfig, "sinew.config").frames == ()


def test_a_frame_of_another_camera_is_rejected(golden: Path, case_bundle: Callable[[str], Path]) -> None:
    """A frame of the size that holds all cameras is wrong for a smaller camera."""
    policy = load(case_bundle("act-sizes"), engine="eager")
    given = observation("act-sizes", Golden(golden / "act-sizes"))
    top, wrist = given.images["top"], given.images["wrist"]
    policy.infer(given)  # so both shapes are remembered as fitting, each for its camera
    for images, message in (
        (
            {"top": top, "wrist": top},
            "images.wrist: expected exactly 45 x 45, got 96 x 128 .*set the camera to this size",
        ),
        (
            {"top": wrist, "wrist": wrist},
            "images.top: expected exactly 96 x 128, got 45 x 45 .*set the camera to this size",
        ),
    ):
        with pytest.raises(ObservationError, match=message):
            policy.infer(replace(given, images=images))


@torch.inference_mode()
def test_pixels_outside_of_a_view_are_not_read(golden: Path, case_bundle: Callable[[str], Path]) -> None:
    policy = load(case_bundle("act-sizes"), engine="eager", dtype="float32")
    model = cast(ACT, policy.engine.model)
    inputs = policy.processor.inputs(observation("act-sizes", Golden(golden / "act-sizes")))
    pixels = torch.from_numpy(inputs.pixels)[None]
    other = pixels.clone()
    other[:, 1, :, 45:] = 9.0
    other[:, 1, :, :, 45:] = -9.0
    tokens = model.embed_images(pixels)
    assert torch.equal(tokens, model.embed_images(other))
    assert not tokens[:, 1, 4:].any()  # nor what is behind the 4 features of the second view
    spoilt = tokens.clone()
    spoilt[:, 1, 4:] = 7.0
    rest = (
        torch.ones(1, 2, dtype=torch.bool),
        torch.zeros(1, 0, dtype=torch.int64),
        torch.zeros(1, 0, dtype=torch.bool),
    )
    state = torch.from_numpy(inputs.state)[None]
    assert torch.equal(*(model.regress(model.read(each, *rest, state)) for each in (tokens, spoilt)))


def test_an_observation_is_the_same_in_a_batch(golden: Path, case_bundle: Callable[[str], Path]) -> None:
    policy = load(case_bundle("act-3cam"), engine="eager", dtype="float32")
    given = observation("act-3cam", Golden(golden / "act-3cam"))
    members = [given, replace(given, state=-given.state)]
    both = policy.run_batch([policy.prepare(member) for member in members])
    for chunk, member in zip(both, members, strict=True):
        np.testing.assert_allclose(chunk.actions, policy.infer(member).actions, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "sizes", "frames", "message"),
    [
        (
            "act-sizes",
            ((96, 128), (48, 45)),
            None,
            "sizes: sinew.config requires 96x128, 45x45, got 96x128, 48x45",
        ),
        ("act-sizes", (), None, "sizes: sinew.config requires 96x128, 45x45, got 96x128, 96x128"),
        (
            "act-sizes",
            ((96, 128), (48, 45)),
            ((96, 128), (48, 45)),
            "wrist, .* become 45x45 pixels, got 48x45",
        ),
        (
            "act-2cam",
            ((100, 132), (96, 96)),
            None,
            "sizes: must be absent, because all views of act have one size",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_not_written(
    case: str, sizes: Any, frames: Any, message: str, golden: Path, tmp_path: Path
) -> None:
    found = read(golden / case / "checkpoint", ConvertOptions())
    image = replace(found.processing.image, sizes=sizes)
    found = replace(found, processing=replace(found.processing, image=image))
    if frames is not None:
        found = replace(found, config=replace(found.config, frames=frames))
    with pytest.raises(ConvertError, match=message):
        found.write(tmp_path / "out.gguf", "arm", ConvertOptions())
    assert not (tmp_path / "out.gguf").exists()


def test_a_grid_is_the_largest_of_all_views(golden: Path) -> None:
    config = read(golden / "act-sizes" / "checkpoint", ConvertOptions()).config
    with pytest.raises(
        ValueError, match="rows, cols: expected 2 x 4, the largest grid of all views, got 3 x 4"
    ):
        replace(config, frames=((64, 128), (45, 45)))


def test_each_camera_has_its_own_statistics(checkpoint: Path, golden: Path) -> None:
    """With the eps of the step; one record where cameras agree; files without them are refused."""
    recipe = run(checkpoint).manifest.processing.image
    g = Golden(golden / "act-2cam")
    for camera, name in zip(recipe.cameras, g.cameras, strict=True):
        assert camera.mean == tuple(g.numpy(f"stats.{name}.mean").ravel().tolist())
        assert camera.std == tuple((g.numpy(f"stats.{name}.std").ravel() + np.float32(1e-8)).tolist())
    assert "statistics of each camera" in str(recipe)
    (file,) = checkpoint.glob("policy_preprocessor_step_*.safetensors")
    stats = load_file(file)
    for stat in ("mean", "std"):
        stats[f"observation.images.wrist.{stat}"] = stats[f"observation.images.top.{stat}"].clone()
    save_file(stats, file)
    same = run(checkpoint).manifest.processing.image
    assert (same.cameras, same.mean, same.std) == ((), recipe.cameras[0].mean, recipe.cameras[0].std)
    save_file({name: value for name, value in stats.items() if "images" not in name}, file)
    with pytest.raises(
        ConvertError, match=r"no statistics \['mean', 'std'\] for 'observation.*three colours"
    ):
        run(checkpoint)


def test_a_bundle_has_statistics_of_all_its_cameras_or_of_none(checkpoint: Path) -> None:
    bundle = run(checkpoint)
    image = bundle.manifest.processing.image
    for wrong, message in (
        (replace(image, cameras=image.cameras[:1]), "image.cameras: expected one entry for each camera"),
        (
            replace(image, cameras=(replace(image.cameras[0], std=(1.0, 0.0, 1.0)),) * 2),
            r"image.cameras\[0\].std\[1\]: expected a finite number above 0, got 0",
        ),
        (
            replace(image, cameras=(replace(image.cameras[0], mean=(1.0,)),) * 2),
            "length 3",
        ),
    ):
        manifest = replace(bundle.manifest, processing=replace(bundle.manifest.processing, image=wrong))
        with pytest.raises(BundleError, match=message):
            manifest.check()


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


def test_the_environments_state_follows_the_robots(golden: Path, case_bundle) -> None:
    policy, g = load(case_bundle("act-env"), engine="eager"), Golden(golden / "act-env")
    assert policy.spec.state.dim == 11
    assert any("the last 5 of the state's 11 numbers" in note for note in policy.manifest.provenance.notes)
    found = policy.processor.inputs(observation("act-env", g)).state
    np.testing.assert_allclose(found[:6], g.numpy("state_normalized")[0], atol=1e-6, rtol=0)
    np.testing.assert_array_equal(found[6:], g.numpy("environment_state_normalized")[0])


def test_whatever_is_said_is_not_read(golden: Path, case_bundle) -> None:
    policy, given = (
        load(case_bundle("act-2cam"), engine="eager"),
        observation("act-2cam", Golden(golden / "act-2cam")),
    )
    silent = policy.infer(given).actions
    assert np.array_equal(policy.infer(replace(given, prompt="put the cube away")).actions, silent)
    frames = dict(given.images)
    with pytest.raises(ObservationError, match=r"images.wrist: expected a frame of each"):
        policy.infer(replace(given, images={"top": frames["top"]}))
    with pytest.raises(
        ObservationError, match="expected exactly 100 x 132, got 99 x 132 .*set the camera to this size"
    ):
        policy.infer(replace(given, images={name: frame[1:] for name, frame in frames.items()}))
    with pytest.raises(ObservationError, match="noise: expected none, because this policy starts from zeros"):
        policy.infer(replace(given, noise=np.zeros((20, 6), np.float32)))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_folded_norm_is_the_norm(case: str, golden: Path) -> None:
    """The backbone with each batch norm apart, as torchvision computes it, against ours, on a picture of odd sides."""
    path = golden / case / "checkpoint" / "model.safetensors"
    theirs = {n.removeprefix(BACKBONE): t for n, t in load_file(path).items() if n.startswith(BACKBONE)}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias, mean, var = (
            theirs[f"{name}.{part}"][:, None, None]
            for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)

    def conv(x: torch.Tensor, name: str, stride: int = 1) -> torch.Tensor:
        weight = theirs[f"{name}.weight"]
        return torch.nn.functional.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    pixels = torch.randn(1, 3, 61, 87, generator=torch.Generator().manual_seed(1))
    x = torch.nn.functional.max_pool2d(norm(conv(pixels, "conv1", 2), "bn1").relu(), 3, 2, 1)
    for stage, count in enumerate(LAYERS["resnet18"], 1):
        for block in range(count):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = norm(conv(x, f"{at}.conv1", stride), f"{at}.bn1").relu()
            y = norm(conv(y, f"{at}.conv2"), f"{at}.bn2")
            down = f"{at}.downsample"
            x = (
                y + (norm(conv(x, f"{down}.0", stride), f"{down}.1") if f"{down}.0.weight" in theirs else x)
            ).relu()
    ours = ResNet(ResNetConfig(LAYERS["resnet18"]))
    found = {
        n: s
        for n, s in backbone(read_safetensors(path), BACKBONE, "vision.").items()
        if n.startswith("vision.")
    }
    values = {
        name.removeprefix("vision."): torch.from_numpy(
            np.frombuffer(b"".join(map(bytes, source.data.blocks())), np.float32).reshape(source.shape).copy()
        )
        for name, source in found.items()
    }
    ours.load_state_dict(values)
    got = ours(pixels)
    assert got.shape == (1, 512, *ResNetConfig.grid(61, 87)) == x.shape
    assert (got - x).abs().max() <= 1e-5 * x.abs().max()
