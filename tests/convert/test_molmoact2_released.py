"""The folders that MolmoAct2's authors release: one tag of their statistics becomes the processing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError
from sinew.policy import load
from tests.golden import Golden, assert_parity
from tests.models.stages import observation

CASE = "molmoact2-2cam"
STATS = "policy_preprocessor_step_3_molmoact2_masked_normalizer.safetensors"
JOINTS = [f"joint_{index}.pos" for index in range(6)] + ["gripper.pos"]


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """The network of the golden case as its authors release one, with two tags."""
    source, folder = golden / CASE / "checkpoint", tmp_path / "released"
    shutil.copytree(source / "vlm", folder, copy_function=shutil.copyfile)
    weights = load_file(source / "model.safetensors")
    save_file(
        {name.removeprefix("model."): value for name, value in weights.items()}, folder / "model.safetensors"
    )
    stats: dict[str, dict[str, Any]] = {"observation.state": {}, "action": {}}
    for name, values in load_file(source / STATS).items():
        feature, _, stat = name.rpartition(".")
        stats[feature][stat] = [bool(value) for value in values] if stat == "mask" else values.tolist()
    tag = {
        "state_stats": {**stats["observation.state"], "names": JOINTS},
        "action_stats": {**stats["action"], "names": JOINTS},
        "camera_keys": ["observation.images.front", "observation.images.wrist"],
        "setup_type": "single arm robot",
        "control_mode": "absolute joint pose",
        "action_horizon": 10,
        "n_action_steps": 8,
    }
    tags = {"our_arm": tag, "other_arm": {**tag, "action_horizon": 4, "n_action_steps": 4}}
    (folder / "norm_stats.json").write_text(json.dumps({"norm_mode": "q01_q99", "metadata_by_tag": tags}))
    return folder


def run(folder: Path, key: str = "our_arm", /, tag: dict[str, Any] | None = None, **settings: str) -> Bundle:
    """Convert a tag, with changed entries of it."""
    if tag:
        file = folder / "norm_stats.json"
        record = json.loads(file.read_text())
        record["metadata_by_tag"][key].update(tag)
        file.write_text(json.dumps(record))
    names = tuple(settings.pop("cameras", "").split(",")) if "cameras" in settings else ()
    out = folder.parent / "out.gguf"
    return Bundle(convert(folder, out, cameras=names, stats_key=key, settings=settings))


def test_the_references_actions(folder: Path, golden: Path) -> None:
    """LeRobot with checkpoint_path and norm_tag computes what it computes of the fine-tune with the same numbers."""
    bundle, g = run(folder), Golden(golden / CASE)
    policy = load(bundle.path, engine="eager", dtype="float32")
    assert_parity(policy.infer(observation(CASE, g)).actions, g["actions"])
    spec = bundle.manifest.spec
    assert (spec.n_action_steps, spec.solver_steps) == (8, 10)
    assert spec.state.names == spec.action.names == tuple(JOINTS)


def test_a_tag_has_its_own_chunk(folder: Path) -> None:
    assert run(folder, "other_arm").manifest.spec.chunk_size == 4


def test_joints_that_turn_otherwise(folder: Path, golden: Path) -> None:
    """The state of the model is sign * state + offset, and the action of the robot is sign * (action - offset)."""
    g = Golden(golden / CASE)
    bundle = run(folder, joint_signs="1,-1,1", joint_offsets="0,0.3,-0.2")
    signs, offsets = np.array([1, -1, 1, 1, 1, 1, 1.0]), np.array([0, 0.3, -0.2, 0, 0, 0, 0.0])
    given = observation(CASE, g)
    turned = replace(given, state=((given.state - offsets) * signs).astype(np.float32))
    actions = load(bundle.path, engine="eager", dtype="float32").infer(turned).actions
    assert_parity(actions, (g.numpy("actions") - offsets) * signs)


def test_cameras_that_the_user_names(folder: Path) -> None:
    spec = run(folder, tag={"camera_keys": None}, cameras="top,side,wrist").manifest.spec
    assert [camera.name for camera in spec.cameras] == ["top", "side", "wrist"]


def test_the_only_tag_needs_no_flag(folder: Path) -> None:
    file = folder / "norm_stats.json"
    record = json.loads(file.read_text())
    del record["metadata_by_tag"]["other_arm"]
    file.write_text(json.dumps(record))
    notes = run(folder, "").manifest.provenance.notes
    assert any("statistics of our_arm, the only tag of norm_stats.json" in note for note in notes)


@pytest.mark.parametrize(
    ("key", "tag", "settings", "message"),
    [
        ("", {}, {}, "--stats-key: expected one of the tags other_arm, our_arm, got none"),
        ("arm", {}, {}, "--stats-key: expected one of the tags other_arm, our_arm, got 'arm'"),
        ("our_arm", {"camera_keys": None}, {}, "pass the cameras with --cameras NAME,NAME"),
        ("our_arm", {"state_stats": {"q01": []}}, {}, "observation.state: q01: expected a list of numbers"),
        (
            "our_arm",
            {"state_stats": {"q01": [0.0] * 7, "q99": [1.0] * 6}},
            {},
            "observation.state: q99: expected 7 values, as in q01, got 6",
        ),
        ("our_arm", {"action_stats": {"q01": ["a"]}}, {}, "the statistics of action: could not convert"),
        ("our_arm", {"action_horizon": 0}, {}, "chunk_size: expected a whole number from 1"),
        ("our_arm", {}, {"joint_signs": "1,x"}, "--set joint_signs: expected numbers, separated by commas"),
        (
            "our_arm",
            {},
            {"joint_signs": "1,1"},
            "expected at most 7 joint_signs and as many joint_offsets, got 2 and 0",
        ),
    ],
)
def test_wrong_statistics_are_rejected(
    folder: Path, key: str, tag: dict[str, Any], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        run(folder, key, tag=tag, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_mode": "mean_std"}, "norm_mode: expected 'q01_q99', got 'mean_std'"),
        ({"metadata_by_tag": {}}, "metadata_by_tag: expected a table of tags"),
    ],
)
def test_another_file_of_statistics_is_rejected(folder: Path, changes: dict[str, Any], message: str) -> None:
    file = folder / "norm_stats.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConvertError, match=message):
        run(folder)


def test_a_network_of_discrete_actions_alone_is_rejected(folder: Path) -> None:
    """MolmoAct2-Pretrain."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"action_mode": "discrete"}))
    with pytest.raises(
        ConvertError, match='action_mode="discrete": discrete action tokens are not supported'
    ):
        run(folder)


def test_a_folder_without_statistics_is_rejected(folder: Path) -> None:
    (folder / "norm_stats.json").unlink()
    with pytest.raises(ConvertError, match="norm_stats.json"):
        run(folder)
