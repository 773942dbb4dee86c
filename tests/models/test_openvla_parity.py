"""OpenVLA, OpenVLA-OFT, VLA-Adapter and BitVLA against their references end to end, and on every engine; their stages
are in test_stages.py."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sinew.bundle import Bundle
from sinew.core import Observation, ObservationError
from sinew.families.bitvla.convert import bundle_name
from sinew.layers.stores.lowbit import codes
from sinew.models.base import AutoregressiveModel
from sinew.policy import Policy, load
from sinew.steps.action_tokens.bins import bin_centres
from tests.closeness import Rounding, assert_close, rounding
from tests.golden import Golden, relative_l2

CASES = ("openvla-oft", "openvla-ar", "vla-adapter", "bitvla")
RELATIVE = 1e-5  # of BitVLA, whose int8 roundings are at least 4e-4 away from a tie


@pytest.fixture(
    scope="module",  # VLA-Adapter's actions are held against its reference in tests/contract, on every engine
    params=[pytest.param(case, marks=[pytest.mark.slow] * (case == "vla-adapter")) for case in CASES],
)
def case(request, golden, openvla_bundle) -> tuple[Policy, Golden]:
    return load(openvla_bundle(request.param), dtype="float32"), Golden(golden / request.param)


def observation(g: Golden) -> dict:
    state = g.numpy("state_raw") if "state_raw" in g.tensors else np.zeros(0, np.float32)
    return {
        "images": {camera: g.numpy(f"frame.{camera}") for camera in g.cameras},
        "state": state,
        "prompt": g.metadata["task"],
    }


def prompt_ids(g: Golden) -> torch.Tensor:
    """The reference's ids without what upstream puts behind the prompt: placeholders and the stop token."""
    if "prompt_ids" in g.tensors:
        return g["prompt_ids"]
    ids = g["input_ids"]
    if (
        g.metadata["family"] == "bitvla"
    ):  # the views and the state have placeholders, which the model does not read
        marks = json.loads(g.metadata["token_ids"])
        return ids[(ids != marks["image_pad"]) & (ids != marks["proprio_pad"])]
    chunk = g["actions"].numel() if "openvla" in g.metadata["family"] else 64
    assert (ids[-chunk - 1 : -1] == 1).all()
    return ids[: -chunk - 1]


def actions_of(policy: Policy, given: dict) -> Rounding:
    return rounding(lambda: policy.infer(given).actions)


def inputs(policy: Policy, g: Golden) -> tuple[torch.Tensor, ...]:
    found = policy.processor.inputs(Observation.from_mapping(observation(g)))
    arrays = (found.pixels, found.camera_mask, found.tokens, found.token_mask, found.state)
    return tuple(torch.from_numpy(array)[None] for array in arrays)


