"""Wall-X's checkpoints: what is read of them and what is rejected; frames, prompts and the experts' tensors."""

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
from sinew.core import ConvertError, Observation, ObservationError
from sinew.policy import load
from sinew.processing.image import apply_image_steps
from sinew.steps.image.grid import Grid
from sinew.steps.image.long_side import LongSide
from tests.golden import Golden
from tests.models.stages import observation

BASE = "base/config.json"
EXPERT = {"hidden_size": 64, "intermediate_size": 96, "hidden_act": "silu"}


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    shutil.copytree(golden / "wallx-2cam" / "checkpoint", tmp_path / "wallx", copy_function=shutil.copyfile)
    return tmp_path / "wallx"


def run(checkpoint: Path, file: str, **changes: Any) -> Bundle:
    """Convert with changed entries of a file; a name with two underscores is inside of ``vision_config``."""
    record = json.loads((checkpoint / file).read_text())
    for name, value in changes.items():
        part, _, inner = name.partition("__")
        (record[part] if inner else record)[inner or part] = value
    (checkpoint / file).write_text(json.dumps(record))
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prediction_mode": "fast"},
            'prediction_mode="fast" is not supported yet, expected "diffusion"; the checkpoint cannot be converted',
        ),
        ({"n_obs_steps": 2}, "n_obs_steps=2 is not supported yet"),
        ({"chunk_size": 0}, "chunk_size: expected a whole number from 1"),
        ({"chunk_size": 700}, "expected a prompt of at most 68 tokens, LeRobot's limit, got "),
        ({"max_state_dim": 6}, "max_state_dim: expected a whole number from 7"),
        (
            {"max_state_dim": 9},
            "agent_pos_config: expected widths with a sum of 9, the checkpoint's max_state_dim, got 8. Pass the",
        ),
        (
            {"max_action_dim": 11},
            "dof_config: expected widths with a sum of 11, the checkpoint's max_action_dim, got 10",
        ),
        ({"num_inference_timesteps": 5}, "num_inference_timesteps=5 is not understood"),
    ],
)
def test_what_is_not_computed_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, "config.json", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mlp_moe": False},
            "mlp_moe: expected True, got False. Sinew cannot convert this checkpoint, because it does",
        ),
        ({"mlp_moe": None}, "mlp_moe: expected True, got False"),
        ({"attention_moe": True}, "attention_moe: expected False, got True"),
        ({"use_lora": True}, "use_lora: expected False, got True"),
        (
            {"num_experts": 1},
            "num_experts: expected at least 2, one for the prompt and one for actions, got 1",
        ),
        ({"experts": [EXPERT]}, "experts: expected a list of at least two objects"),
        (
            {"experts": [EXPERT, EXPERT]},
            r"experts\[1\].hidden_size: expected 48, the value in dim_inputs, got 64",
        ),
        (
            {"experts": [EXPERT | {"intermediate_size": 95}, EXPERT | {"hidden_size": 48}]},
            r"experts\[0\]: expected hidden_size 64 and intermediate_size 96, as in the network, got 64 and 95",
        ),
        (
            {"experts": [EXPERT, EXPERT | {"hidden_size": 48, "hidden_act": "gelu"}]},
            r"experts\[1\].hidden_act: expected 'silu', got 'gelu'",
        ),
        ({"dim_inputs": [64]}, "dim_inputs: expected a list of at least two widths"),
        (
            {"dof_config": {"arm": 7}},
            "dof_config: expected widths with a sum of 10, the checkpoint's max_action_dim, got 7",
        ),
        (
            {"agent_pos_config": {"arm": "7"}},
            "agent_pos_config: expected an object with the width of each part",
        ),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: expected full_attention in all layers"),
        (
            {"rope_scaling": {"type": "yarn", "mrope_section": [2, 3, 3]}},
            "rope_scaling.type: expected 'mrope', got 'yarn'",
        ),
        ({"rope_scaling": None}, "mrope_section: expected three numbers, got None"),
        (
            {"vision_config__window_size": 60},
            "window_size: expected whole tokens, a multiple of [0-9]+ pixels, got 60",
        ),
        (
            {"vision_config__out_hidden_size": 48},
            "vision.output_size: expected 64, the width of the language model",
        ),
        ({"num_hidden_layers": 5}, r"language.layers.4.\S+ is missing"),
    ],
)
def test_a_network_that_is_not_computed_is_rejected(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, BASE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"merge_size": 1}, "merge_size: expected 2, got 1"),
        ({"min_pixels": None}, "min_pixels: expected a whole number from 1"),
        ({"do_rescale": False}, "do_rescale: expected True, got False"),
    ],
)
def test_another_image_processor_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, "base/preprocessor_config.json", **changes)


