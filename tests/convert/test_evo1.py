"""Evo-1 checkpoints: what the files decide, and wrong checkpoints, which each get a line that says what to give."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sinew_client.typed_names import UntypedNameError

from sinew.bundle import Bundle
from sinew.convert import ConvertOptions, convert, read
from sinew.core import ConvertError, ObservationError
from sinew.processing import Processor
from tests.convert.test_groot import edit
from tests.golden import Golden
from tests.models.test_evo1_parity import observation

WEIGHTS = "mp_rank_00_model_states.pt"
KEY = "franka_ee_pose_delta/libero_10_no_noops_lerobot"
OPTIONS: dict[str, dict[str, Any]] = {"evo1": {}, "evo1-mint": {"stats_key": KEY}}


@pytest.fixture
def source(golden, tmp_path, request) -> Path:
    """A copy of a golden checkpoint, to be damaged."""
    return Path(shutil.copytree(golden / request.param / "checkpoint", tmp_path / "checkpoint"))


def converted(golden: Path, path: Path, case: str, **options) -> Bundle:
    given = {"vlm": golden / case / "vlm", **OPTIONS[case], **options}
    return Bundle(convert(path, path.parent / "policy.gguf", **given))


def evo1(*cases: str):
    return pytest.mark.parametrize("source", cases, indirect=True)


def rewrite(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# ----------------------------------------------------------------------------- what the files decide


@evo1("evo1")
def test_weights_of_a_category_and_a_gripper(golden, source):
    """The head's weights may be kept per category, [categories, in, out], and the gripper may be made binary."""
    file = source / "model.safetensors"

    def per_category(tensors):
        for name in [name for name in tensors if ".linear." in name]:
            value = tensors.pop(name)
            value = value.T if value.ndim == 2 else value
            tensors[name.replace(".linear.", ".")] = torch.stack([value * 0, value + 1, value]).contiguous()

    rewrite(file, per_category)
    gripper = {"binarize_gripper": True, "gripper_index": 2, "gripper_threshold": 0.25}
    edit(source / "config.json", lambda c: c.update(num_categories=3, default_embodiment_id=2, **gripper))
    bundle, plain = converted(golden, source, "evo1"), golden / "evo1"
    same = Bundle(convert(plain / "checkpoint", source.parent / "plain.gguf", vlm=plain / "vlm"))
    for name in same.infos:
        assert torch.equal(bundle.tensors()[name], same.tensors()[name]), name
    g = Golden(plain)
    processor = Processor(bundle.manifest)
    actions = processor.actions(g.numpy("chunk_normalized")[0], observation(g))
    expected = g.numpy("actions")[0].copy()
    expected[:, 2] = np.where(expected[:, 2] > 0.25, -1, 1)
    np.testing.assert_allclose(actions, expected, atol=1e-6)
    other = read(source, ConvertOptions(vlm=plain / "vlm", embodiment="1"))
    assert other.spec.embodiment == "1"
    with pytest.raises(ConvertError, match="--embodiment 3: expected the number of a category, 0 to 2"):
        read(source, ConvertOptions(vlm=plain / "vlm", embodiment="3"))


@evo1("evo1-mint")
def test_statistics_of_the_original_layout(golden, source):
    """Arm and dataset, or the arm alone; three kinds of statistics; robots that pad their states."""
    table = json.loads((source / "norm_stats.json").read_text())["franka_ee_pose_delta"]
    flat = {"franka": table["libero_10_no_noops_lerobot"]}
    (source / "norm_stats.json").write_text(json.dumps(flat))
    vlm = golden / "evo1-mint" / "vlm"
    expected = {"bounds": ("min", "max"), "bounds_q99": ("q01", "q99"), "normal": ("mean", "std")}
    stats = flat["franka"]["observation.state"]
    state = np.full(8, 0.3, np.float32)
    for kind, (first, second) in expected.items():
        edit(source / "config.json", lambda c, kind=kind: c.update(normalization_type=kind))
        conversion = read(source, ConvertOptions(vlm=vlm, settings={"state_dim": "24"}))
        assert conversion.spec.embodiment == "franka"
        assert (conversion.spec.state.dim, conversion.spec.action.dim) == (24, 7)
        low, high = (np.pad(np.asarray(stats[name], np.float32), (0, 16)) for name in (first, second))
        padded = np.pad(state, (0, 16))
        if kind == "normal":
            wanted = (padded - low) / (high + np.float32(1e-8))
        else:
            wanted = np.clip(2 * (padded - low) / (high - low + np.float32(1e-8)) - 1, -1, 1)
            assert wanted[8:].tolist() == [-1.0] * 16  # what the server makes of zeros that clients add
        from sinew.processing.normalize import Normalizer

        found = Normalizer(conversion.processing.state, 24, "state").normalize(padded)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@evo1("evo1-mint")
