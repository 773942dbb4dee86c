"""LeRobot's fine-tunes of GR00T N1.7, written by the rules of its ``policies/groot`` from the golden checkpoint.

The fixture is a run of that code on NVIDIA's folder, whose pipelines LeRobot saves with a fine-tune: a folder of them
gives the fixture's own tokens, pixels, state and actions. Decoding by a data set's statistics is checked against
LeRobot's formula.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError
from sinew.processing import Processor
from tests.convert.test_groot import TAG, edit, observation, reference_pixels
from tests.golden import Golden

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
CAMERAS = ("exterior_image_1_left", "wrist_image_left")


def flat(statistics: dict, keys: list[str], name: str) -> torch.Tensor:
    return torch.tensor([value for key in keys for value in statistics[key][name]])


def fine_tune(golden: Path, out: Path, native: bool = True) -> Path:
    """Write a folder. native: groups are decoded with the base's statistics; else a whole vector with a data set's."""
    base = golden / "groot-n17" / "checkpoint"
    processor = json.loads((base / "processor_config.json").read_text())["processor_kwargs"]
    modality, raw = (
        processor["modality_configs"][TAG],
        json.loads((base / "statistics.json").read_text())[TAG],
    )
    keys = {what: modality[what]["modality_keys"] for what in ("state", "action")}
    features = {f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 240, 300]} for name in CAMERAS}
    out.mkdir()
    tensors = {}
    for shard in sorted(base.glob("*.safetensors")):
        tensors |= {f"_groot_model.{name}": tensor for name, tensor in load_file(shard).items()}
    table = "_groot_model.backbone.model.model.language_model.embed_tokens.weight"
    tensors["_groot_model.backbone.model.lm_head.weight"] = tensors.pop(
        table
    )  # one of the two tied names is kept
    save_file(tensors, out / "model.safetensors")
    config = {
        "type": "groot",
        "n_obs_steps": 1,
        "input_features": {**features, "observation.state": {"type": "STATE", "shape": [14]}},
        "output_features": {"action": {"type": "ACTION", "shape": [14]}},
        "chunk_size": 40,
        "n_action_steps": 40,
        "base_model_path": "nvidia/GR00T-N1.7-3B",
        "embodiment_tag": TAG,
        "action_decode_transform": None,
        "num_inference_timesteps": None,
        "use_relative_actions": False,
        "tokenizer_assets_repo": None,
    }
    (out / "config.json").write_text(json.dumps(config))
    statistics = {
        f"{feature}.{name}": flat(raw[what], keys[what], name)
        for feature, what in (("observation.state", "state"), ("action", "action"))
        for name in ("min", "max")
    }
    save_file(statistics, out / "policy_preprocessor_step_2_groot_n1_7_pack_inputs_v1.safetensors")
    groups = (
        {"raw_stats": raw, "modality_config": modality}
        if native
        else {"raw_stats": None, "modality_config": None}
    )
    geometry = (
        "image_crop_size",
        "image_target_size",
        "shortest_image_edge",
        "crop_fraction",
        "use_albumentations",
    )
    pack = {
        "state_horizon": 1,
        "action_horizon": 12,
        "valid_action_horizon": 10,
        "video_horizon": 1,
        "max_state_dim": 20,
        "max_action_dim": 22,
        "language_key": "task",
        "formalize_language": True,
        "embodiment_tag": TAG,
        "embodiment_mapping": json.loads((base / "embodiment_id.json").read_text()),
        "normalize_min_max": True,
        "state_dropout_prob": 0.0,
        "clip_outliers": True,
        "use_percentiles": False,
        "video_modality_keys": list(CAMERAS) if native else None,
        **groups,
    }
    encode = {name: processor[name] for name in (*geometry, "letter_box_transform")}
    pre = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {
            "registry_name": "groot_n1_7_pack_inputs_v1",
            "config": pack,
            "state_file": "policy_preprocessor_step_2_groot_n1_7_pack_inputs_v1.safetensors",
        },
        {
            "registry_name": "groot_n1_7_vlm_encode_v1",
            "config": {"model_name": "nvidia/Cosmos-Reason2-2B", **encode, "device": "cuda"},
        },
        {"registry_name": "device_processor", "config": {"device": "cuda", "float_dtype": None}},
    ]
    if native:
        decode = {"env_action_dim": 14, "use_percentiles": False, "use_relative_action": True, **groups}
        end = {
            "registry_name": "groot_n1_7_action_decode_v1",
            "config": {**decode, "action_decode_transform": None},
        }
    else:
        save_file(
            statistics, out / "policy_postprocessor_step_0_groot_action_unpack_unnormalize_v2.safetensors"
        )
        end = {
            "registry_name": "groot_action_unpack_unnormalize_v2",
            "config": {
                "env_action_dim": 14,
                "normalize_min_max": True,
                "clip_normalized_action": True,
                "libero_gripper_action": False,
                "libero_gripper_binarize": True,
            },
            "state_file": "policy_postprocessor_step_0_groot_action_unpack_unnormalize_v2.safetensors",
        }
    post = [end, {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}]
    (out / PRE).write_text(json.dumps({"name": "policy_preprocessor", "steps": pre}))
    (out / POST).write_text(json.dumps({"name": "policy_postprocessor", "steps": post}))
    return out


def converted(golden: Path, source: Path, **options) -> Bundle:
    home = golden / "groot-n17"
    given = {"vlm": home / "vlm", "base": home / "checkpoint", **options}
    return Bundle(convert(source, source.parent / "out.gguf", **given))


def change_step(file: Path, step: str, **values) -> None:
    def change(record: dict) -> None:
        next(s for s in record["steps"] if s["registry_name"] == step)["config"].update(values)

    edit(file, change)


@pytest.mark.slow
def test_a_fine_tune_of_the_bases_own_robot_is_the_reference(golden, groot_bundle, tmp_path):
    found = converted(golden, fine_tune(golden, tmp_path / "tuned"))
    base = Bundle(groot_bundle("groot-n17"))
    assert found.tensors().keys() == base.tensors().keys()
    for name, tensor in base.tensors().items():
        assert torch.equal(found.tensors()[name], tensor), name
    assert found.manifest.config == base.manifest.config
    assert found.manifest.provenance.format == "gr00t-n1.7-lerobot"
    assert found.manifest.spec.chunk_size == 10
    g, processor = Golden(golden / "groot-n17"), Processor(found.manifest)
    inputs = processor.inputs(observation(g))
    assert inputs.tokens.tolist() == g.numpy("input_ids")[0].tolist()
    np.testing.assert_allclose(inputs.pixels, reference_pixels(g), atol=1e-7, rtol=0)
    np.testing.assert_allclose(inputs.state, g.numpy("state_normalized")[0, 0], atol=1e-6, rtol=0)
    actions = processor.actions(g.numpy("action_pred")[0], observation(g))
    np.testing.assert_allclose(actions, g.numpy("actions")[0], atol=1e-6, rtol=0)


def test_a_data_sets_own_statistics(golden, tmp_path):
    """LeRobot's ``_min_max_norm`` and its inverse, the steps of relative actions and of LIBERO's gripper after it."""
    source = fine_tune(golden, tmp_path / "tuned", native=False)
    names = [f"joint_{i}" for i in range(13)] + ["gripper"]
    relative = {"enabled": True, "exclude_joints": ["gripper"], "action_names": names}
    edit(
        source / PRE,
        lambda r: r["steps"].insert(2, {"registry_name": "relative_actions_processor", "config": relative}),
    )
    edit(
        source / POST,
        lambda r: r["steps"].insert(
            1, {"registry_name": "absolute_actions_processor", "config": {"enabled": True}}
        ),
    )
    edit(source / "config.json", lambda r: r.update(action_decode_transform="libero", chunk_size=11))
    path = source / "policy_preprocessor_step_2_groot_n1_7_pack_inputs_v1.safetensors"
    statistics = load_file(path)
    low, high = (statistics[f"observation.state.{name}"] for name in ("min", "max"))
    high[3] = low[3]  # of a joint that never moved
    low[4], high[4] = 1.0, 1.0 + 2**-20  # of one that moved a little, which NVIDIA's code takes for none
    save_file(statistics, path)
    found = converted(golden, source)
    g, processor = Golden(golden / "groot-n17"), Processor(found.manifest)
    assert [camera.name for camera in found.manifest.spec.cameras] == sorted(CAMERAS)
    state = np.concatenate([g.numpy("state_raw")[:4], [1.0 + 2**-22], g.numpy("state_raw")[5:]]).astype(
        np.float32
    )
    low, high = low.double().numpy(), high.double().numpy()
    still = low == high
    expected = np.where(still, 0, np.clip(2 * (state - low) / np.where(still, 1, high - low) - 1, -1, 1))
    inputs = processor.inputs(observation(g, state=state))
    np.testing.assert_allclose(inputs.state[:14], expected, atol=1e-6, rtol=0)
    assert -1 < expected[4] < 0
    low, high = (statistics[f"action.{name}"].double().numpy() for name in ("min", "max"))
    predicted = g.numpy("action_pred")[0][:11, :14].astype(np.float64)
    actions = (predicted.clip(-1, 1) + 1) / 2 * (high - low) + low
    actions[:, 13] = -np.sign(2 * actions[:, 13] - 1)
    actions[:, :13] += state[:13]
    found = processor.actions(g.numpy("action_pred")[0], observation(g, state=state))
    np.testing.assert_allclose(found, actions, atol=1e-5, rtol=0)


def test_what_a_fine_tune_says_by_itself(golden, tmp_path):
    """Steps of the solver, names of cameras, an order of cameras that is the base's."""
    source = fine_tune(golden, tmp_path / "tuned")
    edit(source / "config.json", lambda record: record.update(num_inference_timesteps=7))
    change_step(source / PRE, "rename_observations_processor", rename_map={"front": CAMERAS[1]})
    change_step(source / PRE, "groot_n1_7_pack_inputs_v1", video_modality_keys=[*CAMERAS[::-1], "top"])
    manifest = converted(golden, source).manifest
    assert manifest.spec.solver_steps == 7
    assert [camera.name for camera in manifest.spec.cameras] == ["front", CAMERAS[0]]
    assert any("not used: top" in note for note in manifest.provenance.notes)