def test_an_entry_of_the_network_that_nothing_reads_is_named(checkpoint: Path) -> None:
    notes = run(checkpoint, BASE, router="learnt").manifest.provenance.notes
    assert any('not understood, and ignored: router="learnt"' in note for note in notes)


def test_newer_names_of_image_limits(checkpoint: Path) -> None:
    usual = run(checkpoint, "base/preprocessor_config.json").manifest.processing.image
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    changes = {"min_pixels": None, "max_pixels": None, "size": size}
    assert run(checkpoint, "base/preprocessor_config.json", **changes).manifest.processing.image == usual


def test_views_keep_their_sizes(checkpoint: Path) -> None:
    image = run(checkpoint, BASE).manifest.processing.image
    assert (image.height, image.width, image.sizes) == (252, 252, ((56, 252), (252, 84)))


@pytest.mark.parametrize("case", ["wallx-2cam", "wallx-3cam"])
def test_frames_become_the_references_pixels(case: str, golden: Path, case_bundle: Any) -> None:
    """LeRobot's two resizes to the byte, then the pixels of the image processor, which resizes those of ``wallx-3cam``
    once more."""
    g, image = Golden(golden / case), Bundle(case_bundle(case)).manifest.processing.image
    for name in (each for each in g.cameras if f"resized.{each}" in g.tensors):
        twice = replace(image, steps=image.steps[:2], sizes=())
        found = apply_image_steps(g.numpy(f"frame.{name}"), twice)
        assert np.array_equal(found.transpose(2, 0, 1), g.numpy(f"resized.{name}"))
    policy = load(case_bundle(case), engine="eager", dtype="float32")
    pixels = policy.processor.inputs(observation(case, g), padded=False).pixels[0]
    model: Any = policy.engine.model
    (height, width), vision = model.config.frames[0], model.config.vision
    size = (-1, vision.merge, vision.patch_size)
    blocks = torch.from_numpy(pixels)[:, :height, :width].unflatten(2, size).unflatten(1, size)
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)  # block by block, [patches, 3, 14, 14]
    stored = g["pixel_values"].unflatten(1, (3, vision.temporal_patch, vision.patch_size, vision.patch_size))
    for frame in range(vision.temporal_patch):
        torch.testing.assert_close(patches[: len(stored)], stored[:, :, frame], rtol=0, atol=1e-6)


def test_the_prompt_names_the_views(case_bundle: Any) -> None:
    prompts = [Bundle(case_bundle(f"wallx-{n}cam")).manifest.processing.prompt.template for n in (2, 3)]
    views = [
        [part.rpartition("<|vision_end|>")[2] for part in each.split("<|vision_start|>")] for each in prompts
    ]
    assert [view.rpartition("Observation:")[2] for view in views[0][:-1]] == [
        " front view: ",
        " right wrist view: ",
    ]
    assert [view.rpartition("Observation:")[2] for view in views[1][:-1]] == [
        " move view: ",
        " wrist_cam view: ",
        " left wrist view: ",
    ]


