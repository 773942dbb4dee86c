"""LeRobot checkpoints: what a converter does not understand is refused by name, and older files take upstream's
defaults. Facts from ``lerobot/processor`` and ``lerobot/policies/*/configuration_*.py``, 0.3 to 0.6."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert import convert
from sinew.convert.lerobot.steps import relative_dims
from sinew.core import ConvertError
from sinew.policy import load
from tests.golden import Golden, assert_parity

CASE = "smolvla-2cam"


def writable(golden: Path, case: str, where: Path) -> Path:
    for folder in ("checkpoint", "vlm"):
        if (golden / case / folder).is_dir():
            shutil.copytree(golden / case / folder, where / folder, copy_function=shutil.copyfile)
    return where / "checkpoint"


@pytest.fixture
def checkpoint(golden, tmp_path) -> Path:
    return writable(golden, CASE, tmp_path)


def run(checkpoint: Path, **options) -> Path:
    return convert(checkpoint, checkpoint.parent / "out.gguf", **options)


def edit(path: Path, **changes) -> None:
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))


def edit_step(checkpoint: Path, pipeline: str, name: str, **config) -> None:
    path = checkpoint / f"{pipeline}.json"
    record = json.loads(path.read_text())
    step = next(step for step in record["steps"] if step["registry_name"] == name)
    step["config"] |= config
    path.write_text(json.dumps(record))


def insert_step(checkpoint: Path, pipeline: str, index: int, step: dict) -> None:
    path = checkpoint / f"{pipeline}.json"
    record = json.loads(path.read_text())
    record["steps"].insert(index, step)
    path.write_text(json.dumps(record))


# ----------------------------------------------------------------------------- processor steps


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"registry_name": "my_crop_processor"}, r"\(my_crop_processor\): .*this step is not understood"),
        ({"class": "robots.Flip", "config": {}}, r"\(robots.Flip\): .*this step is not understood"),
        ({}, r"\(None\)"),
        ({"registry_name": ["a"]}, r"\(\['a'\]\)"),
        ({"registry_name": "to_batch_processor", "run_if": 1}, "'run_if' is not understood"),
        ({"registry_name": "to_batch_processor", "config": {"x": 1}}, "x=1 is not understood"),
        ({"registry_name": "to_batch_processor", "config": [1]}, "expected a configuration"),
        (
            {"registry_name": "device_processor", "config": {"float_dtype": "bfloat16"}},
            "float_dtype: expected None or 'float32', got 'bfloat16'",
        ),
    ],
)
def test_steps_that_are_not_understood_are_named(checkpoint, step, message):
    insert_step(checkpoint, "policy_preprocessor", 1, step)
    with pytest.raises(ConvertError, match=f"policy_preprocessor.json: step 1 .*{message}"):
        run(checkpoint)


def test_steps_of_the_postprocessor_too(checkpoint):
    insert_step(checkpoint, "policy_postprocessor", 1, {"registry_name": "vla_jepa_clip_actions"})
    with pytest.raises(ConvertError, match=r"policy_postprocessor.json: step 1 \(vla_jepa_clip_actions\)"):
        run(checkpoint)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("tokenizer_processor", {"padding_side": "left"}, "padding_side: expected 'right', got 'left'"),
        ("tokenizer_processor", {"truncation": False}, "truncation: expected True, got False"),
        ("tokenizer_processor", {"truncation": 1}, "truncation: expected True, got 1"),
        ("tokenizer_processor", {"task_key": "goal"}, "task_key: expected 'task', got 'goal'"),
        ("tokenizer_processor", {"max_length": 0}, "tokenizer_max_length: expected a whole number from 1"),
        ("tokenizer_processor", {"lower_case": True}, "lower_case=True is not understood"),
        ("normalizer_processor", {"norm_map": {"VISUAL": "MEAN_STD"}}, "VISUAL normalisation 'MEAN_STD'"),
        (
            "normalizer_processor",
            {"features": {"action": {"type": "ACTION", "shape": [6]}}},
            "features has no 'observation.state'",
        ),
        ("normalizer_processor", {"norm_map": {"STATE": "MAD"}}, "normalisation 'mad'"),
    ],
)
def test_configurations_that_are_not_understood_are_named(checkpoint, name, config, message):
    edit_step(checkpoint, "policy_preprocessor", name, **config)
    with pytest.raises(ConvertError, match=message):
        run(checkpoint)


def test_order_and_absence_of_steps(checkpoint):
    path = checkpoint / "policy_preprocessor.json"
    original = json.loads(path.read_text())
    steps = original["steps"]
    path.write_text(json.dumps({"steps": [*steps[:2], steps[3], steps[2], *steps[4:]]}))
    with pytest.raises(
        ConvertError, match=r"smolvla_new_line_processor\): expected this step before tokenizer_processor"
    ):
        run(checkpoint)
    path.write_text(json.dumps({"steps": [*steps[:2], *steps[3:]]}))
    with pytest.raises(ConvertError, match="expected a step smolvla_new_line_processor, got none"):
        run(checkpoint)
    path.write_text(json.dumps({"steps": [*steps, steps[-1]]}))
    with pytest.raises(ConvertError, match=r"step 6 \(normalizer_processor\): the step occurs twice"):
        run(checkpoint)
    late = {"registry_name": "relative_actions_processor", "config": {"enabled": True}}
    path.write_text(json.dumps({"steps": [*steps, late]}))
    with pytest.raises(
        ConvertError, match="expected this step before normalizer_processor"
    ):  # its state would not be raw
        run(checkpoint)
    path.write_text(json.dumps({"steps": {"a": 1}}))
    with pytest.raises(ConvertError, match="expected a list of steps"):
        run(checkpoint)


def test_the_pipeline_decides_the_prompt(checkpoint):
    edit_step(checkpoint, "policy_preprocessor", "tokenizer_processor", max_length=40, padding="max_length")
    manifest = Bundle(run(checkpoint)).manifest
    assert (manifest.processing.prompt.max_tokens, manifest.processing.prompt.padding) == (40, "max_length")
    assert manifest.spec.max_prompt_tokens == 40


def test_a_state_that_upstream_does_not_normalise(checkpoint):
    edit_step(checkpoint, "policy_preprocessor", "normalizer_processor", normalize_observation_keys=[])
    processing = Bundle(run(checkpoint)).manifest.processing
    assert (processing.state.mode, processing.action.mode) == ("identity", "mean_std")


# ----------------------------------------------------------------------------- camera names


@pytest.mark.parametrize("prefix", ["observation.images.", ""])
def test_rename_map_becomes_the_cameras_names(checkpoint, golden, prefix):
    table = {f"{prefix}front": f"{prefix}camera1", f"{prefix}wrist": f"{prefix}camera2"}
    edit_step(checkpoint, "policy_preprocessor", "rename_observations_processor", rename_map=table)
    policy = load(run(checkpoint))
    assert [camera.name for camera in policy.spec.cameras] == ["front", "wrist"]
    assert any("front for camera1" in note for note in policy.manifest.provenance.notes)
    g = Golden(golden / CASE)
    observation = g.observation()
    names = dict(zip(("camera1", "camera2"), ("front", "wrist"), strict=True))
    observation["images"] = {names[name]: frame for name, frame in observation["images"].items()}
    assert_parity(policy.infer(observation).actions, g.numpy("actions")[0])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"observation.images.camera2": "observation.images.camera1"}, "two cameras one name"),
        ({"a": "camera1", "b": "camera1"}, "one name for each slot"),
        ({"a": 1}, "expected a table of names"),
        ([1], "expected a table of names"),
    ],
)
def test_rename_maps_that_do_not_fit(checkpoint, table, message):
    edit_step(checkpoint, "policy_preprocessor", "rename_observations_processor", rename_map=table)
    with pytest.raises(ConvertError, match=message):
        run(checkpoint)


@pytest.mark.parametrize("left", ["camera3", "camera9", "wrist_left"])
def test_a_rename_of_a_view_that_the_policy_does_not_read_is_noted(checkpoint, left):
    table = {"observation.images.front": "observation.images.camera1", "side": f"observation.images.{left}"}
    edit_step(checkpoint, "policy_preprocessor", "rename_observations_processor", rename_map=table)
    manifest = Bundle(run(checkpoint)).manifest
    assert [(each.name, each.slot) for each in manifest.spec.cameras] == [
        ("front", "camera1"),
        ("camera2", ""),
    ]
    assert any(f"rename_map: side for {left} is ignored" in note for note in manifest.provenance.notes)


# ----------------------------------------------------------------------------- relative actions


def relative(checkpoint: Path, **config) -> None:
    edit_step(checkpoint, "policy_preprocessor", "relative_actions_processor", enabled=True, **config)
    edit_step(checkpoint, "policy_postprocessor", "absolute_actions_processor", enabled=True)


def test_relative_actions_are_added_to_the_raw_state(golden, tmp_path):
    """The mask is upstream's: names that an excluded token is part of stay absolute."""
    case = "pi0-2cam"
    checkpoint = writable(golden, case, tmp_path)
    arch = golden / case / "arch.json"
    plain = load(run(checkpoint, arch=arch))
    names = ["a.pos", "b.pos", "c.pos", "left_Gripper.pos", "d.pos", "e.pos", "gripper"]
    relative(checkpoint, action_names=names, exclude_joints=["gripper"])
    policy = load(run(checkpoint, arch=arch))
    g = Golden(golden / case)
    mask = np.array([1, 1, 1, 0, 1, 1, 0], np.float32)
    expected = plain.infer(g.observation()).actions + mask * g.numpy("state_raw")
    np.testing.assert_array_equal(policy.infer(g.observation()).actions, expected)