def test_pixels_tokens_and_state_are_equal(case):
    policy, g = case
    pixels, _, tokens, _, state = inputs(policy, g)
    recipe = policy.manifest.processing.image
    for view, camera in zip(pixels[0], g.cameras, strict=True):
        unit = g.numpy(f"image_224.{camera}").astype(np.float32).transpose(2, 0, 1) / np.float32(255)
        for group in range(recipe.channels // 3):
            mean, std = (
                np.asarray(x[3 * group : 3 * group + 3], np.float32)[:, None, None]
                for x in (recipe.mean, recipe.std)
            )
            # One bit of a pixel is 0.004 before and more after normalisation.
            np.testing.assert_allclose(
                view[3 * group : 3 * group + 3], (unit - mean) / std, rtol=0, atol=1e-6
            )
    if "pixel_values.full_image" in g.tensors:
        expected = g["pixel_values.full_image"]
        torch.testing.assert_close(pixels[0, 0, :, : expected.shape[1]], expected, rtol=0, atol=1e-6)
    assert torch.equal(tokens[0], prompt_ids(g))
    if "state_normalized" in g.tensors:
        assert g["state_normalized"].abs().max() == 1  # one element was out of range
        torch.testing.assert_close(state[0], g["state_normalized"].float(), rtol=0, atol=1e-6)


@torch.inference_mode()
def test_padding_changes_nothing(case):
    """Engines that run a few lengths only pad the prompt on the right, in the middle of these sequences."""
    policy, g = case
    model = policy.engine.model
    pixels, cameras, tokens, mask, state = inputs(policy, g)
    image_tokens = model.embed_images(pixels)

    def regressed(tokens, mask):
        context = model.read(image_tokens, cameras, tokens, mask, state)
        if isinstance(model, AutoregressiveModel):
            return torch.from_numpy(model.action_tokens.chunks(policy.engine.say(context)))
        return model.regress(context)

    padded = torch.nn.functional.pad(tokens, (0, 5), value=3), torch.nn.functional.pad(mask, (0, 5))
    assert_close(rounding(regressed, tokens, mask), regressed(*padded))


@torch.inference_mode()
def test_the_tokens_that_are_said(golden, openvla_bundle):
    policy, g = load(openvla_bundle("openvla-ar"), dtype="float32"), Golden(golden / "openvla-ar")
    read = policy.engine.read(policy.processor.inputs(Observation.from_mapping(observation(g))).batched())
    assert policy.engine.say(read)[0].tolist() == g["generated_ids"].tolist()
    centres = torch.from_numpy(policy.infer(observation(g)).actions)
    assert torch.allclose(centres.double(), g["actions"].reshape(centres.shape), atol=1e-7, rtol=0)


def test_ternary_weights_are_the_references(golden, openvla_bundle):
    """Every code and every scale of every matrix, from the bfloat16 master weights."""
    g, bundle = Golden(golden / "bitvla"), Bundle(openvla_bundle("bitvla"))
    master = {}
    for shard in sorted((golden / "bitvla" / "checkpoint").glob("*.safetensors")):
        master |= load_file(shard)
    names = [name for name in g.tensors if name.startswith("absmean.") and ".head." not in name]
    expected = {name.removeprefix("absmean."): g[name] for name in names}
    assert len(expected) == len(bundle.lowbit) == 2 * 7 + 3 * 6
    for name, mean in expected.items():
        ours = bundle_name(f"{name}.weight").removesuffix(".weight")
        scale = bundle.tensor(f"{ours}.scale")
        torch.testing.assert_close(scale, mean, rtol=1e-6, atol=0)
        weight = master[f"{name}.weight"].float()
        found = codes(bundle.tensor(f"{ours}.weight"), "ternary", weight.shape[1])
        assert torch.equal(found.float(), (weight * (1 / mean)).round().clamp(-1, 1))


@pytest.mark.proves(engine="eager", family="bitvla")
def test_actions_of_ternary_weights(golden, openvla_bundle):
    g = Golden(golden / "bitvla")
    actions = load(openvla_bundle("bitvla"), dtype="float32").infer(observation(g)).actions
    assert relative_l2(torch.from_numpy(actions), g["actions"]) <= RELATIVE


def test_every_camera_is_needed(case):
    policy, g = case
    given = observation(g)
    given["images"] = dict(list(given["images"].items())[1:])
    with pytest.raises(ObservationError, match="images"):
        policy.infer(given)


def test_the_instruction_is_lower_cased(case):
    policy, g = case
    found = [policy.infer({**observation(g), "prompt": prompt}).actions for prompt in ("PICK it", "pick it")]
    np.testing.assert_array_equal(*found)


def test_bins_of_tokens(openvla_bundle):
    """Upstream's rule at both ends: the first and last bins, and ids that are no action tokens."""
    model = load(openvla_bundle("openvla-ar"), engine="eager").engine.model
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    ids = np.array([31999, 31998, 31745, 31744, 5, 32063])
    expected = centres[np.clip(32000 - ids - 1, 0, 254)].astype(np.float32)
    for centres in (bin_centres(ids, 256, 32000), bin_centres(torch.from_numpy(ids), 256, 32000).numpy()):
        np.testing.assert_allclose(centres.astype(np.float32), expected, rtol=0, atol=6e-8)
    found = model.action_tokens.chunk(np.array([31999] * 7))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.full((1, 7), expected[0]))
    assert replace(model.config, action_tokens_end=31000).action_tokens_end == 31000
    with pytest.raises(ValueError, match="action_tokens_end: expected"):
        replace(model.config, action_tokens_end=40000)