def test_a_full_stop_ends_the_instruction_once(golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle("wallx-2cam"), engine="eager", dtype="float32")
    given = observation("wallx-2cam", Golden(golden / "wallx-2cam"))
    with_, without = (
        policy.processor.inputs(replace(given, prompt=prompt), padded=False).tokens
        for prompt in ("open it.", "open it")
    )
    assert np.array_equal(with_, without)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            "go to <point>[3, 4]</point>",
            "prompt: expected an instruction without <point>, which Sinew does not support",
        ),
        ("open <|action|>", "prompt: expected 0 marking tokens"),
        ("open <|propri|>", "prompt: expected 1 marking tokens"),
        ("open <|image_pad|>", "prompt: expected 45 image tokens"),
    ],
)
def test_an_instruction_that_would_be_read_otherwise_is_rejected(
    golden: Path, case_bundle: Any, prompt: str, message: str
) -> None:
    policy = load(case_bundle("wallx-2cam"), engine="eager", dtype="float32")
    given = observation("wallx-2cam", Golden(golden / "wallx-2cam"))
    with pytest.raises(ObservationError, match=message):
        policy.infer(replace(given, prompt=prompt))


def test_unread_tensors_are_named(case_bundle: Any) -> None:
    """The third expert is of tokens that no prompt has. The table is the policy's own, so the head is not read."""
    dropped = Bundle(case_bundle("wallx-3cam")).manifest.provenance.dropped
    parts = ("down_proj", "gate_proj", "up_proj")
    experts = [f"model.model.layers.{i}.moe.experts.2.{part}.weight" for i in range(3) for part in parts]
    assert sorted(dropped) == ["model.lm_head.weight", *experts]
    assert Bundle(case_bundle("wallx-2cam")).manifest.provenance.dropped == ()


def test_the_order_of_solver_times(case_bundle: Any) -> None:
    """From noise at 0 to actions at 1, in LeRobot's ten steps: other than EO-1."""
    spec = Bundle(case_bundle("wallx-2cam")).manifest.spec
    assert (spec.solver.start, spec.solver.end, spec.solver_steps) == (0.0, 1.0, 10)


def test_actions_depend_on_their_own_expert_alone(golden: Path, case_bundle: Any) -> None:
    """A narrow expert leaves the channels behind its own as they are."""
    policy = load(case_bundle("wallx-2cam"), engine="eager", dtype="float32")
    expert: Any = policy.engine.model.experts[0]  # type: ignore[attr-defined]
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = expert(x)
    assert torch.equal(found[..., 48:], x[..., 48:])
    assert not torch.isclose(found[..., :48], x[..., :48]).all(dim=0).any()


def test_a_frame_of_another_shape_is_rejected(golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle("wallx-2cam"), engine="eager", dtype="float32")
    given = observation("wallx-2cam", Golden(golden / "wallx-2cam"))
    wrong = {**given.images, "face_view": np.zeros((48, 100, 3), np.uint8)}
    with pytest.raises(ObservationError, match=r"images.face_view: expected a frame that becomes"):
        policy.infer(Observation(wrong, given.state, prompt=given.prompt))


@pytest.mark.parametrize("case", ["wallx-2cam", "wallx-3cam"])
def test_an_observation_is_the_same_in_a_batch(case: str, golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle(case), engine="eager", dtype="float32")
    given = observation(case, Golden(golden / case))
    members = [given, replace(given, state=-given.state, noise=None, seed=2)]
    both = policy.run_batch([policy.prepare(member) for member in members])
    for chunk, member in zip(both, members, strict=True):
        np.testing.assert_allclose(chunk.actions, policy.infer(member).actions, rtol=0, atol=1e-4)


def test_the_long_side_is_as_long_as_it_says() -> None:
    step = LongSide(256, "bicubic")
    assert [step.size(*each) for each in ((480, 640), (640, 480), (48, 200), (100, 100), (1, 1000))] == [
        (192, 256),
        (256, 192),
        (61, 256),
        (256, 256),
        (1, 256),
    ]
    assert Grid(28, 4 * 784, 16384 * 784).size(192, 256) == (196, 252)