def test_a_state_dict_of_bfloat16_keeps_its_rounded_tables(golden, source):
    """Upstream loads the tables of sines from the file, so a rounded file computes with rounded sines."""
    record = torch.load(source / WEIGHTS, weights_only=True)
    record["module"] = {name: value.bfloat16() for name, value in record["module"].items()}
    torch.save({**record, "ds_config": {"train_batch_size": 8}, "mp_world_size": 1}, source / WEIGHTS)
    found = converted(golden, source, "evo1-mint").tensors()["head.time_embedding.weight"]
    assert torch.equal(found.float(), record["module"]["action_head.time_pos_enc.pe"][0].float())


def test_which_views_may_stay_away(golden, evo1_bundle):
    for case, least in (("evo1", 1), ("evo1-mint", 1)):
        processor, g = Processor(Bundle(evo1_bundle(case)).manifest), Golden(golden / case)
        seen = observation(g)
        frames = list(seen.images.items())
        processor.check(observation(g, images=dict(frames[:least])))
        with pytest.raises(ObservationError, match="images: expected at least one"):
            processor.check(observation(g, images={}))
        with pytest.raises(ObservationError, match=r"prompt: expected \d+ image tokens"):
            processor.check(observation(g, prompt="pick <IMG_CONTEXT> up"))


# ----------------------------------------------------------------------------- wrong checkpoints


def config(**changes):
    return lambda path: edit(path / "config.json", lambda record: record.update(changes))


def without(name: str):
    return lambda path: (path / name).unlink()


def truncated(name: str):
    def cut(path: Path) -> None:
        os.truncate(path / name, (path / name).stat().st_size * 2 // 3)

    return cut


def no_statistics(path: Path) -> None:
    for file in path.glob("policy_*processor.safetensors"):
        rewrite(
            file, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.endswith(("min", "max"))]
        )


def without_tensor(name: str):
    return lambda path: rewrite(path / "model.safetensors", lambda tensors: tensors.pop(name))


def adapters_alone(path: Path) -> None:
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 4)}, path / "model.safetensors")


