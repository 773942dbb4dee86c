"""The multi-task DiT's checkpoints: what is read of them and what is rejected; its prompts and its flow matching."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sinew_client.typed_names import UntypedNameError

from sinew.bundle import Bundle
from sinew.convert import convert
from sinew.core import ConvertError, ObservationError
from sinew.policy import load
from tests.golden import Golden, assert_parity
from tests.models.stages import observation

FLOW = {"objective": "flow_matching", "integration_method": "euler", "num_integration_steps": 6}


@pytest.fixture
def checkpoint(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    source = golden / "mtdit-ddim" / "checkpoint"
    shutil.copytree(source, tmp_path / "mtdit", copy_function=shutil.copyfile)
    return tmp_path / "mtdit"


def edit(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file; a name with dots is inside of others."""
    record = json.loads(file.read_text())
    for name, value in changes.items():
        *way, last = name.split("__")
        part = record
        for step in way:
            part = part[step]
        part[last] = value
    file.write_text(json.dumps(record))


def run(checkpoint: Path, **changes: Any) -> Bundle:
    edit(checkpoint / "config.json", **changes)
    return Bundle(convert(checkpoint, checkpoint.parent / "out.gguf"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "score"}, "objective: expected one of diffusion, flow_matching, got 'score'"),
        (FLOW | {"integration_method": "heun"}, "integration_method: expected one of euler, rk4, got 'heun'"),
        ({"tokenizer_padding_side": "left"}, 'tokenizer_padding_side="left" is not supported yet'),
        ({"image_resize_shape": [40, 31]}, "expected frames of 32 x 32, which clip reads, got 40 x 31"),
        ({"image_crop_shape": [24, 32]}, "expected frames of 32 x 32, which clip reads, got 24 x 32"),
        ({"tokenizer_max_length": 41}, "tokenizer_max_length: expected a whole number from 1 to 40, got 41"),
        ({"n_action_steps": 16}, "n_action_steps: expected a whole number from 1 to 15, got 16"),
        ({"num_heads": 5}, "hidden_size: expected a multiple of num_heads 5, got 48"),
        ({"timestep_embed_dim": 21}, "time_size: expected an even number of at least 4, got 21"),
        ({"timestep_embed_dim": 22}, "adaLN_modulation.1.weight: shape .* does not split"),
        ({"num_layers": 4}, "transformer_blocks.3.adaLN_modulation.1.weight is missing"),
        (
            {"use_separate_rgb_encoder_per_camera": True},
            "vision_encoders.0.model.vision_model.embeddings.class_embedding is missing",
        ),
        ({"use_positional_encoding": True}, "places.weight is missing"),
        ({"noise_scheduler_type": "DPM"}, "noise_scheduler_type: expected one of DDPM, DDIM, got 'DPM'"),
        ({"guidance": 2.0}, "guidance=2.0 is not understood"),
    ],
)
def test_what_is_not_computed_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        run(checkpoint, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config__hidden_act": "gelu"}, "hidden_act"),
        ({"vision_config__layer_norm_eps": 1e-6}, "layer_norm_eps"),
        ({"text_config__eos_token_id": 7}, "expected a tokenizer that ends prompts with token 7.* got .573."),
    ],
)
def test_another_clip_is_rejected(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    edit(checkpoint / "clip" / "config.json", **changes)
    with pytest.raises(ConvertError, match=message):
        run(checkpoint)


@pytest.mark.parametrize("key", ["n_obs_steps", "horizon", "n_action_steps"])
def test_defaults_that_may_differ_between_versions_are_not_taken(checkpoint: Path, key: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config[key]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConvertError, match=f"'{key}' is missing"):
        run(checkpoint)


def test_a_folder_that_only_the_checkpoint_names_is_not_opened(checkpoint: Path) -> None:
    with pytest.raises(UntypedNameError, match="/etc/clip"):
        run(checkpoint, text_encoder_name="/etc/clip")


def test_two_clips_are_not_given_as_one(checkpoint: Path) -> None:
    shutil.copytree(checkpoint / "clip", checkpoint / "other-clip", copy_function=shutil.copyfile)
    edit(checkpoint / "config.json", text_encoder_name="other-clip")
    with pytest.raises(
        ConvertError, match="expected one CLIP model for frames and text, but .* names clip and other"
    ):
        convert(checkpoint, checkpoint.parent / "out.gguf", vlm=checkpoint / "clip")
    convert(checkpoint, checkpoint.parent / "out.gguf")  # both lie beside the weights


def test_a_cut_that_does_not_fit_is_left_out(checkpoint: Path) -> None:
    manifest = run(checkpoint, image_resize_shape=[32, 32], image_crop_shape=[33, 32]).manifest
    assert [step.kind for step in manifest.processing.image.steps] == ["resize"]
    assert any("image_crop_shape 33 x 32" in note for note in manifest.provenance.notes)


@torch.inference_mode()
def test_every_prompt_has_the_references_tokens_and_features(golden: Path, case_bundle: Any) -> None:
    """Spaces, capitals, digits, and no words at all, with which LeRobot trains where a data set has none."""
    g = Golden(golden / "mtdit-ddim")
    policy = load(case_bundle("mtdit-ddim"), engine="eager", dtype="float32", allow_empty_prompt=True)
    given = observation("mtdit-ddim", g)
    for number, prompt in enumerate(json.loads(g.metadata["prompts"])):
        inputs = policy.processor.inputs(replace(given, prompt=prompt), padded=False)
        tokens, mask = (torch.from_numpy(each)[None] for each in (inputs.tokens, inputs.token_mask))
        count = int(g[f"prompt{number}.lang_mask"].sum())
        assert tokens.tolist() == g[f"prompt{number}.lang_tokens"][:, :count].tolist()
        found = policy.engine.model.language(tokens, mask)
        np.testing.assert_allclose(found, g[f"prompt{number}.text_feature"], rtol=0, atol=1e-5)


def test_padding_changes_nothing(golden: Path, case_bundle: Any) -> None:
    policy = load(case_bundle("mtdit-ddim"), engine="eager", dtype="float32")
    model: Any = policy.engine.model
    inputs = policy.processor.inputs(observation("mtdit-ddim", Golden(golden / "mtdit-ddim")), padded=False)
    tokens, mask = (torch.from_numpy(each)[None] for each in (inputs.tokens, inputs.token_mask))
    with torch.inference_mode():
        plain = model.language(tokens, mask)
        pad = torch.nn.functional.pad
        padded = model.language(pad(tokens, (0, 5), value=573), pad(mask, (0, 5), value=False))
    np.testing.assert_allclose(padded, plain, rtol=0, atol=1e-6)


def test_flow_matching_gives_the_references_actions(checkpoint: Path, golden: Path) -> None:
    """From noise at 0 to actions at 1; the time is not scaled."""
    g = Golden(golden / "mtdit-ddim")
    policy = load(run(checkpoint, **FLOW).path, engine="eager", dtype="float32")
    assert (policy.spec.solver.kind, policy.spec.solver_steps) == ("euler", 6)
    chunk = policy.infer(observation("mtdit-ddim", g))
    assert_parity(chunk.actions, g["variant.flow_euler.actions"][0])


@pytest.mark.parametrize("engine", ["eager", "plan", "onnx"])
def test_runge_kutta_gives_the_references_actions(checkpoint: Path, golden: Path, engine: str) -> None:
    """Three intervals are twelve evaluations of the head."""
    g = Golden(golden / "mtdit-ddim")
    rk4 = FLOW | {"integration_method": "rk4", "num_integration_steps": 3}
    policy = load(run(checkpoint, **rk4).path, engine=engine, dtype="float32")
    assert (policy.spec.solver.kind, policy.spec.solver_steps) == ("rk4", 12)
    assert_parity(policy.infer(observation("mtdit-ddim", g)).actions, g["variant.flow_rk4.actions"][0])
    if engine != "onnx":  # exported graphs have one number of steps
        with pytest.raises(ObservationError, match="^solver_steps: expected 8 or 12, got 10$"):
            policy.infer(replace(observation("mtdit-ddim", g), solver_steps=10))


@pytest.mark.parametrize("rtc", ["guided", "no-jacobian", "ramp"])
def test_a_running_chunk_is_continued_at_its_own_rows(checkpoint: Path, golden: Path, rtc: str) -> None:
    """The solution begins one observation step before its chunk, so rows of the chunk are not rows of the solution."""
    g = Golden(golden / "mtdit-ddim")
    policy = load(run(checkpoint, **FLOW, n_action_steps=10).path, engine="eager", dtype="float32")
    given = observation("mtdit-ddim", g)
    alone = policy.infer(given).actions
    span = np.ptp(alone, axis=0).max()
    previous = alone[:6] + np.float32(0.2) * span
    continued = policy.infer(
        replace(given, previous=previous, delay=4, rtc=rtc, horizon=0, beta=None if rtc == "ramp" else 5.0)
    ).actions
    near, far = (np.abs(continued[:4] - other).max() for other in (previous[:4], alone[:4]))
    assert near < (1e-3 if rtc == "ramp" else 0.5) * far
