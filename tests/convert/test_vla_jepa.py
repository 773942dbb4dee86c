"""VLA-JEPA checkpoints: processing against the reference, what other checkpoints hold, and wrong ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sinew_client.typed_names import UntypedNameError

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.convert.lerobot.steps import POST, PRE
from sinew.core import ConvertError, Observation, ObservationError
from sinew.policy import load
from sinew.processing import Processor
from tests.golden import Golden


@pytest.fixture(scope="module")
def g(golden) -> Golden:
    return Golden(golden / "vla-jepa")


@pytest.fixture(scope="module")
def processor(jepa_bundle) -> Processor:
    return Processor(Bundle(jepa_bundle).manifest)


def observation(g: Golden, **changes) -> Observation:
    given = g.observation() | {"noise": g.numpy("noise")}
    return Observation.from_mapping({**given, **changes})


def patches(pixels: np.ndarray) -> np.ndarray:
    """float32 [3, H, W] -> [patches, 1536] in Qwen's order: blocks of 2 x 2 patches, every frame twice."""
    rows, cols = (side // 16 for side in pixels.shape[1:])
    blocks = pixels.reshape(3, rows // 2, 2, 16, cols // 2, 2, 16).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.repeat(blocks[:, :, :, :, :, None], 2, axis=5).reshape(rows * cols, -1)


def test_processing_equals_the_reference(g, processor):
    inputs = processor.inputs(observation(g))
    assert inputs.tokens.tolist() == g.numpy("input_ids").tolist()
    stored = g.numpy("pixel_values")
    np.testing.assert_allclose(patches(inputs.pixels[0])[: len(stored)], stored, atol=1e-6, rtol=0)
    assert inputs.pixels.shape == (2, 3, *(16 * g.numpy("image_grid_thw")[0, 1:]))
    assert (inputs.state == g.numpy("state_normalized")).all()
    actions = processor.actions(g.numpy("chunk_normalized"), observation(g))
    np.testing.assert_allclose(actions, g.numpy("actions"), atol=1e-6, rtol=0)


def test_frames_in_floats_are_not_rounded(g, processor):
    """Upstream's own frames are floats."""
    frames = {name: frame.astype(np.float32) / 255 for name, frame in observation(g).images.items()}
    found = processor.inputs(observation(g, images=frames)).pixels
    assert (found == processor.inputs(observation(g)).pixels).all()
    low = {name: frame * 0 + 0.3 / 255 for name, frame in frames.items()}  # rounds to 0 in uint8
    assert np.allclose(processor.inputs(observation(g, images=low)).pixels, 0.6 / 255 - 1, atol=1e-6)


def test_no_instruction_adds_a_marking_token(g, processor):
    for text, what in (("<|embodied_action|>", "32 marking"), ("<|image_pad|>", "128 image")):
        with pytest.raises(ObservationError, match=rf"prompt: expected {what} tokens"):
            processor.check(observation(g, prompt=f"put {text} down"))
    processor.check(observation(g, prompt="put <|action_0|> down"))  # upstream reads only the others
    empty, said = (
        processor.inputs(observation(g, prompt=p)).tokens.tolist() for p in ("", "Execute the robot action.")
    )
    assert empty == said


def test_all_cameras_are_needed(g, processor):
    with pytest.raises(ObservationError, match="images.wrist_image: expected a frame"):
        processor.check(observation(g, images={"image": np.zeros((256, 256, 3), np.uint8)}))


# ----------------------------------------------------------------------------- other checkpoints


@pytest.fixture
def source(golden, tmp_path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(golden / "vla-jepa", tmp_path / "vla-jepa"))


def edit(path: Path, change) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def configure(**values):
    return lambda source: edit(source / "checkpoint" / "config.json", lambda record: record.update(values))


def converted(source: Path, **options) -> Path:
    return convert(
        source / "checkpoint", source / "out.gguf", **{"vlm": source / "vlm", "name": "x", **options}
    )


def test_gripper_steps(g, source, processor):
    """Snapped before the inverse, compared in world units behind it: LIBERO's published settings."""

    def change(record):
        fields = {"gripper_dim": 6, "threshold": 0.25}
        snap = {"registry_name": "vla_jepa_pre_snap_gripper", "config": fields}
        record["steps"].insert(1, snap)
        last = {"registry_name": "vla_jepa_binarize_gripper", "config": fields | {"threshold": 0.5}}
        record["steps"].insert(4, last)

    edit(source / "checkpoint" / f"{POST}.json", change)
    gripping = Processor(Bundle(converted(source)).manifest)
    chunk = np.tile(g.numpy("chunk_normalized")[:1], (7, 1))
    chunk[:4, 6] = (0.2499, 0.25, -3.0, 3.0)
    low, high = (float(g.numpy(f"stats.action.{name}")[6]) for name in ("min", "max"))
    middle, shut = (low + high) / 2, high
    wanted = [-1.0 if value > 0.5 else 1.0 for value in (middle, shut, middle, shut)]
    found = gripping.actions(chunk, observation(g))
    assert found[:4, 6].tolist() == wanted
    np.testing.assert_array_equal(found[:, :6], processor.actions(chunk, observation(g))[:, :6])


def test_a_policy_without_a_state(g, source):
    def change(record):
        del record["input_features"]["observation.state"]

    edit(source / "checkpoint" / "config.json", change)
    policy = load(converted(source), dtype="float32")
    assert policy.spec.state.dim == 0
    chunk = policy.infer(observation(g, state=np.zeros(0)))
    assert np.isfinite(chunk.actions).all()
    assert np.abs(chunk.actions - g.numpy("actions")).max() > 1e-3
    assert any("no state token" in note for note in policy.manifest.provenance.notes)


def test_the_world_model_is_left_out(source):
    """Its encoder's patches say how many frames a step spans, and so how many action tokens the prompt holds."""
    file = source / "checkpoint" / "model.safetensors"
    weights = load_file(file)
    patches = "model.video_encoder.encoder.embeddings.patch_embeddings.proj.weight"
    save_file({**weights, patches: torch.zeros(2, 3, 4, 2, 2)}, file)
    manifest = Bundle(converted(source)).manifest
    assert patches in manifest.provenance.dropped
    assert manifest.processing.prompt.template.count("<|action_0|>") == 8
    assert "<|action_1|>" not in manifest.processing.prompt.template


def drop_pipelines(source: Path) -> None:
    for file in (source / "checkpoint").glob("policy_*"):
        file.unlink()


def truncate(source: Path) -> None:
    file = source / "checkpoint" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def keep_adapter_only(source: Path) -> None:
    (source / "checkpoint" / "model.safetensors").rename(source / "checkpoint" / "adapter_model.safetensors")


def resize_twice(source: Path) -> None:
    def change(record):
        record["steps"][3]["config"]["resize_to"] = [128, 128]

    edit(source / "checkpoint" / f"{PRE}.json", change)


def unknown_step(source: Path) -> None:
    edit(
        source / "checkpoint" / f"{POST}.json",
        lambda record: record["steps"].append({"registry_name": "smooth"}),
    )


def other_sizes(source: Path) -> None:
    configure(resize_images_to=None)(source)
    edit(
        source / "checkpoint" / f"{PRE}.json",
        lambda record: record["steps"][3]["config"].update(resize_to=None),
    )


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (drop_pipelines, r"no statistics \['min', 'max'\] for 'action'.*--stats FILE"),
        (truncate, "model.safetensors"),
        (keep_adapter_only, "LoRA adapter only. To merge it"),
        (resize_twice, r"resize_to: expected \[224, 224\], the resize_images_to in config.json, got \[128, 128\]"),
        (unknown_step, r"step 4 \(smooth\)|smooth.*not understood"),
        (other_sizes, "resize_images_to: expected a size, .* without it: image 256x256, wrist_image 256x320"),
        (configure(action_hidden_size=51), "does not fit its config: .*expected"),
        (configure(chunk_size=70), "does not fit its config: .*embed_tokens|lm_head"),
        (configure(action_model_type="DiT-XL"), "action_model_type: expected one of DiT-B, .+got 'DiT-XL'"),
        (configure(prompt_template="Do {instruction}."), r"expected \{instruction\} and \{e_actions\} exactly once"),
        (configure(prompt_template="{instruction.x} {e_actions}"), "expected only the fields instruction"),
        (configure(prompt_template="{instruction"), "prompt_template: expected '}'"),
        (configure(look_ahead=2), "look_ahead=2 is not understood"),
    ],
)  # fmt: skip
def test_wrong_checkpoints_say_what_to_give(source, break_it, message):
    break_it(source)
    with pytest.raises(ConvertError, match=message) as caught:
        converted(source)
    assert "\n" not in str(caught.value)
    assert not (source / "out.gguf").exists()


def test_the_neighbours_language_model_is_refused(golden, source):
    with pytest.raises(
        ConvertError, match="expected 4, as in the checkpoint, got 7. Pass the checkpoint's model with --vlm"
    ):
        converted(source, vlm=golden / "groot-n17" / "vlm")
    shutil.rmtree(source / "vlm")
    with pytest.raises(UntypedNameError, match="add: --vlm"):
        converted(source, vlm=None)
