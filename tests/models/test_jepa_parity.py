"""VLA-JEPA against LeRobot's stored actions; its stages are in test_stages.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sinew.policy import load
from tests.closeness import FACTOR, UNIT, assert_close, rounding
from tests.convert.test_vla_jepa import observation
from tests.engines import needs_half
from tests.golden import Golden

BFLOAT16 = 2.0**-8  # the largest relative error of one rounding to it


@pytest.fixture(scope="module")
def case(golden, jepa_bundle):
    return load(jepa_bundle, dtype="float32", engine="eager"), Golden(golden / "vla-jepa")


def read(policy, g) -> tuple[torch.Tensor, ...]:
    """The arguments of ``read``."""
    inputs = policy.processor.inputs(observation(g))
    tensors = [torch.from_numpy(np.asarray(value))[None] for value in (inputs.pixels, inputs.camera_mask)]
    tokens, mask, state = (
        torch.from_numpy(value)[None] for value in (inputs.tokens, inputs.token_mask, inputs.state)
    )
    return policy.engine.model.embed_images(tensors[0]), tensors[1], tokens, mask, state


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

    def output(ids, mask):
        context = model.read(image_tokens, cameras, ids, mask, state)
        return model.act(g["noise"][None], model.embed_time(torch.zeros(1, dtype=torch.float64)), context)

    assert_close(rounding(output, tokens, valid), output(*padded))


@needs_half
@pytest.mark.proves(engine="eager", precision="bf16", family="vla_jepa")
def test_the_head_stays_in_float32(case, jepa_bundle):
    """Upstream computes it there whatever the language model's dtype."""
    policy = load(jepa_bundle, dtype="bfloat16", engine="eager")
    model, g = policy.engine.model, case[1]
    assert model.head.dit.dtype == torch.float32
    matrices = (each for each in model.language.layers.parameters() if each.ndim == 2)
    assert {each.dtype for each in matrices} == {torch.bfloat16}
    wide = case[0].engine.model
    arguments = read(policy, g)
    with torch.inference_mode():
        context = model.read(*arguments)
        assert {each.dtype for each in (*context.keys, *context.values)} == {torch.float32}
        time_embedding = model.embed_time(torch.zeros(1, dtype=torch.float64))
        given = model.act(g["noise"][None], time_embedding, context)
    # Of one context the two heads make the same; the context differs, by the bits that bfloat16 has fewer.
    assert_close(rounding(wide.act, g["noise"][None], time_embedding, context), given)
    exact = rounding(lambda: wide.read(*read(case[0], g)).keys[0])
    off = (context.keys[0].double() - exact.found).square().mean().sqrt()
    assert 0 < off <= FACTOR * exact.unit * BFLOAT16 / UNIT