def test_relative_dims_are_upstreams_mask():
    assert relative_dims({"exclude_joints": ["gripper"], "action_names": None}, 3, "") == (0, 1, 2)
    assert relative_dims({"exclude_joints": [], "action_names": ["gripper", "a"]}, 2, "") == (0, 1)
    assert relative_dims({"exclude_joints": ["g"], "action_names": ["a", "G1"]}, 4, "") == (0, 2, 3)
    with pytest.raises(ConvertError, match="exclude_joints: expected a list of names"):
        relative_dims({"exclude_joints": [1]}, 4, "somewhere")


def test_relative_actions_that_disagree(golden, tmp_path):
    checkpoint = writable(golden, "pi0-2cam", tmp_path)
    edit_step(checkpoint, "policy_postprocessor", "absolute_actions_processor", enabled=True)
    with pytest.raises(ConvertError, match="enabled=False, but absolute_actions_processor .* enabled=True"):
        run(checkpoint, arch=golden / "pi0-2cam" / "arch.json")
    edit_step(checkpoint, "policy_postprocessor", "absolute_actions_processor", enabled=1)
    with pytest.raises(ConvertError, match="enabled: expected True or False, got 1"):
        run(checkpoint, arch=golden / "pi0-2cam" / "arch.json")


# ----------------------------------------------------------------------------- configuration


