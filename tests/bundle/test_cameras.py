"""Cameras by the robot's names; no frame is dropped and none is missing without a word."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sinew import load
from sinew.bundle import Bundle
from sinew.bundle.rename import parse_renames, rename_cameras
from sinew.cli import main
from sinew.core import KeyMap, ObservationError, SinewError, hints
from sinew.processing import Processor

BLOCKS = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "blocks.gguf"  # cameras front and wrist
FRAME = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
GOOD = {
    "images": {"front": FRAME, "wrist": FRAME[::-1]},
    "state": np.zeros(4, np.float32),
    "prompt": "go",
    "seed": 1,
}


def without(name: str, **more: np.ndarray) -> dict[str, object]:
    kept = {camera: frame for camera, frame in GOOD["images"].items() if camera != name}
    return {**GOOD, "images": {**kept, **more}}


@pytest.fixture(scope="module")
def policy():
    return load(BLOCKS, "cpu", engine="eager")


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (
            without("wrist"),
            (
                "images.wrist: expected a frame of each of the cameras ['front', 'wrist'], got none"
                " (allow_missing_cameras=True runs without)"
            ),
        ),
        (without("wrist", wrst=FRAME), "images.wrst: .*an unknown camera; did you mean 'wrist'?"),
        (without("wrist", cam2=FRAME), "images.cam2: .*an unknown camera (rename={'cam2': 'wrist'} maps it)"),
        (without("", third=FRAME), "images.third: .*an unknown camera"),
        ({**GOOD, "images": {}}, "images: expected at least one of the cameras"),
        ({"image": {}, "state": [0]}, "image: expected one of .*an unknown key; did you mean 'images'?"),
    ],
)
def test_no_caller_runs_half_blind(policy, observation, words: str) -> None:
    pattern = re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(ObservationError, match=pattern):
        policy.check(observation)
    with pytest.raises(ObservationError, match=pattern):
        policy.infer(observation)


@pytest.mark.parametrize(
    ("reader", "spelt"),
    [
        ("python", ("rename={'cam2': 'wrist'} maps it", "allow_missing_cameras=True runs without")),
        ("command line", ("--rename cam2=wrist maps it", "--allow-missing-cameras runs without")),
        (
            "client",
            (
                "`sinew serve ... --rename cam2=wrist` maps it",
                "`sinew serve ... --allow-missing-cameras` runs",
            ),
        ),
    ],
)
def test_hints_are_spelt_for_whom_they_are(policy, reader, spelt) -> None:
    with hints.read_by(reader):
        for observation, words in zip((without("wrist", cam2=FRAME), without("wrist")), spelt, strict=True):
            with pytest.raises(ObservationError, match=re.escape(f"({words}")):
                policy.check(observation)
        with pytest.raises(SinewError) as caught:
            rename_cameras(policy.spec, {"a": "wrst"})
        assert str(caught.value).startswith(hints.option("rename", {"a": "wrst"}))
    assert hints.option("providers", ["cuda", "cpu"]) == "providers=['cuda', 'cpu']"
    with hints.read_by("command line"):
        assert hints.option("providers", ["cuda", "cpu"]) == "--provider cuda --provider cpu"


def test_the_command_line_spells_its_own_flags(tmp_path, capsys) -> None:
    picture = tmp_path / "a.png"
    Image.fromarray(FRAME).save(picture)
    arguments = ["infer", str(BLOCKS), "--state", "0,0,0,0", "--prompt", "go", "--image"]
    assert main([*arguments, f"front={picture}"]) == 1
    assert "(--allow-missing-cameras runs without)" in capsys.readouterr().err
    assert main([*arguments, f"cam2={picture}"]) == 1
    assert "(--rename cam2=front maps it)" in capsys.readouterr().err
    assert (
        main([*arguments, f"top={picture}", "--rename", "front=top"]) == 1
    )  # LeRobot's rename_map is this way
    assert "got 'top'; did you mean --rename top=front?" in capsys.readouterr().err


def test_a_missing_camera_that_is_allowed_is_said_in_the_chunk(policy) -> None:
    allowed = load(BLOCKS, "cpu", engine="eager", allow_missing_cameras=True)
    chunk = allowed.infer(without("wrist"))
    assert chunk.warnings == ("no frame for wrist: the policy ran without these frames",)
    assert repr(chunk).startswith(f"<ActionChunk actions float32 {list(chunk.actions.shape)}, ")
    assert repr(chunk).endswith(f" ms, seed {chunk.seed}, warnings {chunk.warnings}>")
    whole = allowed.infer(GOOD)
    assert whole.warnings == ()
    np.testing.assert_array_equal(whole.actions, policy.infer(GOOD).actions)
    assert not np.allclose(chunk.actions, whole.actions)
    with pytest.raises(ObservationError, match="an unknown camera"):
        allowed.check(without("wrist", wrst=FRAME))


def test_checkpoints_with_empty_cameras_may_miss_as_many() -> None:
    manifest = Bundle(BLOCKS).manifest
    processor = Processor(replace(manifest, processing=replace(manifest.processing, empty_cameras=1)))
    observation = load(BLOCKS, "cpu", engine="eager").dummy_observation()
    processor.check(replace(observation, images={"front": FRAME}))
    with pytest.raises(ObservationError, match="images: expected at least one"):
        processor.check(replace(observation, images={}))


# ----------------------------------------------------------------------------- names of the robot


def test_renamed_cameras_give_the_same_actions(policy) -> None:
    renamed = load(BLOCKS, "cpu", engine="eager", rename={"hand": "wrist", "wrist": "front"})
    assert [camera.name for camera in renamed.spec.cameras] == ["wrist", "hand"]
    frames = {"wrist": GOOD["images"]["front"], "hand": GOOD["images"]["wrist"]}
    np.testing.assert_array_equal(
        renamed.infer({**GOOD, "images": frames}).actions, policy.infer(GOOD).actions
    )
    with pytest.raises(ObservationError, match=r"one of the cameras \['wrist', 'hand'\]"):
        renamed.check(GOOD)


def test_keys_of_wires_follow_their_cameras() -> None:
    spec = Bundle(BLOCKS).manifest.spec
    keys = KeyMap("openpi", {"observation/image": "front", "observation/wrist": "wrist"}, ("state",))
    found = rename_cameras(replace(spec, keys=(keys,)), {"hand": "wrist"})
    assert found.keys[0].images == {"observation/image": "front", "observation/wrist": "hand"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"hand": "wirst"}, "got 'wirst'; did you mean 'wrist'?"),
        ({"front": "wrist"}, "expected a different name for each camera, got front, front"),
        ({"a": "wrist", "b": "wrist"}, "expected each camera once"),
    ],
)
def test_wrong_renames(names: dict[str, str], words: str) -> None:
    with pytest.raises(SinewError, match=re.escape(words)):
        load(BLOCKS, "cpu", rename=names)


@pytest.mark.parametrize("text", ["front", "=front", "hand="])
def test_renames_are_written_with_an_equals_sign(text: str) -> None:
    with pytest.raises(SinewError, match="expected NEW=CAMERA, as front=camera1"):
        parse_renames((text,))


def test_infer_renames(policy, tmp_path: Path, capsys) -> None:
    for name, frame in GOOD["images"].items():
        Image.fromarray(frame).save(tmp_path / f"{name}.png")
    images = ["--image", f"front={tmp_path}/front.png", "--image", f"hand={tmp_path}/wrist.png"]
    rest = ["--state", "0,0,0,0", "--prompt", "go", "--seed", "1", "--engine", "eager", "--device", "cpu"]
    assert main(["infer", "--rename", "hand=wrist", str(BLOCKS), *images, *rest, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_array_equal(np.array(found["actions"], np.float32), policy.infer(GOOD).actions)
    assert main(["infer", str(BLOCKS), *images[:2], *rest, "--allow-missing-cameras", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [
        "no frame for wrist: the policy ran without these frames"
    ]
