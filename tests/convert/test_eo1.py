"""EO-1's checkpoints: what is read of them and what is rejected; views of different sizes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import BundleError, ConvertError, Observation, ObservationError
from sinew.policy import load
from sinew.steps.image.corner import Corner
from tests.golden import Golden
from tests.models.stages import observation


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    shutil.copytree(golden / "eo1-2cam" / "checkpoint", tmp_path / "eo1", copy_function=shutil.copyfile)
    return tmp_path / "eo1"


def run(checkpoint: Path, **changes: Any) -> Bundle:
    """Convert with changed fields of config.json; a name with two underscores is inside of ``vlm_config``."""
    record = json.loads((checkpoint / "config.json").read_text())
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        (record["vlm_config"][part] if inner else record)[inner or part] = value
    (checkpoint / "config.json").write_text(json.dumps(record))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_act": "gelu"}, 'action_act="gelu" is not supported yet, expected "linear"'),
        ({"n_obs_steps": 2}, "n_obs_steps=2 is not supported yet"),
        ({"num_action_layers": 1}, "action_out"),
        ({"chunk_size": 0}, "chunk_size: expected a whole number from 1"),
        ({"max_state_dim": 6}, "max_state_dim: expected a whole number from 7"),
        (
            {"min_period": 5.0},
            "min_period, max_period: expected 0 < min_period < max_period, got 5.0 and 4.0",
        ),
        ({"vision_config__hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        (
            {"vision_config__window_size": 60},
            "window_size: expected whole tokens, a multiple of [0-9]+ pixels, got 60",
        ),
        ({"vision_config__fullatt_block_indexes": [4]}, "whole: expected block indices below 4"),
        ({"text_config__use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        (
            {"text_config__vocab_size": 320},
            "expected ids of EO-1's tokens below 320, the size of the token table, got 3",
        ),
        ({"text_config__num_hidden_layers": 5}, r"language.layers.4.\S+ is missing"),
        ({"guidance": 2.0}, "guidance=2.0 is not understood"),
    ],
)
def test_what_is_not_computed_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


def test_another_image_processor_is_rejected(checkpoint: Path) -> None:
    file = checkpoint / "vlm" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"merge_size": 1}))
    with pytest.raises(ConvertError, match="merge_size: expected 2, got 1"):
        run(checkpoint)


def test_views_keep_their_sizes(checkpoint: Path) -> None:
    """The second camera's 8 tokens are not 12 because the first camera has so many."""
    image = run(checkpoint).manifest.processing.image
    assert (image.height, image.width, image.sizes) == (112, 112, ((84, 112), (112, 56)))


def test_a_frame_of_another_size_is_rejected_by_its_camera(golden: Path, case_bundle: Any) -> None:
    """Frames that become the other camera's size are wrong for this one."""
    policy = load(case_bundle("eo1-2cam"), engine="eager", dtype="float32")
    given = observation("eo1-2cam", Golden(golden / "eo1-2cam"))
    front, wrist = (given.images[name] for name in ("front", "wrist"))
    policy.infer(given)  # so both shapes are remembered as fitting, each for its camera
    whole = np.zeros((112, 112, 3), np.uint8)  # would fill the pixels that both views share
    for name, wrong, own in (
        ("front", wrist, "84 x 112"),
        ("wrist", front, "112 x 56"),
        ("front", whole, "84 x 112"),
        ("wrist", whole, "112 x 56"),
    ):
        images = {"front": front, "wrist": wrist} | {name: wrong}
        with pytest.raises(
            ObservationError, match=rf"images.{name}: expected a frame that becomes {own}, got"
        ):
            policy.infer(Observation(images, given.state, prompt=given.prompt))


def test_pixels_outside_of_a_view_are_not_read(golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle("eo1-2cam"), engine="eager", dtype="float32")
    model: Any = policy.engine.model
    inputs = policy.processor.inputs(observation("eo1-2cam", Golden(golden / "eo1-2cam")), padded=False)
    pixels = torch.from_numpy(inputs.pixels)[None]
    other = pixels.clone()
    other[:, 0, :, 84:] = 9.0
    other[:, 1, :, :, 56:] = -9.0
    with torch.inference_mode():
        assert torch.equal(model.embed_images(pixels), model.embed_images(other))


def test_an_observation_is_the_same_in_a_batch(golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle("eo1-2cam"), engine="eager", dtype="float32")
    given = observation("eo1-2cam", Golden(golden / "eo1-2cam"))
    members = [given, replace(given, state=-given.state, noise=None, seed=2)]
    both = policy.run_batch([policy.prepare(member) for member in members])
    for chunk, member in zip(both, members, strict=True):
        np.testing.assert_allclose(chunk.actions, policy.infer(member).actions, rtol=0, atol=1e-4)


def test_a_corner_is_the_picture_and_black() -> None:
    frame = np.full((2, 3, 3), 7, np.uint8)
    found = Corner(4, 5, 2, 3).forward(frame)
    assert found.shape == (4, 5, 3)
    assert (found[:2, :3] == 7).all()
    assert found.sum() == frame.sum()
    assert Corner(4, 5, 2, 3).size(3, 2) == (3, 2)  # another picture stays, so that its size is rejected


def test_sizes_of_views_are_checked(checkpoint: Path) -> None:
    manifest = run(checkpoint).manifest
    processing = manifest.processing
    for sizes, message in (
        (((84, 112),), "processing.image.sizes: expected one size for each camera, or none, got 1"),
        (((84, 112), (112, 140)), "sizes: expected at most 112x112, got 112x140"),
    ):
        wrong = replace(
            manifest, processing=replace(processing, image=replace(processing.image, sizes=sizes))
        )
        with pytest.raises(BundleError, match=message):
            wrong.check()
