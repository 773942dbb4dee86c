"""Converting: every layout a user may hold, and every way in which a checkpoint may be wrong."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sinew_client.typed_names import UntypedNameError

from sinew.bundle import Bundle
from sinew.cli import main
from sinew.convert import convert
from sinew.convert.sources import resolve
from sinew.core import ConvertError, Observation, ObservationError
from sinew.families.smolvla.convert import expert_intermediate_size
from sinew.policy import load
from tests.convert.vlacpp_file import write_vlacpp
from tests.engines import run_one
from tests.golden import Golden, assert_parity, relative_l2

CASE = "smolvla-2cam"


@pytest.fixture
def checkpoint(golden, tmp_path) -> Path:
    """A writable copy of a golden case: ``checkpoint/`` and ``vlm/``."""
    shutil.copytree(golden / CASE, tmp_path / CASE, copy_function=shutil.copy)
    for path in (tmp_path / CASE).rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (tmp_path / CASE).chmod(0o755)
    return tmp_path / CASE / "checkpoint"


def edit(path: Path, **changes) -> None:
    record = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in record.items() if v is not None}))


def edit_tensors(path: Path, drop: str = "", **added: torch.Tensor) -> None:
    tensors = {name: t for name, t in load_file(path).items() if name != drop}
    save_file(tensors | added, path)


def run(checkpoint: Path, **options):
    return convert(checkpoint, checkpoint.parent / "out.gguf", **options)


def infer(bundle: Path, golden: Path, case: str = CASE) -> np.ndarray:
    return load(bundle, dtype="float32", engine="eager").infer(Golden(golden / case).observation()).actions


# ----------------------------------------------------------------------------- layouts


def test_vlm_directory_beside_the_checkpoint_is_found(checkpoint, golden):
    assert_parity(infer(run(checkpoint), golden), Golden(golden / CASE).numpy("actions")[0])


def test_older_layout_with_statistics_as_buffers(checkpoint, golden):
    for path in checkpoint.glob("policy_*"):
        path.unlink()
    shutil.rmtree(checkpoint / "tokenizer")  # those checkpoints came without a tokenizer of their own
    g = Golden(golden / CASE)
    edit_tensors(
        checkpoint / "model.safetensors",
        **{
            "normalize_inputs.buffer_observation_state.mean": g["stats.observation.state.mean"],
            "normalize_inputs.buffer_observation_state.std": g["stats.observation.state.std"],
            "normalize_targets.buffer_action.mean": g["stats.action.mean"].clone(),
            "normalize_targets.buffer_action.std": g["stats.action.std"].clone(),
            "unnormalize_outputs.buffer_action.mean": g["stats.action.mean"].clone(),
            "unnormalize_outputs.buffer_action.std": g["stats.action.std"].clone(),
        },
    )
    assert_parity(infer(run(checkpoint), golden), g.numpy("actions")[0])


def test_statistics_from_a_data_set(checkpoint, golden):
    for path in checkpoint.glob("policy_*"):
        path.unlink()
    g = Golden(golden / CASE)
    stats = {
        feature: {stat: g[f"stats.{feature}.{stat}"].tolist() for stat in ("mean", "std")}
        for feature in ("observation.state", "action")
    }
    file = checkpoint.parent / "stats.json"
    file.write_text(json.dumps(stats | {"observation.images.camera1": {"mean": [[[0.5]]]}}))
    assert_parity(infer(run(checkpoint, stats=file), golden), g.numpy("actions")[0])


def test_sharded_weights(checkpoint, golden):
    single = checkpoint / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, checkpoint / file)
    weight_map = {name: file for file, members in shards.items() for name in members}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    bundle = run(checkpoint)
    names = {s.name for s in Bundle(bundle).manifest.provenance.sources}
    assert names >= {f"checkpoint/{shard}" for shard in shards}
    assert_parity(infer(bundle, golden), Golden(golden / CASE).numpy("actions")[0])


def test_tokenizer_and_arch_files_replace_the_vlm_directory(checkpoint, golden):
    (checkpoint.parent / "vlm").rename(checkpoint.parent / "elsewhere")
    vlm = checkpoint.parent / "elsewhere"
    shutil.rmtree(checkpoint / "tokenizer")
    for tokenizer in (vlm, vlm / "tokenizer.json"):
        bundle = run(checkpoint, arch=vlm / "config.json", tokenizer=tokenizer)
        assert_parity(infer(bundle, golden), Golden(golden / CASE).numpy("actions")[0])


def test_image_special_tokens_are_embedded_around_each_view(checkpoint, golden):
    """The flag changes the prefix by three rows of the token table per view, unscaled."""
    edit(checkpoint / "config.json", add_image_special_tokens=True)
    policy = load(run(checkpoint), engine="eager")
    model, table = policy.engine.model, policy.engine.model.language.embed_tokens.weight
    assert (model.config.image_start_tokens, model.config.image_end_tokens) == ((301, 300), (301,))
    g = Golden(golden / CASE)
    image_tokens = torch.stack([g[f"image_tokens.{camera}"][0] for camera in g.cameras])[None]
    state = torch.zeros(1, policy.padded_state_dim)
    mask = torch.tensor([[True, False]])
    x, valid, _ = model.embed_prefix(image_tokens, mask, g["lang_tokens"], g["lang_mask"], state)
    n = image_tokens.shape[2]
    for view in range(2):
        block = x[0, view * (n + 3) : (view + 1) * (n + 3)]
        assert torch.equal(block[[0, 1, -1]], table[[301, 300, 301]])
        assert torch.equal(block[2:-1], image_tokens[0, view] * model.config.language.hidden_size**0.5)
        seen = valid[0, view * (n + 3) : (view + 1) * (n + 3)].tolist()
        assert seen == [True, True, *[view == 0] * n, True]


def test_empty_cameras_do_not_change_the_actions(checkpoint, golden):
    """Upstream encodes a padding slot and masks it; nothing that is read can depend on it."""
    features = json.loads((checkpoint / "config.json").read_text())["input_features"]
    features["observation.images.empty_camera_0"] = {"type": "VISUAL", "shape": [3, 480, 640]}
    edit(checkpoint / "config.json", empty_cameras=1, input_features=features)
    policy = load(run(checkpoint), engine="eager")
    assert [c.name for c in policy.spec.cameras] == ["camera1", "camera2"]
    g = Golden(golden / CASE)
    observation = Observation.from_mapping(g.observation())
    inputs = policy.processor.inputs(observation, padded=True)
    assert inputs.camera_mask.tolist() == [True, True, False]
    assert (inputs.pixels[2] == -1).all()
    chunk, _ = run_one(policy.engine, inputs, observation.noise, policy.spec.solver_steps)
    assert_parity(policy.processor.actions(chunk, observation), g.numpy("actions")[0])
    assert_parity(policy.infer(observation).actions, g.numpy("actions")[0])


def test_one_camera_may_be_missing_where_that_is_allowed(checkpoint, golden):
    policy = load(run(checkpoint), engine="eager", allow_missing_cameras=True)
    observation = Golden(golden / CASE).observation()
    both = policy.infer(observation).actions
    del observation["images"]["camera2"]
    assert not np.allclose(policy.infer(observation).actions, both, atol=1e-3)


def test_a_policy_that_does_not_resize_takes_one_size_only(checkpoint, golden):
    config = json.loads((checkpoint / "config.json").read_text()) | {"resize_imgs_with_padding": None}
    (checkpoint / "config.json").write_text(json.dumps(config))
    policy = load(run(checkpoint), engine="eager")
    assert not policy.spec.resizes_frames
    assert {(c.height, c.width) for c in policy.spec.cameras} == {(128, 128)}
    policy.warm_up()
    with pytest.raises(ObservationError, match="images.camera1: expected exactly 128 x 128, got 480 x 640"):
        policy.infer(Golden(golden / CASE).observation())


def test_identity_normalisation(checkpoint, golden):
    identity = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"}
    for path in checkpoint.glob("policy_*"):
        path.unlink()
    edit(checkpoint / "config.json", normalization_mapping=identity)
    g = Golden(golden / CASE)
    policy = load(run(checkpoint), engine="eager")
    observation = g.observation() | {"state": g.numpy("state_normalized")[0]}
    assert_parity(policy.infer(observation).actions, g.numpy("chunk_normalized")[0])


# ----------------------------------------------------------------------------- vla.cpp


@pytest.mark.parametrize("case", ["smolvla-2cam", "smolvla-bf16-vlm"])
def test_vlacpp_files_import(golden, tmp_path, case):
    file = write_vlacpp(golden / case, tmp_path / "theirs.gguf")
    bundle = convert(
        file, tmp_path / "ours.gguf", tokenizer=golden / case / "vlm", cameras=("camera1", "camera2")
    )
    g = Golden(golden / case)
    if case == "smolvla-2cam":
        assert_parity(infer(bundle, golden, case), g.numpy("actions")[0])
    for dtype in ("float32", "native"):
        actions = torch.from_numpy(load(bundle, dtype=dtype, engine="eager").infer(g.observation()).actions)
        assert relative_l2(actions, g["actions"][0]) <= 3e-3
    notes = Bundle(bundle).manifest.provenance.notes
    assert any("camera1, camera2" in note for note in notes)


def test_vlacpp_import_needs_a_tokenizer(golden, tmp_path):
    file = write_vlacpp(golden / CASE, tmp_path / "theirs.gguf")
    with pytest.raises(ConvertError, match="--tokenizer FILE_OR_DIR"):
        convert(file, tmp_path / "ours.gguf")


def test_a_bundle_is_not_imported_again(smolvla_bundle, tmp_path):
    with pytest.raises(ConvertError, match="expected a checkpoint or a bundle before format"):
        convert(smolvla_bundle(CASE), tmp_path / "again.gguf")


# ----------------------------------------------------------------------------- errors


def test_bad_checkpoints_say_what_is_wrong(checkpoint):
    config = checkpoint / "config.json"
    original = config.read_text()
    cases = {
        'type \'tdmpc\' is not one of .*the page "Supported policies".*the page "Add a model"': {
            "type": "tdmpc"
        },
        "adapt_to_pi_aloha=true is not supported": {"adapt_to_pi_aloha": True},
        "input_features names no camera": {
            "input_features": {"observation.state": {"type": "STATE", "shape": [6]}}
        },
        "language.num_layers: expected a multiple of 3, the number of expert layers": {
            "num_expert_layers": 3
        },
        "does not fit its config": {"max_state_dim": 16},
        "input_features is not a feature table": {"input_features": [1, 2]},
        "expected multiples of the patch size 16": {"resize_imgs_with_padding": [100, 100]},
        "chunk_size: expected a whole number from 1": {"chunk_size": "50"},
        r"input_features.*camera1: expected sizes up to": {
            "input_features": {"observation.images.camera1": {"type": "VISUAL", "shape": [3, 1 << 31, 640]}}
        },
        "min_period, max_period: expected 0 < min_period < max_period": {"min_period": 5.0},
    }
    for message, change in cases.items():
        edit(config, **change)
        with pytest.raises(ConvertError, match=message):
            run(checkpoint)
        config.write_text(original)
    config.write_text("{")
    with pytest.raises(ConvertError, match="expected JSON, got text that is not JSON"):
        run(checkpoint)
    config.unlink()
    with pytest.raises(ConvertError, match=r"a folder with config\.json, got a folder without config\.json$"):
        run(checkpoint)


def test_what_a_copy_left_out_is_named_with_the_file_that_names_it(checkpoint, tmp_path, capsys):
    """It was "No such file or directory", of a file that nobody had heard of."""

    def said(source: Path) -> str:

        assert main(list(map(str, ["convert", source, tmp_path / "x.gguf", "--vlm", vlm]))) == 1
        return capsys.readouterr().err.splitlines()[-1]

    run_folder = tmp_path / "my outputs" / "train" / "pick cube"
    step = run_folder / "checkpoints" / "000100"
    step.mkdir(parents=True)
    vlm = checkpoint.parent / "vlm"
    checkpoint.rename(step / "pretrained_model")
    (step / "training_state").mkdir()
    for folder, found in ((tmp_path / "my outputs", run_folder), (step / "training_state", step)):
        assert said(folder).endswith(
            f"got a folder without config.json; training runs in folders near it: {found}; pass one of these folders"
        )
    (stored,) = step.glob("*/policy_preprocessor_step_*_normalizer_processor.safetensors")
    stored.unlink()
    words = f"policy_preprocessor.json: names {stored.name}, which the folder lacks; copy that file into"
    assert said(run_folder).endswith(f"{words} {stored.parent}")
    weights = step / "pretrained_model" / "model.safetensors"
    weights.unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    weights.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    words = "model.safetensors.index.json: names model-1.safetensors, model-2.safetensors, which the folder does not"
    assert words in said(run_folder)


def test_tensors_that_do_not_fit_are_named_as_upstream_names_them(checkpoint):
    weights, original = checkpoint / "model.safetensors", (checkpoint / "model.safetensors").read_bytes()
    edit_tensors(weights, drop="model.state_proj.bias")
    with pytest.raises(ConvertError, match=r"state_proj.bias is missing"):
        run(checkpoint)
    weights.write_bytes(original)
    edit_tensors(weights, **{"model.surprise.weight": torch.zeros(2)})
    with pytest.raises(ConvertError, match=r"model.surprise.weight is not a part of the model"):
        run(checkpoint)
    weights.write_bytes(original)
    edit_tensors(weights, **{"model.state_proj.bias": torch.zeros(7)})
    with pytest.raises(ConvertError, match=r"model.state_proj.bias has shape \[7\], expected \[96\]"):
        run(checkpoint)


def test_damaged_safetensors(checkpoint):
    weights, original = checkpoint / "model.safetensors", (checkpoint / "model.safetensors").read_bytes()
    for data in (
        b"",
        original[:7],
        original[:5000],
        original[:-1],
        b"\xff" * 64,
        b"\x02" + bytes(7) + b"[]" * 9,
    ):
        weights.write_bytes(data)
        with pytest.raises(ConvertError, match=r"model.safetensors"):
            run(checkpoint)
    assert not (checkpoint.parent / "out.gguf").exists()


def test_missing_statistics_tokenizer_and_vlm_say_what_to_give(checkpoint):
    pipelines = [checkpoint / f"policy_{each}processor.json" for each in ("pre", "post")]
    texts = [each.read_text() for each in pipelines]
    for each in pipelines:
        each.unlink()
    with pytest.raises(ConvertError, match=r"no statistics .* for 'observation.state'.*--stats FILE"):
        run(checkpoint)
    for each, text in zip(pipelines, texts, strict=True):
        each.write_text(text)
    (checkpoint.parent / "vlm").rename(checkpoint.parent / "elsewhere")
    with pytest.raises(UntypedNameError, match="model vlm.* add: --vlm vlm"):
        run(checkpoint)
    shutil.rmtree(checkpoint / "tokenizer")
    with pytest.raises(ConvertError, match=r"no tokenizer.json found.*--tokenizer FILE_OR_DIR"):
        run(checkpoint, arch=checkpoint.parent / "elsewhere" / "config.json")
    broken = checkpoint.parent / "tokenizer.model"
    broken.write_bytes(b"\x0a\x07")
    with pytest.raises(ConvertError, match="not a SentencePiece model"):
        run(checkpoint, arch=checkpoint.parent / "elsewhere" / "config.json", tokenizer=broken)


def test_lora_only_checkpoint(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "adapter_model.safetensors")
    (checkpoint / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    with pytest.raises(ConvertError, match="LoRA adapter only. To merge it") as caught:
        run(checkpoint, vlm=checkpoint / "nowhere")  # before the language model is looked for
    assert "get_policy_class('smolvla').from_pretrained('someone/base')" in str(caught.value)
    (checkpoint / "config.json").unlink()
    with pytest.raises(ConvertError, match=r"get_policy_class\('TYPE'\)"):
        run(checkpoint)
    folder = checkpoint.parent / "run" / "checkpoints" / "000100"
    folder.mkdir(parents=True)
    checkpoint.rename(folder / "pretrained_model")
    for named in (folder, folder.parents[1]):
        with pytest.raises(ConvertError, match="pretrained_model contains a LoRA adapter only"):
            resolve(named)


def test_hub_names_without_the_extra_and_offline(checkpoint, monkeypatch, tmp_path):
    with pytest.raises(ConvertError, match="no such file"):
        convert(tmp_path / "nothing", tmp_path / "out.gguf")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConvertError, match=r"\[hub\]"):
        convert("someone/some_policy", tmp_path / "out.gguf")
    edit(checkpoint / "config.json", vlm_model_name="HuggingFaceTB/SmolVLM2-500M-Video-Instruct")
    with pytest.raises(
        ConvertError, match=r"'HuggingFaceTB/SmolVLM2-500M-Video-Instruct'.*--vlm DIR.*\[hub\]"
    ):
        run(checkpoint)


def test_hub_offline_gives_the_reason(monkeypatch, tmp_path):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConvertError, match=r"could not be fetched from the hub .*download the checkpoint and pass its folder"
    ):
        convert("someone/some_policy", tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("width", "expected"), [(720, 2048), (72, 256), (96, 256), (384, 1024), (97, 256), (98, 512)]
)
def test_expert_width_rule(width, expected):
    """Values of LeRobot's get_intermediate_size; 720 and 72 are also in the fixtures' tensor shapes."""
    assert expert_intermediate_size(width) == expected


def test_control_rate_is_the_users_to_say(checkpoint):
    assert Bundle(run(checkpoint)).manifest.spec.control_hz is None
    assert Bundle(run(checkpoint, control_hz=30.0)).manifest.spec.control_hz == 30
    with pytest.raises(ConvertError, match="--control-hz 0"):
        run(checkpoint, control_hz=0)


def test_cameras_get_the_names_of_the_robot(checkpoint, golden, capsys):
    out = checkpoint.parent / "renamed.gguf"
    flags = ["--vlm", str(golden / CASE / "vlm"), "--rename", "front=camera1"]
    assert main(["convert", str(checkpoint), str(out), *flags]) == 0
    assert "note: camera front is the checkpoint's camera1" in capsys.readouterr().out
    policy = load(out, engine="eager")
    assert [camera.name for camera in policy.spec.cameras] == ["front", "camera2"]
    assert "camera front is the checkpoint's camera1" in policy.manifest.provenance.notes
    g = Golden(golden / CASE)
    observation = g.observation()
    observation["images"]["front"] = observation["images"].pop("camera1")
    assert_parity(policy.infer(observation).actions, g.numpy("actions")[0])
    assert main(["convert", str(checkpoint), str(out), "--force", *flags[:2], "--rename", "front=cam1"]) == 1
    assert "did you mean 'camera1'?" in " ".join(capsys.readouterr().err.split())
