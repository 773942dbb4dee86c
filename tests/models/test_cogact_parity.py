"""CogACT against its reference beside the stages (test_stages.py) and the engines (tests/contract): what the processor
makes of a frame and a sentence, guidance, prompts that are filled up, and low bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sinew_client import Client
from sinew_client.errors import ServerError

from sinew.bundle import Bundle
from sinew.families.cogact.model import CogACT
from sinew.models import build_on_meta
from sinew.policy import Policy, load
from tests import processes
from tests.closeness import assert_close, rounding
from tests.engine.cpu.test_cpu_engine import stored
from tests.golden import Golden
from tests.models.stages import arguments, observation
from tests.serve.test_server import START_S, serving

ROWS = slice(100, 103)  # of the pixels, those that the fixture holds


@pytest.fixture(scope="module")
def case(golden: Path, case_bundle: Callable[[str], Path]) -> tuple[Policy, Golden]:
    return load(case_bundle("cogact"), "cpu", "float32", "eager"), Golden(golden / "cogact")


def test_pixels_and_tokens_are_equal(case: tuple[Policy, Golden]) -> None:
    """Pillow's resize, each tower's own scale, small letters, and the two tokens that upstream appends."""
    policy, g = case
    pixels, _, tokens, _, state = arguments(policy, observation("cogact", g))
    torch.testing.assert_close(pixels[0, 0, :, ROWS], g["pixel_rows.full_image"], rtol=0, atol=1e-6)
    assert torch.equal(tokens[0], g["prompt_ids"])
    assert tokens[0, -2:].tolist() == [29871, 2]
    assert state.numel() == 0


@torch.inference_mode()
def test_guidance_goes_beyond_what_the_head_says(case: tuple[Policy, Golden]) -> None:
    """By the difference to what it says of the learned row; at 1 that row is not asked for."""
    policy, g = case
    model: CogACT = policy.engine.model
    pixels, *rest = arguments(policy, observation("cogact", g))
    context = model.read(model.embed_images(pixels), *rest)
    x, time = g["x_t"][3], model.embed_time(g["t"][3:4].double())
    plain = build_on_meta("cogact", replace(model.config, guidance_scale=1.0))
    plain.load_state_dict(model.state_dict(), assign=True)
    told, untold = (
        plain.act(x, time, context._replace(conditions=context.conditions[:, k : k + 1])) for k in (0, 1)
    )
    assert plain.read(model.embed_images(pixels), *rest).conditions.shape[1] == 1
    assert float((told - untold).abs().max()) > 0.01
    wanted = untold + 1.5 * (told - untold)
    assert_close(rounding(model.act, x, time, context), wanted)
    both = context._replace(conditions=context.conditions.expand(2, -1, -1))  # a batch, whose rows stay apart
    x = torch.cat([x, g["x_t"][4]])
    expected = torch.cat([model.act(row[None], time, context) for row in x])
    assert_close(rounding(model.act, x, time, both), expected)


@torch.inference_mode()
def test_padding_changes_nothing(case: tuple[Policy, Golden]) -> None:
    policy, g = case
    pixels, cameras, tokens, mask, state = arguments(policy, observation("cogact", g))
    image_tokens = policy.engine.model.embed_images(pixels)
    padded = torch.nn.functional.pad(tokens, (0, 5), value=3), torch.nn.functional.pad(mask, (0, 5))
    found = policy.engine.model.read(image_tokens, cameras, *padded, state).conditions
    wanted = rounding(lambda: policy.engine.model.read(image_tokens, cameras, tokens, mask, state).conditions)
    assert_close(wanted, found)


@pytest.mark.slow
@pytest.mark.proves(engine="cpu", precision="int8", family="cogact")
def test_low_bits_of_what_upstream_rounds(case: tuple[Policy, Golden], tmp_path: Path) -> None:
    """Towers and language model; the head stays in float32, as upstream's does when the rest is in bfloat16. Two errors
    apart: the weights', eager against eager, and the products', cpu against eager on the same weights."""
    policy, g = case
    recipe = {"vision": "int8", "language": "int8", "head": "int8"}
    small = stored(policy.bundle.path, recipe, tmp_path / "small.gguf")
    kept = [name for name in Bundle(small).lowbit if name.startswith("head.")]
    assert not kept
    given = observation("cogact", g)
    exact = policy.infer(given).actions
    eager, cpu = (load(small, "cpu", "float32", engine).infer(given).actions for engine in ("eager", "cpu"))
    size = np.linalg.norm(exact)
    assert 1e-6 < np.linalg.norm(eager - exact) / size < 0.1
    assert 1e-8 < np.linalg.norm(cpu - eager) / size < 0.1


@pytest.mark.slow  # a server that starts
@pytest.mark.proves(wire="native", family="cogact")
def test_a_server_answers_what_the_policy_does(case: tuple[Policy, Golden], tmp_path: Path) -> None:
    policy, g = case
    given = observation("cogact", g)
    port = processes.free_port()
    with (
        serving(tmp_path, policy.bundle.path, "--wire", f"native:{port}", "--threads", 1),
        Client(f"tcp://127.0.0.1:{port}", timeout=START_S) as client,
    ):
        for asked in (given, replace(given, solver_steps=4)):
            wanted = policy.infer(asked).actions
            np.testing.assert_allclose(client.infer(asked).actions, wanted, atol=1e-5, rtol=0)
        with pytest.raises(ServerError, match="solver_steps: expected 25 or 34, got 30"):
            client.infer(replace(given, solver_steps=30))
