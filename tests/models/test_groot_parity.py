"""GR00T N1.5, N1.6 and N1.7 against NVIDIA's and LeRobot's stored actions; their stages are in test_stages.py."""

from __future__ import annotations

import pytest
import torch

from sinew.layers.qwen_vit import block_order
from sinew.policy import Policy, load
from tests.closeness import assert_close, rounding
from tests.convert.test_groot import CASES, observation, reference_pixels
from tests.golden import Golden, assert_parity


@pytest.fixture(scope="module", params=CASES)
def case(request, golden, groot_bundle) -> tuple[Policy, Golden]:
    return load(groot_bundle(request.param), dtype="float32"), Golden(golden / request.param)


def read(policy: Policy, g: Golden) -> tuple[torch.Tensor, ...]:
    """Image tokens of the reference's pixels, and the other arguments of ``read``."""
    pixels = torch.from_numpy(reference_pixels(g))[None]
    valid = g["attention_mask"] == 1
    cameras = torch.ones(1, len(g.cameras), dtype=torch.bool)
    state = g["state_normalized"][:, 0]
    return policy.engine.model.embed_images(pixels), cameras, g["input_ids"], valid, state


def test_image_tokens_are_found(case):
    policy, g = case
    if "image_mask" in g.tensors:
        assert torch.equal(g["input_ids"] == policy.engine.model.config.image_token, g["image_mask"])


@torch.inference_mode()
def test_positions_of_images_equal_the_reference(golden, groot_bundle):
    policy, g = load(groot_bundle("groot-n17"), dtype="float32"), Golden(golden / "groot-n17")
    model, tokens = policy.engine.model, g["input_ids"]
    found = model.positions(tokens == model.config.image_token, g["attention_mask"] == 1)
    assert torch.equal(found.permute(2, 0, 1), g["position_ids"][1:])


def test_time_buckets_are_the_references(case):
    """int(k / float(N) * buckets), for every number of steps that a request may ask for."""
    policy, g = case
    model = policy.engine.model
    buckets: list[int] = []
    hook = model.head.embed_time
    model.head.embed_time = lambda bucket: buckets.extend(bucket.tolist())  # type: ignore[method-assign]
    try:
        for count in range(1, 101):
            buckets.clear()
            for time in model.solver.times(count):
                model.embed_time(torch.tensor([time], dtype=torch.float64))
            assert buckets == [int(k / float(count) * 1000) for k in range(count)], count
    finally:
        model.head.embed_time = hook
    assert g["t"][:, 0].tolist() == [0, 250, 500, 750]


def test_block_order_puts_squares_side_by_side():
    rows, cols = 4, 6
    grid = torch.arange(rows * cols)[:, None]
    found = block_order(grid, rows, cols, 2)[:, 0].view(-1, 2, 2)
    assert found[0].tolist() == [[0, 1], [6, 7]]
    assert found[3].tolist() == [[12, 13], [18, 19]]


@torch.inference_mode()
def test_padding_of_the_prompt_changes_nothing(case):
    """Engines with buckets pad it; upstream never does for one observation."""
    policy, g = case
    model = policy.engine.model
    image_tokens, cameras, tokens, valid, state = read(policy, g)
    padded = torch.nn.functional.pad(tokens, (0, 7), value=3), torch.nn.functional.pad(valid, (0, 7))

    def output(ids, mask):
        context = model.read(image_tokens, cameras, ids, mask, state)
        return model.act(g["noise"], model.embed_time(torch.zeros(1, dtype=torch.float64)), context)

    assert_close(rounding(output, tokens, valid), output(*padded))


def test_both_layouts_of_n15_act_alike(golden, groot_bundle):
    """The same weights from NVIDIA's shards and from LeRobot's file; one reads the task in brackets, and crops."""
    g = Golden(golden / "groot-n15")
    first, second = (load(groot_bundle(name), dtype="float32") for name in ("groot-n15", "groot-n15-nvidia"))
    for policy in (first, second):
        assert_parity(
            policy.processor.actions(g.numpy("action_pred")[0], observation(g)), g.numpy("actions")[0]
        )
    tokens = g.numpy("input_ids")[0].tolist()
    assert tokens[:20] == second.processor.inputs(observation(g)).tokens[:20].tolist()