def test_missing_keys_take_upstreams_defaults(checkpoint, golden):
    """LeRobot loads such a file; each default is recorded."""
    edit(
        checkpoint / "config.json", num_expert_layers=..., chunk_size=..., pad_language_to=..., min_period=...
    )
    bundle = run(checkpoint)
    g = Golden(golden / CASE)
    assert_parity(load(bundle).infer(g.observation()).actions, g.numpy("actions")[0])
    note = next(note for note in Bundle(bundle).manifest.provenance.notes if "defaults" in note)
    assert "num_expert_layers=-1" in note
    assert "chunk_size=50" in note


@pytest.mark.parametrize("case", ["pi0-2cam", "pi05-2cam"])
def test_missing_keys_of_pi(golden, tmp_path, case):
    checkpoint = writable(golden, case, tmp_path)
    edit(
        checkpoint / "config.json",
        **dict.fromkeys(
            ("paligemma_variant", "num_inference_steps", "normalization_mapping", "max_period"), ...
        ),
    )
    g = Golden(golden / case)
    policy = load(run(checkpoint, arch=golden / case / "arch.json"))
    assert_parity(policy.infer(g.observation()).actions, g.numpy("actions")[0])


def test_unknown_keys_are_refused_and_may_be_set_aside(checkpoint):
    edit(checkpoint / "config.json", attention_window=64, seed=1)
    with pytest.raises(
        ConvertError,
        match=r"attention_window=64, seed=1 are not understood.*--set ignore=attention_window,seed",
    ):
        run(checkpoint)
    with pytest.raises(ConvertError, match=r"seed=1 .*--set ignore=attention_window,seed"):
        run(checkpoint, settings={"ignore": "attention_window"})
    for name, why in (
        ("sed", "does not exist.*seed"),
        ("chunk_size", "is read"),
        ("observation.images.none", "does not exist"),
    ):
        with pytest.raises(
            ConvertError, match=rf"--set ignore={name}: expected an unread key of .* this key {why}"
        ):
            run(checkpoint, settings={"ignore": f"attention_window,seed,{name}"})
    out = run(checkpoint, settings={"ignore": "attention_window,seed"})
    assert Bundle(out).manifest.provenance.options["set ignore"] == "attention_window,seed"


