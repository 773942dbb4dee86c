"""Frames and camera names that openpi's own clients send, on its protocol: each is accepted as openpi's servers do.

openpi turns a frame whose first axis has three entries (``policies/droid_policy.py``, ``_parse_image``), and takes
floats in [0, 1]. A bundle's key map gives the robot's own keys; `--rename` adds the names that its user chose.
"""

from __future__ import annotations

import numpy as np
import pytest

from sinew.bundle.rename import rename_cameras
from sinew.core import CameraSpec, KeyMap, ObservationError, PolicySpec, VectorSpec
from sinew.families.pi.openpi.embodiments import OPENPI_CONFIGS
from sinew.serve.decode.array import pack
from sinew.serve.wires import field_names, openpi

RNG = np.random.default_rng(0)


def spec(name: str, rename: dict[str, str] | None = None) -> PolicySpec:
    robot = OPENPI_CONFIGS[name].embodiment
    made = PolicySpec(
        "pi05", name, tuple(CameraSpec(each, 224, 224) for each in robot.cameras), robot.state, robot.action,
        15, 32, 10, 200, keys=(robot.keys,),
    )  # fmt: skip
    return rename_cameras(made, rename or {})


def sent(policy: PolicySpec, frames: dict[str, np.ndarray]):
    (keys,) = field_names.key_maps(policy, "openpi")
    sizes = [policy.state.dim - len(keys.state) + 1] + [1] * (len(keys.state) - 1)
    state = {key: np.zeros(size) for key, size in zip(keys.state, sizes, strict=True)}
    return openpi.observation(openpi.read(pack({**frames, **state, "prompt": "go"})), policy)


def frame(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("name", ["pi05_droid", "pi05_libero", "pi0_aloha"])
@pytest.mark.parametrize("kind", ["uint8", "float"])
@pytest.mark.parametrize("height", [8, 224])
def test_channels_first_and_last_give_the_same_frame(name, kind, height):
    policy = spec(name)
    keys = policy.keys[0].images
    frames = {key: frame(height, 12, 3) for key in keys}
    if kind == "float":
        frames = {key: (each / 255.0).astype(np.float32) for key, each in frames.items()}
    last = sent(policy, frames)
    first = sent(policy, {key: np.ascontiguousarray(each.transpose(2, 0, 1)) for key, each in frames.items()})
    for camera, image in last.images.items():
        assert image.shape == (height, 12, 3)
        np.testing.assert_array_equal(image, first.images[camera])


def test_a_frame_without_three_channels_is_refused():
    policy = spec("pi05_droid")
    for shape in ((4, 8, 12), (8, 12, 4), (8, 12)):
        with pytest.raises(ObservationError, match="exterior_image_1_left"):
            sent(policy, dict.fromkeys(policy.keys[0].images, frame(*shape)))


@pytest.mark.parametrize(
    "spelling", ["{}", "images/{}", "observation/{}", "observation/images/{}", "observation.images.{}"]
)
def test_a_renamed_camera_is_read_under_its_name_and_its_key(spelling):
    policy = spec("pi05_droid", {"top": "base_0_rgb"})
    top, wrist = frame(8, 12, 3), frame(8, 12, 3)
    for key in (spelling.format("top"), "observation/exterior_image_1_left"):
        found = sent(policy, {key: top, "observation/wrist_image_left": wrist}).images
        np.testing.assert_array_equal(found["top"], top)
        np.testing.assert_array_equal(found["left_wrist_0_rgb"], wrist)
    assert spelling.format("top") in field_names.keys_read(policy, "openpi")
    with pytest.raises(ObservationError, match="front"):
        sent(policy, {spelling.format("front"): top, "observation/wrist_image_left": wrist})


def test_the_program_that_serve_prints_is_read(capsys):
    """With and without renamed cameras."""
    for rename in ({}, {"top": "base_0_rgb"}, {"a": "base_0_rgb", "b": "left_wrist_0_rgb"}):
        policy = spec("pi05_droid", rename)
        lines = openpi.guide(policy, "ws://127.0.0.1:1")
        start, end = lines.index("observation = {"), lines.index("}")
        scope: dict = {"np": np}
        exec("\n".join(lines[start : end + 1]), scope)
        made = openpi.observation(openpi.read(pack(scope["observation"])), policy)
        assert set(made.images) == {camera.name for camera in policy.cameras}


def test_a_key_of_the_map_is_never_taken_for_a_camera_of_that_name():
    keys = KeyMap("openpi", {"images/a": "b", "images/b": "a"}, ("state",))
    policy = PolicySpec(
        "pi0", "x", (CameraSpec("a", 8, 8), CameraSpec("b", 8, 8)), VectorSpec(1), VectorSpec(1), 4, 4, 4, 8,
        keys=(keys,),
    )  # fmt: skip
    first, second = frame(8, 12, 3), frame(8, 12, 3)
    found = sent(policy, {"images/a": first, "images/b": second}).images
    np.testing.assert_array_equal(found["b"], first)
    np.testing.assert_array_equal(found["a"], second)
