"""X-VLA's checkpoints: what is read of them and what is refused; views, prompts and domains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError, ObservationError
from sinew.policy import Policy, load
from sinew.steps.image.letterbox import Letterbox
from tests.golden import Golden
from tests.models.stages import observation

CASES = ("xvla-ee6d", "xvla-auto")
PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Callable[[str], Path]:
    """``checkpoint(case)``: a copy that a test may spoil."""

    def make(case: str) -> Path:
        shutil.copytree(golden / case / "checkpoint", tmp_path / case, copy_function=shutil.copyfile)
        return tmp_path / case

    return make


@pytest.fixture
def ee6d(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("xvla-ee6d")


def run(
    path: Path, without: tuple[str, ...] = (), options: dict[str, Any] | None = None, **changes: Any
) -> Bundle:
    edit(path / "config.json", lambda config: config.update(changes) or [config.pop(key) for key in without])
    return Bundle(convert(path, path.parent / "out.gguf", **(options or {})))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def step(path: Path, name: str, **config: Any) -> None:
    """Change the configuration of a step before the model."""
    edit(path / PRE, lambda record: _step(record, name)["config"].update(config))


def _step(record: Any, name: str) -> Any:
    return next(each for each in record["steps"] if each["registry_name"] == name)


def nested(path: Path, part: str, **changes: Any) -> None:
    edit(path / "config.json", lambda config: config["florence_config"][part].update(changes))


def same(one: Policy, other: Policy, given: Any) -> bool:
    return np.array_equal(one.infer(given).actions, other.infer(given).actions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"action_mode": "ee7d"},
            "action_mode: expected one of ee6d, joint, agibot_ee6d, franka_joint7, auto",
        ),
        ({"action_mode": 3}, "action_mode: expected one of"),
        ({"action_mode": "joint"}, "expected 14 values for action_mode 'joint', got 20"),
        ({"action_mode": "auto", "max_action_dim": 19}, "max_action_dim: expected a whole number from 20"),
        ({"max_state_dim": 19}, "max_state_dim: expected a whole number from 20"),
        ({"use_proprio": False}, "use_proprio=false is not supported yet"),
        ({"pad_language_to": "longest"}, 'pad_language_to="longest" is not supported yet'),
        ({"tokenizer_padding_side": "left"}, 'tokenizer_padding_side="left" is not supported yet'),
        ({"domain_feature_key": "robot"}, 'domain_feature_key="robot" is not supported yet'),
        ({"num_domains": 2}, "domain_id: expected the number of a domain, 0 to 1, got 2"),
        ({"dim_time": 11}, "time_size: expected an even number, got 11"),
        ({"chunk_size": 90}, "places: expected at least 129, for actions, views and prompt, got 128"),
        ({"n_action_steps": 11}, "n_action_steps: expected a whole number from 1 to 10, got 11"),
        ({"mlp_ratio": 0}, "mlp_ratio: expected a number above 0, got 0"),
        ({"mlp_ratio": 4.0}, r"blocks.0.mlp.fc1.weight has shape"),
        ({"depth": 3}, r"layers.2\.\S+ is missing"),
        ({"depth": 1}, r"blocks.1\.\S+ is not a part of the model"),
        ({"num_heads": 5}, "hidden_size: expected a multiple of num_heads 5, got 48"),
        ({"len_soft_prompts": 7}, r"soft_prompt_hub.weight"),
        ({"len_soft_prompts": 0}, r"soft_prompt_hub.weight is not a part of the model"),
        ({"use_hetero_proj": True, "scale": 1}, "scale=1 is not understood"),
        ({"resize_imgs_with_padding": [64]}, "resize_imgs_with_padding: expected height and width, got"),
        ({"resize_imgs_with_padding": [4000, 4000]}, "text_places: expected at least 15650"),
        ({"florence_config": {}}, r"florence_config\.vision_config is missing"),
        (
            {"florence_config": {"vision_config": {}, "text_config": {}}},
            r"vision_config\.\w+ is missing",
        ),
    ],
)
def test_what_is_not_computed_is_refused(ee6d: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(ee6d, **changes)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("vision_config", {"mlp_ratio": 3}, r"vision_config\.mlp_ratio: expected 4, got 3"),
        ("vision_config", {"patch_padding": [3, 1, 1, 0]}, r"patch_padding: expected \[3, 1, 1, 1\], got"),
        ("vision_config", {"image_feature_source": ["last_frame"]}, "image_feature_source: expected"),
        ("vision_config", {"depths": [1, 1, 2]}, "expected one entry for each of the 4 stages"),
        ("vision_config", {"num_heads": [3, 2, 4, 8]}, "heads and groups that divide the width 8, got 3, 1"),
        ("vision_config", {"patch_size": [6, 3, 3, 3], "patch_padding": [3, 1, 1, 1]}, "an odd kernel"),
        ("vision_config", {"window_size": "4"}, "window_size|TypeError|'str'|cannot become a bundle"),
        ("text_config", {"activation_function": "relu"}, "activation_function: expected 'gelu', got 'relu'"),
        ("text_config", {"scale_embedding": True}, "scale_embedding: expected False, got True"),
        ("text_config", {"max_position_embeddings": 28}, "text_places: expected at least 29"),
        ("text_config", {"vocab_size": 1}, "pad_token: expected an id below 1, got 1"),
    ],
)
def test_another_florence_is_refused(ee6d: Path, part: str, changes: dict, message: str) -> None:
    nested(ee6d, part, **changes)
    with pytest.raises(ConvertError, match=message):
        run(ee6d)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: [(p / each).unlink() for each in (PRE, POST)],
            "expected the preprocessing steps, which define the policy's domain, got none",
        ),
        (lambda p: step(p, "tokenizer_processor", padding="longest"), "padding: expected 'max_length', got"),
        (lambda p: step(p, "xvla_add_domain_id", domain_id="2"), "expected the number of a domain"),
        (lambda p: step(p, "xvla_imagenet_normalize", image_keys=["a"]), "image_keys: expected None, got"),
        (lambda p: step(p, "normalizer_processor", norm_map={"VISUAL": "MEAN_STD"}), "mode IDENTITY for images"),
        (
            lambda p: edit(
                p / PRE,
                lambda r: _step(r, "xvla_image_to_float").update(registry_name="xvla_image_scale", config={}),
            ),
            "xvla_image_scale: expected the step xvla_image_to_float after it, got none",
        ),
        (
            lambda p: edit(p / PRE, lambda r: r["steps"].insert(4, r["steps"].pop(3))),
            "xvla_image_to_float.+: expected this step before xvla_imagenet_normalize, got it after",
        ),
        (lambda p: rotated(p, 0), "unnormalizer_processor.+: expected this step before xvla_rotation_6d"),
        (lambda p: (p / "tokenizer" / "tokenizer.json").unlink(), "no tokenizer.json found.+pass tokenizer's with"),
        (
            lambda p: edit(p / "tokenizer" / "tokenizer_config.json", lambda r: r.pop("pad_token")),
            "expected a padding token, which the model reads, got none",
        ),
    ],
)  # fmt: skip
def test_other_steps_are_refused(ee6d: Path, change: Callable[[Path], Any], message: str) -> None:
    change(ee6d)
    with pytest.raises(ConvertError, match=message):
        run(ee6d)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "name",
    [
        "action_encoder.fc.weight",
        "column_embeddings.weight",
        "pos_idx_to_embed",
        "embed_tokens.weight",
        "pos_emb",
    ],
)
def test_a_missing_tensor_is_named(checkpoint: Callable[[str], Path], case: str, name: str) -> None:
    path = checkpoint(case)
    kept = load_file(path / "model.safetensors")
    (gone,) = (each for each in kept if each.endswith(name))
    save_file({key: value for key, value in kept.items() if key != gone}, path / "model.safetensors")
    with pytest.raises(ConvertError, match="is missing"):
        run(path)


def test_one_table_of_tokens_under_either_name(ee6d: Path, golden: Path) -> None:
    """Files have it once, as ``shared`` or as the encoder's; of both, one is left aside."""
    given, tensors = (
        observation("xvla-ee6d", Golden(golden / "xvla-ee6d")),
        load_file(ee6d / "model.safetensors"),
    )
    wanted = load(run(ee6d).path).infer(given).actions
    (name,) = (each for each in tensors if each.endswith("embed_tokens.weight"))
    both = tensors | {"model.vlm.language_model.model.shared.weight": tensors[name].clone()}
    for change in (both, {key: value for key, value in both.items() if key != name}):
        save_file(change, ee6d / "model.safetensors")
        assert np.array_equal(load(run(ee6d).path).infer(given).actions, wanted)


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_the_references(golden: Path, case_bundle: Callable[[str], Path], case: str) -> None:
    """LeRobot resizes what is normalised; here it is the other way round, and bars have the mean's colour."""
    g, policy = Golden(golden / case), load(case_bundle(case))
    inputs = policy.processor.inputs(observation(case, g))
    wanted = g.numpy("pixel_values")[0, : len(g.cameras)]
    np.testing.assert_allclose(inputs.pixels, wanted, atol=5e-6, rtol=0)
    state = inputs.state.copy()
    state[list(policy.manifest.config["grippers"])] = (
        0.0  # the reference's are zero; ours are, where they are read
    )
    np.testing.assert_allclose(state, g.numpy("proprio")[0], atol=1e-6, rtol=0)


