"""VLA-JEPA against LeRobot's stored intermediates, stage by stage and end to end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sinew.policy import load
from tests.convert.test_vla_jepa import observation
from tests.golden import Golden, assert_parity

STAGE = {"atol": 1e-5, "rtol": 1e-5}  # of stages whose values reach ten
ACTIONS = 1e-5  # what the fixture asks for


@pytest.fixture(scope="module")
def case(golden, jepa_bundle):
    return load(jepa_bundle, dtype="float32", engine="eager"), Golden(golden / "vla-jepa")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.reshape(expected.shape), expected, **STAGE)
    assert_parity(found.reshape(expected.shape), expected)


def read(policy, g) -> tuple[torch.Tensor, ...]:
    """The arguments of ``read``."""
    inputs = policy.processor.inputs(observation(g))
    tensors = [torch.from_numpy(np.asarray(value))[None] for value in (inputs.pixels, inputs.camera_mask)]
    tokens, mask, state = (
        torch.from_numpy(value)[None] for value in (inputs.tokens, inputs.token_mask, inputs.state)
    )
    return policy.engine.model.embed_images(tensors[0]), tensors[1], tokens, mask, state


@pytest.mark.proves(engine="eager", family="VLA-JEPA")
def test_actions_match_the_reference(case):
    policy, g = case
    chunk = policy.infer(observation(g))
    assert_parity(chunk.actions, g.numpy("actions"))
    assert np.abs(chunk.actions - g.numpy("actions")).max() <= ACTIONS
    assert len(chunk.timing.step_ms) == len(g["v_t"])


@torch.inference_mode()
def test_every_stage_matches(case):
    policy, g = case
    model = policy.engine.model
    image_tokens, cameras, tokens, valid, state = read(policy, g)
    tower, *taps = image_tokens.split(model.config.language.hidden_size, dim=-1)
    close(tower, g["image_tokens"])
    for index, tap in enumerate(taps):
        close(tap, g[f"deepstack.{index}"])
    assert len(taps) == 3
    is_image, seen = model.seen(image_tokens, cameras, tokens, valid)
    close(model.embed(image_tokens, is_image, tokens)[0], g["inputs_embeds"])
    features = model.features(image_tokens, is_image, tokens, seen)
    close(features[0, -len(g["last_hidden_prenorm"]) :], g["last_hidden_prenorm"])
    index = model.marked(tokens, seen)
    assert index[0].tolist() == (tokens[0] == model.config.marker).nonzero()[:, 0].tolist()
    close(features[:, index[0]], g["conditioning"])
    context = model.read(image_tokens, cameras, tokens, valid, state)
    for time, x_t, v_t in zip(model.solver.times(4), g["x_t"], g["v_t"], strict=True):
        close(model.act(x_t[None], model.moment(torch.tensor([time], dtype=torch.float64)), context), v_t)


@torch.inference_mode()
def test_padding_of_the_prompt_changes_nothing(case):
    """Engines with buckets pad it; a padding token with the marker's id is none."""
    policy, g = case
    model = policy.engine.model
    image_tokens, cameras, tokens, valid, state = read(policy, g)
    fill = model.config.marker
    padded = (
        torch.nn.functional.pad(tokens, (0, 7), value=fill),
        torch.nn.functional.pad(valid, (0, 7), value=False),
    )
    outputs = []
    for ids, mask in ((tokens, valid), padded):
        context = model.read(image_tokens, cameras, ids, mask, state)
        outputs.append(
            model.act(g["noise"][None], model.moment(torch.zeros(1, dtype=torch.float64)), context)
        )
    torch.testing.assert_close(outputs[0], outputs[1], **STAGE)


@pytest.mark.proves(engine="eager", precision="bf16", family="VLA-JEPA")
def test_the_head_stays_in_float32(case, jepa_bundle):
    """Upstream computes it there whatever the language model's dtype."""
    policy = load(jepa_bundle, dtype="bfloat16", engine="eager")
    model, g = policy.engine.model, case[1]
    assert model.head.dit.dtype == torch.float32
    matrices = (each for each in model.language.layers.parameters() if each.ndim == 2)
    assert {each.dtype for each in matrices} == {torch.bfloat16}
    gap = np.abs(policy.infer(observation(g)).actions - g.numpy("actions")).max()
    assert 0 < gap < 0.1 * np.abs(g.numpy("actions")).max()
