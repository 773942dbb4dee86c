"""Evo-1 against LeRobot's and the original repository's stored actions; their stages are in test_stages.py."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from sinew.families.evo1.model import Evo1Context
from sinew.layers.attention import block_mask
from sinew.layers.rope import Rotation
from sinew.policy import Policy, load
from sinew.processing.image import apply_image_steps
from tests.closeness import assert_close, rounding
from tests.golden import Golden
from tests.models.stages import evo1_observation as observation

CASES = ("evo1", "evo1-mint")


@pytest.fixture(scope="module", params=CASES)
def case(request, golden, evo1_bundle) -> tuple[Policy, Golden]:
    return load(evo1_bundle(request.param), dtype="float32", engine="eager"), Golden(golden / request.param)


@pytest.fixture(scope="module")
def read(case) -> tuple[torch.Tensor, ...]:
    """Image tokens of the observation as the processor prepares it, and the other arguments of ``read``."""
    return arguments(*case)


@pytest.fixture(scope="module")
def states(case, read) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The language model's input, which of its rows are valid, and its states; they cost seconds."""
    model = case[0].engine.model
    with torch.inference_mode():
        x, valid = model.embed(*read[:2], *model.filled(*read[2:4]))
        return x, valid, model.features(x, valid)


@pytest.fixture(scope="module")
def context(case, read, states) -> Evo1Context:
    model, (_, valid, features) = case[0].engine.model, states
    with torch.inference_mode():
        return model.head.context(features, torch.ones_like(valid) if model.config.rows else valid, read[4])


def arguments(policy: Policy, g: Golden) -> tuple[torch.Tensor, ...]:
    inputs = policy.processor.inputs(observation(g))
    given = (inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
    with torch.inference_mode():
        tokens = policy.engine.model.embed_images(torch.from_numpy(inputs.pixels)[None])
    return tokens, *(torch.from_numpy(value)[None] for value in given)


def test_every_pixel_equals_the_reference(case):
    policy, g = case
    recipe = policy.manifest.processing.image
    for name, frame in observation(g).images.items():
        found = np.ascontiguousarray(apply_image_steps(frame, recipe).transpose(2, 0, 1))
        if f"image_uint8.{name}" in g.tensors:
            assert (found == g.numpy(f"image_uint8.{name}")).all()
        else:
            assert (found[:, :8] == g.numpy(f"image_uint8_head.{name}")).all()
            assert hashlib.sha256(found.tobytes()).hexdigest() == g.metadata[f"sha256.image_uint8.{name}"]


def test_tokens_and_state_equal_the_reference(case, states):
    policy, g = case
    inputs = policy.processor.inputs(observation(g), padded=True)
    assert inputs.tokens.tolist() == g.numpy("input_ids")[0].tolist()
    np.testing.assert_allclose(inputs.state, g.numpy("state_normalized")[0], atol=1e-6, rtol=0)
    chunk = policy.processor.actions(g.numpy("chunk_normalized")[0], observation(g))
    actions, dims = g.numpy("actions")[0], policy.spec.action.dim
    np.testing.assert_allclose(chunk, actions[:, :dims], atol=1e-6, rtol=0)
    assert np.abs(actions[:, dims:]).max(initial=0) < 1e-8  # the original's padding
    assert torch.equal(states[1], g["attention_mask"] == 1)


@torch.inference_mode()
def test_numbers_that_the_robot_has_not_are_zero_and_unread(case, context):
    policy, g = case
    model, dims = policy.engine.model, policy.spec.action.dim
    time_embedding = model.embed_time(torch.zeros(1, dtype=torch.float64))
    for x_t in g["x_t"]:
        found = model.act(x_t, time_embedding, context)
        assert not found[..., dims:].any()
        spoilt = torch.cat([x_t[..., :dims], torch.full_like(x_t[..., dims:], 7.0)], dim=-1)
        assert torch.equal(model.act(spoilt, time_embedding, context), found)


@torch.inference_mode()
def test_time_and_state_move_the_velocity(case, read, states, context):
    """The comparison above is of something."""
    policy, g = case
    model = policy.engine.model
    late, early = (model.embed_time(torch.tensor([t], dtype=torch.float64)) for t in (0.9, 0.0))
    other = model.head.context(states[2], context.valid[:, 0, :-1], read[4] + 0.5)
    x = g["noise"]
    assert (model.act(x, late, context) - model.act(x, early, context)).abs().max() > 1e-3
    assert (model.act(x, early, other) - model.act(x, early, context)).abs().max() > 1e-5


def test_time_rows_are_the_references(case):
    """min(int(i / N * 999), 999), for every number of steps that a request may ask for."""
    policy, g = case
    model = policy.engine.model
    table = model.head.time_embedding.weight
    for count in range(1, 101):
        for k, time in enumerate(model.solver.times(count)):
            row = model.embed_time(torch.tensor([time], dtype=torch.float64))[0]
            assert torch.equal(row, table[min(int(k / count * 999), 999)]), (k, count)
    assert torch.equal(model.embed_time(torch.ones(1, dtype=torch.float64))[0], table[999])
    if "time_index" in g.tensors:
        assert g["time_index"].tolist() == [int(k / 7 * 999) for k in range(7)]


@torch.inference_mode()
def test_views_and_tokens_that_are_masked_change_nothing(case, read, context):
    """Of LeRobot's layout they are not read; of the original one they are black views and padding, whatever is
    given."""
    policy, g = case
    model, pad = policy.engine.model, torch.nn.functional.pad
    image_tokens, cameras, tokens, valid, state = read
    views = [image_tokens, torch.full_like(image_tokens[:, :1], 3.0)]
    more, longer = pad(cameras, (0, 1)), (pad(tokens, (0, 5), value=3), pad(valid, (0, 5)))
    other = model.read(torch.cat(views, dim=1), more, *longer, state)
    time_embedding = model.embed_time(torch.zeros(1, dtype=torch.float64))
    assert_close(
        rounding(model.act, g["noise"], time_embedding, context), model.act(g["noise"], time_embedding, other)
    )


@torch.inference_mode()
def test_flash_attention_gives_masked_rows_nothing(golden, evo1_bundle):
    """Rows that attend see the same as before; a masked row is its embedding through the MLPs alone."""
    policy, g = load(evo1_bundle("evo1"), dtype="float32", engine="eager"), Golden(golden / "evo1")
    model = policy.engine.model
    x, valid = model.embed(*arguments(policy, g)[:4])
    attending = model.features(x, valid)
    object.__setattr__(model.config, "masked_attend", False)
    try:
        found = model.features(x, valid)
    finally:
        object.__setattr__(model.config, "masked_attend", True)
    torch.testing.assert_close(found[valid], attending[valid])
    # vla.cpp's engine: whatever a masked row attends to, its branch is multiplied by zero (src/models/evo1.cpp, qmask)
    every = torch.ones_like(valid)
    config, positions = model.config.language, every.long().cumsum(dim=1) - 1
    rotate = Rotation.at(positions, config.head_dim, config.rope_theta)
    sees = block_mask(every, every) & valid[:, None]
    engine = x
    for layer in model.language.layers:
        q, k, v = layer.project(engine, rotate)
        engine = layer.finish(engine, layer.attn.attend(q, (k, v), sees) * valid[..., None])
    torch.testing.assert_close(found, model.language.norm(engine))
    alone = x[~valid]
    for layer in model.language.layers:
        alone = alone + layer.mlp(layer.post_norm(alone))
    torch.testing.assert_close(found[~valid], model.language.norm(alone))
    assert (found[~valid] - attending[~valid]).abs().max() > 1e-2