def test_what_a_bundle_says(ee6d: Path) -> None:
    manifest = run(ee6d).manifest
    spec, (box,) = manifest.spec, manifest.processing.image.steps
    assert isinstance(box, Letterbox)
    assert box.pad_value == manifest.processing.image.mean == (0.485, 0.456, 0.406)
    assert (spec.solver.kind, spec.solver_steps, spec.chunk_size, spec.max_prompt_tokens) == (
        "renoise",
        6,
        10,
        24,
    )
    assert any("domain 2 of 4" in note for note in manifest.provenance.notes)
    plain = ee6d / PRE
    edit(plain, lambda record: record["steps"].remove(_step(record, "xvla_imagenet_normalize")))
    assert run(ee6d).manifest.processing.image.mean == (0.0, 0.0, 0.0)
    (box,) = run(ee6d).manifest.processing.image.steps
    assert isinstance(box, Letterbox)
    assert box.pad_value == 0.0


def test_the_real_width_of_an_action_space(ee6d: Path) -> None:
    """Seven joints of a Franka among the twenty numbers that the head says."""
    features = {"action": {"type": "ACTION", "shape": [7]}}
    bundle = run(ee6d, action_mode="franka_joint7", output_features=features)
    assert (bundle.manifest.spec.action.dim, bundle.manifest.spec.noise_dim) == (7, 20)
    features = {"action": {"type": "ACTION", "shape": [12]}}
    bundle = run(ee6d, action_mode="so101_bimanual", output_features=features)
    assert bundle.manifest.config["grippers"] == [5, 11]