def test_an_input_that_nobody_reads_is_refused_by_name(checkpoint):
    """A policy that was trained on an environment's state acts without it; LeRobot's readers drop it in silence."""
    config = json.loads((checkpoint / "config.json").read_text())
    features = config["input_features"]
    name = "observation.environment_state"
    edit(checkpoint / "config.json", input_features={**features, name: {"type": "ENV", "shape": [7]}})
    with pytest.raises(
        ConvertError,
        match=rf"input_features\.{name}: expected type STATE, .*, got ENV; .*--set ignore={name}",
    ):
        run(checkpoint)
    assert Bundle(run(checkpoint, settings={"ignore": name})).manifest.spec.state.dim
    prompt = {"observation.language": {"type": "LANGUAGE", "shape": [48]}}
    edit(checkpoint / "config.json", input_features={**features, **prompt})
    assert Bundle(run(checkpoint)).manifest.spec.state.dim


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"use_visual_memory": True},
            "memory_temporal_attention_every: expected a whole number from 1 to 2, got 4",
        ),
        ({"use_proprioceptive_memory": True, "memory_temporal_attention_every": 2}, "proprio_history_proj"),
        ({"n_action_steps": 51}, "n_action_steps: expected a whole number from 1 to 50, got 51"),
        ({"empty_cameras": -1}, "empty_cameras: expected a whole number from 0 to 16"),
    ],
)
def test_what_does_not_fit_is_refused(golden, tmp_path, change, message):
    checkpoint = writable(golden, "pi05-2cam", tmp_path)
    edit(checkpoint / "config.json", **change)
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, arch=golden / "pi05-2cam" / "arch.json")


def test_rows_that_upstream_executes_are_carried(checkpoint):
    edit(checkpoint / "config.json", n_action_steps=8)
    assert Bundle(run(checkpoint)).manifest.spec.n_action_steps == 8


# ----------------------------------------------------------------------------- folders


def test_training_folders_resolve_and_name_the_policy(checkpoint, tmp_path):
    run_folder = tmp_path / "outputs" / "train" / "so101_pick"
    for step in ("000900", "020000"):
        (run_folder / "checkpoints" / step).mkdir(parents=True)
    model = run_folder / "checkpoints" / "020000" / "pretrained_model"
    shutil.move(checkpoint, model)
    (run_folder / "checkpoints" / "last").symlink_to("020000")
    shutil.move(tmp_path / "vlm", tmp_path / "base")
    for source in (run_folder, run_folder / "checkpoints", run_folder / "checkpoints" / "last", model):
        out = convert(source, tmp_path / "out.gguf", vlm=tmp_path / "base")
        assert Bundle(out).manifest.name == "so101_pick"
    (run_folder / "checkpoints" / "last").unlink()
    (model / "train_config.json").write_text(json.dumps({"job_name": "pick_v2"}))
    assert Bundle(convert(run_folder, out, vlm=tmp_path / "base")).manifest.name == "pick_v2"
    record = {"job_name": "pick_v2", "policy": {"repo_id": "me/pick-cube"}}
    (model / "train_config.json").write_text(json.dumps(record))
    assert Bundle(convert(run_folder, out, vlm=tmp_path / "base")).manifest.name == "pick-cube"
    shutil.rmtree(run_folder / "checkpoints" / "020000")
    with pytest.raises(ConvertError, match="a training folder without a checkpoint"):
        convert(run_folder, out)