def percentiles(source: Path) -> None:
    change_step(source / POST, "groot_n1_7_action_decode_v1", use_percentiles="yes")


def other_tag(source: Path) -> None:
    edit(source / "config.json", lambda record: record.update(embodiment_tag="gr1"))


def history(source: Path) -> None:
    change_step(source / PRE, "groot_n1_7_pack_inputs_v1", video_horizon=2)


def one_name(source: Path) -> None:
    change_step(source / PRE, "groot_n1_7_pack_inputs_v1", video_modality_keys=CAMERAS[0])


def wider(source: Path) -> None:
    edit(source / "config.json", lambda record: record["output_features"]["action"].update(shape=[15]))


def no_gripper(source: Path) -> None:
    def change(record: dict) -> None:
        action = record["steps"][0]["config"]
        for part in (action["modality_config"]["action"]["modality_keys"], action["raw_stats"]["action"]):
            if isinstance(part, list):
                part[part.index("gripper")] = "hand"
            else:
                part["hand"] = part.pop("gripper")

    edit(source / POST, change)
    edit(source / "config.json", lambda record: record.update(action_decode_transform="libero"))


@pytest.mark.parametrize(
    ("break_it", "options", "message"),
    [
        (None, {"base": None}, "'nvidia/GR00T-N1.7-3B'.*--base DIR"),
        (None, {"base": "groot-n16/checkpoint"}, "expected the base model of a GR00T N1.7 fine-tune"),
        (None, {"settings": {"frames": "240x300"}}, "--set frames: a LeRobot fine-tune contains this value"),
        (
            lambda source: (source / POST).unlink(),
            {},
            "policy_postprocessor.json: this file is missing, and policy_preprocessor.json exists; copy both",
        ),
        (percentiles, {}, "use_percentiles: expected True or False, got 'yes'"),
        (other_tag, {}, "expected a robot with an id, a modality configuration and statistics, got gr1"),
        (history, {}, "video_horizon: expected None or 1, got 2"),
        (one_name, {}, "video_modality_keys: expected a list of names, got 'exterior_image_1_left'"),
        (wider, {}, "statistics of action: expected 15 values as in config.json, got 14"),
        (no_gripper, {}, "expected one group 'gripper' with one value, got 0"),
    ],
)
def test_what_is_not_understood_is_refused(golden, tmp_path, break_it, options, message):
    source = fine_tune(golden, tmp_path / "tuned")
    if break_it:
        break_it(source)
    if options.get("base"):
        options = {"base": golden / options["base"]}
    with pytest.raises(ConvertError, match=message) as caught:
        converted(golden, source, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()