@pytest.mark.parametrize("case", CASES)
def test_a_domain_of_ones_own(checkpoint: Callable[[str], Path], golden: Path, case: str) -> None:
    """``--embodiment N`` is what the preprocessor would say."""
    path, given = checkpoint(case), observation(case, Golden(golden / case))
    own = load(run(path).path)
    first = load(run(path, options={"embodiment": "0"}).path)
    step(path, "xvla_add_domain_id", domain_id=0)
    assert same(load(run(path).path), first, given)
    assert not same(own, first, given)
    edit(path / PRE, lambda record: record["steps"].remove(_step(record, "xvla_add_domain_id")))
    assert same(load(run(path).path), first, given)  # LeRobot's choice where no step names one
    for wrong in ("4", "-1", "two", "²"):
        with pytest.raises(ConvertError, match=rf"--embodiment {wrong}: expected the number of a domain"):
            run(path, options={"embodiment": wrong})


def test_views_are_counted_as_lerobot_counts_them(ee6d: Path) -> None:
    """A saved policy lists its empty cameras among its features, and they are added to these again."""
    assert run(ee6d).manifest.config["views"] == 3
    assert run(ee6d, num_image_views=None).manifest.config["views"] == 2
    assert run(ee6d, num_image_views=None, empty_cameras=1).manifest.config["views"] == 3
    config = json.loads((ee6d / "config.json").read_text())
    empty = {"observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 64, 64]}}
    listed = run(ee6d, input_features=config["input_features"] | empty, num_image_views=3)
    assert listed.manifest.config["views"] == 4
    assert [camera.name for camera in listed.manifest.spec.cameras] == ["image", "image2"]


def test_a_view_that_is_missing_is_zeros_behind_the_others(
    golden: Path, case_bundle: Callable[[str], Path]
) -> None:
    """LeRobot stacks what is there: the second camera alone is the first view."""
    g = Golden(golden / "xvla-ee6d")
    given = observation("xvla-ee6d", g)
    policy = load(case_bundle("xvla-ee6d"), engine="eager", allow_missing_cameras=True)
    alone = replace(given, images={"image2": given.images["image2"]})
    moved = replace(given, images={"image": given.images["image2"]})
    assert np.array_equal(policy.infer(alone).actions, policy.infer(moved).actions)
    assert np.abs(policy.infer(alone).actions - policy.infer(given).actions).max() > 1e-3
    model: Any = policy.engine.model
    tokens = model.embed_images(g["pixel_values"][:, :2])
    mask = torch.tensor([[True, False]])
    every = model.views_of(tokens, mask)
    assert every.shape[1] == 3
    assert torch.equal(every[:, 0], tokens[:, 0])
    assert not every[:, 1:].any()
    with pytest.raises(ObservationError, match="image"):
        load(case_bundle("xvla-ee6d")).infer(alone)


def test_what_fills_a_prompt_up_is_read(golden: Path, case_bundle: Callable[[str], Path]) -> None:
    g = Golden(golden / "xvla-ee6d")
    policy = load(case_bundle("xvla-ee6d"), engine="eager")
    model: Any = policy.engine.model
    inputs = policy.processor.inputs(observation("xvla-ee6d", g))
    tokens, mask = (torch.from_numpy(np.asarray(a))[None] for a in (inputs.tokens, inputs.token_mask))
    assert torch.equal(model.filled(tokens, mask), g["lang_tokens"])
    before = policy.infer(observation("xvla-ee6d", g)).actions
    model.language.embed_tokens.weight.data[model.config.pad_token, ::2] += 1.0
    assert np.abs(policy.infer(observation("xvla-ee6d", g)).actions - before).max() > 1e-3


def test_grippers_are_not_read_and_are_between_0_and_1(
    golden: Path, case_bundle: Callable[[str], Path]
) -> None:
    g = Golden(golden / "xvla-ee6d")
    policy, given = load(case_bundle("xvla-ee6d")), observation("xvla-ee6d", g)
    state = given.state.copy()
    state[[9, 19]] += 5.0
    actions = policy.infer(given).actions
    assert np.array_equal(policy.infer(replace(given, state=state)).actions, actions)
    assert ((actions[:, [9, 19]] > 0) & (actions[:, [9, 19]] < 1)).all()


ROTATE = {"registry_name": "xvla_rotation_6d_to_axis_angle", "config": {"expected_action_dim": 10}}


def rotated(path: Path, at: int = 1) -> None:
    edit(path / "policy_postprocessor.json", lambda record: record["steps"].insert(at, ROTATE))


def test_a_pose_with_a_rotation_vector(ee6d: Path, golden: Path) -> None:
    """As LeRobot answers for LIBERO: the first arm, the axis times the angle, a gripper of 1 or -1."""
    given = observation("xvla-ee6d", Golden(golden / "xvla-ee6d"))
    plain = load(run(ee6d).path).infer(given).actions
    rotated(ee6d)
    for dims in (20, 7):  # as the configuration may say it
        bundle = run(ee6d, output_features={"action": {"type": "ACTION", "shape": [dims]}})
        policy = load(bundle.path)
        found = policy.infer(given).actions
        assert (found.shape, policy.spec.action.dim, policy.spec.noise_dim) == ((10, 7), 7, 20)
        np.testing.assert_array_equal(found[:, :3], plain[:, :3])
        np.testing.assert_array_equal(found[:, 6], np.where(plain[:, 9] > 0.5, 1.0, -1.0))
        first, second = plain[:, 3:6], plain[:, 6:9]
        first = first / np.linalg.norm(first, axis=1, keepdims=True)
        second = second - (first * second).sum(1, keepdims=True) * first
        second /= np.linalg.norm(second, axis=1, keepdims=True)
        matrix = np.stack([first, second, np.cross(first, second)], axis=-1)
        for row, turn in zip(found[:, 3:6].astype(np.float64), matrix, strict=True):  # Rodrigues
            angle = np.linalg.norm(row)
            x, y, z = row / angle
            cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
            again = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
            np.testing.assert_allclose(again, turn, atol=1e-5)
            assert 0 <= angle <= np.pi + 1e-6


def test_a_rotation_that_does_not_fit_is_refused(checkpoint: Callable[[str], Path], golden: Path) -> None:
    path = checkpoint("xvla-auto")
    rotated(path)
    with pytest.raises(
        ConvertError, match="xvla_rotation_6d.+: expected actions of at least 10 values, got 7 for"
    ):
        run(path)
    with pytest.raises(ConvertError, match="expected actions without normalisation"):
        run(
            path,
            output_features={"action": {"type": "ACTION", "shape": [12]}},
            options={"stats": twelve(path)},
        )


def twelve(path: Path) -> Path:
    """Write statistics of twelve actions and eight numbers of a state."""
    stats = {
        name: {"mean": [0.0] * size, "std": [1.0] * size}
        for name, size in (("action", 12), ("observation.state", 8))
    }
    out = path.parent / "stats.json"
    out.write_text(json.dumps(stats))
    return out


def test_the_cases_have_each_tensor_under_either_name(golden: Path) -> None:
    """So that the parity of both tries the names of LeRobot 0.4, and of transformers."""
    first, second = (set(load_file(golden / case / "checkpoint" / "model.safetensors")) for case in CASES)
    own = {name for name in first & second if name.startswith("model.vlm.")}
    assert all(".norm." in name and ".convs." in name for name in own)