def test_a_weights_file_asks_for_its_directory(checkpoint):
    with pytest.raises(ConvertError, match="expected a checkpoint folder or a GGUF file of vla.cpp"):
        convert(checkpoint / "model.safetensors", checkpoint.parent / "out.gguf")


@pytest.fixture
def dataset(tmp_path) -> Path:
    motors = [f"joint{i}.pos" for i in range(6)]
    features = {
        "action": {"dtype": "float32", "shape": [6], "names": {"motors": motors}},
        "observation.state": {"dtype": "float32", "shape": [6], "names": motors},
        "observation.images.front": {"dtype": "video", "names": ["height", "width", "channels"]},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    }
    folder = tmp_path / "dataset"
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps({"fps": 30, "features": features}))
    vector = {"mean": [0.5] * 6, "std": [2.0] * 6}
    (folder / "meta" / "stats.json").write_text(json.dumps({"action": vector, "observation.state": vector}))
    return folder


def test_a_data_set_gives_names_rate_and_missing_statistics(checkpoint, dataset):
    manifest = Bundle(run(checkpoint, dataset=dataset)).manifest
    assert manifest.spec.control_hz == 30
    assert manifest.spec.state.names == manifest.spec.action.names == tuple(f"joint{i}.pos" for i in range(6))
    assert manifest.processing.action.stats["std"] != (2.0,) * 6  # the checkpoint's own win
    assert Bundle(run(checkpoint, dataset=dataset, control_hz=50.0)).manifest.spec.control_hz == 50
    for path in checkpoint.glob("policy_*"):
        path.unlink()
    manifest = Bundle(run(checkpoint, dataset=dataset)).manifest
    assert manifest.processing.action.stats["std"] == (2.0,) * 6
    assert any("those of --dataset" in note for note in manifest.provenance.notes)
    assert {"meta/info.json", "meta/stats.json"} <= {source.name for source in manifest.provenance.sources}


def test_a_data_set_says_what_its_cameras_and_joints_looked_like(checkpoint, dataset):
    assert (
        Bundle(run(checkpoint, dataset=dataset)).manifest.seen is None
    )  # its table has neither range nor cameras
    stats = dataset / "meta" / "stats.json"
    table = json.loads(stats.read_text())
    camera = Bundle(run(checkpoint)).manifest.spec.cameras[0].name
    table["observation.state"] |= {"min": [-3.0] * 6, "max": [4.0] * 6, "count": [70]}
    pixels = {"mean": [[[0.5]], [[0.4]], [[0.2]]], "std": [[[0.1]]] * 3}
    stats.write_text(
        json.dumps({**table, f"observation.images.{camera}": pixels, "observation.images.side": pixels})
    )
    seen = Bundle(run(checkpoint, dataset=dataset)).manifest.seen
    assert (seen.frames, list(seen.cameras), seen.state.low) == (70, [camera], (-3.0,) * 6)
    assert seen.cameras[camera].mean == pytest.approx((127.5, 102.0, 51.0))
    assert not seen.cameras[camera].thumbnail
    out = checkpoint.parent / "named.gguf"
    assert (
        main(["convert", str(checkpoint), str(out), "--dataset", str(dataset), "--rename", f"eye={camera}"])
        == 0
    )
    assert list(Bundle(out).manifest.seen.cameras) == ["eye"]
    for broken in ({"mean": [0.5], "std": [0.1]}, {"mean": [7.0] * 3, "std": [0.1] * 3}, {"mean": [0.5] * 3}):
        stats.write_text(json.dumps({f"observation.images.{camera}": broken}))
        manifest = Bundle(run(checkpoint, dataset=dataset)).manifest
        assert manifest.seen is None
        assert any("was not stored" in note and "stats.json: " in note for note in manifest.provenance.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fps": 0}, "fps: expected frames per second"),
        ({"fps": "30"}, "fps: expected frames per second"),
        ({"features": []}, "expected a table of features"),
        ({"features": {"action": {"names": ["a"]}}}, "expected 6 names for 'action', got 1"),
    ],
)
def test_data_sets_that_do_not_fit(checkpoint, dataset, change, message):
    edit(dataset / "meta" / "info.json", **change)
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, dataset=dataset)