WRONG = [
    ("evo1", config(image_resolution=[84, 96]), {}, "image_resolution: expected a square"),
    (
        "evo1",
        config(image_resolution=[448, 448]),
        {},
        "image_size: expected 448, .*, got .*84.*Pass the checkpoint's model with --vlm",
    ),
    ("evo1", config(return_cls_only=True), {}, "return_cls_only=true is not supported"),
    ("evo1", config(max_views=1), {}, "max_views: expected at least 2"),
    ("evo1", config(num_layers=4), {}, "head.layers.3.* is missing"),
    ("evo1", config(vlm_num_layers=4), {}, "language.layers.3.* is missing"),
    ("evo1", config(embed_dim=50), {}, "head_size: expected 60, the width of the language model"),
    ("evo1", config(new_field=1), {}, "new_field=1 is not understood"),
    (
        "evo1",
        config(binarize_gripper=True, gripper_index=7),
        {},
        "gripper_index: expected a whole number from 0 to 6",
    ),
    (
        "evo1",
        config(num_categories=2, embodiment_id_field="arm"),
        {},
        "pass the category of the robot with --embodiment N",
    ),
    ("evo1", no_statistics, {}, "no statistics .*--stats FILE"),
    ("evo1", truncated("model.safetensors"), {}, "model.safetensors"),
    ("evo1", adapters_alone, {}, "lora_A.weight', a LoRA adapter that is not merged"),
    ("evo1", without_tensor("model.action_head.norm_out.bias"), {}, "head.norm.bias is missing"),
    ("evo1", lambda _: None, {"cameras": ("a",)}, "--cameras: .* LeRobot layout"),
    (
        "evo1",
        lambda _: None,
        {"settings": {"masked_rows": "zero"}},
        "masked_rows: omit this option for LeRobot's layout",
    ),
    ("evo1", lambda _: None, {"base": Path()}, "--base: .*supported options: --vlm"),
    ("evo1-mint", without("norm_stats.json"), {}, "norm_stats.json is missing.*--stats FILE"),
    ("evo1-mint", without(WEIGHTS), {}, f"file of weights {WEIGHTS} is missing"),
    ("evo1-mint", truncated(WEIGHTS), {}, "not a zip archive"),
    (
        "evo1-mint",
        lambda _: None,
        {"stats_key": ""},
        "expected --stats-key with one of: franka.*/other_dataset",
    ),
    ("evo1-mint", lambda _: None, {"stats_key": "a/b"}, "--stats-key a/b: expected --stats-key with one of"),
    ("evo1-mint", config(action_horizon=9), {}, "action_horizon: expected 12, got 9"),
    ("evo1-mint", config(normalization_type="odd"), {}, "normalization_type: expected one of normal, bounds"),
    ("evo1-mint", config(state_hidden_dim=35), {}, "state_encoder.fc1.* has shape"),
    ("evo1-mint", lambda _: None, {"cameras": tuple("abcd")}, "--cameras: expected at most 3"),
    ("evo1-mint", lambda _: None, {"settings": {"state_dim": "7"}}, "state_dim=7: expected at least 8"),
    ("evo1-mint", lambda _: None, {"dataset": Path("a")}, "--dataset: .* original layout"),
]


@pytest.mark.parametrize(("source", "damage", "options", "message"), WRONG, indirect=["source"])
def test_wrong_checkpoints_say_what_to_give(golden, source, damage, options, message, request):
    case = request.node.callspec.params["source"]
    damage(source)
    with pytest.raises(ConvertError, match=message) as caught:
        converted(golden, source, case, **options)
    assert "\n" not in str(caught.value)
    assert not (source.parent / "policy.gguf").exists()


@evo1("evo1")
def test_the_neighbours_files(golden, source):
    """Another model behind --vlm, and weights of the other layout under this configuration."""
    with pytest.raises(ConvertError, match="text_config|llm_config|vision_config"):
        converted(golden, source, "evo1", vlm=golden / "groot-n15" / "eagle")
    with pytest.raises(UntypedNameError, match="add: --vlm"):
        read(source, ConvertOptions())
    shutil.copyfile(golden / "groot-n15" / "checkpoint" / "model.safetensors", source / "model.safetensors")
    with pytest.raises(ConvertError, match="is missing"):
        converted(golden, source, "evo1")


class Hostile:
    """Runs a program where it is unpickled without care."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@evo1("evo1-mint")
@pytest.mark.parametrize("form", ["zip", "plain", "beside"])
def test_pickles_that_run_programs_are_refused(golden, source, tmp_path, form):
    mark, file = tmp_path / "ran", source / WEIGHTS
    if form == "plain":
        file.write_bytes(pickle.dumps({"module": Hostile(mark)}))
    elif form == "beside":  # with all the weights in their places
        torch.save({**torch.load(file, weights_only=True), "optimizer": Hostile(mark)}, file)
    else:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", pickle.dumps({"module": Hostile(mark)}, 2))
            archive.writestr("archive/version", "3\n")
    with pytest.raises(ConvertError, match=WEIGHTS) as caught:
        converted(golden, source, "evo1-mint")
    assert "\n" not in str(caught.value)
    assert not mark.exists()
