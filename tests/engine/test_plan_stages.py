"""The planned model as functions of tensors: what engines that record a program get."""

from __future__ import annotations

import pytest
import torch

from sinew.core import Observation
from sinew.engine.example import Shapes
from sinew.engine.plan.plan import Plan
from sinew.engine.plan.stages import stages
from sinew.models.solvers import solve
from sinew.policy import load
from tests.closeness import assert_close
from tests.covering import pairs
from tests.engines import eager_rounding
from tests.golden import Golden

CASES = ["smolvla-2cam", "pi0-2cam", "pi05-2cam"]


@pytest.fixture(params=CASES)
def case(request, golden, smolvla_bundle, pi_bundle):
    name = request.param
    policy = load(
        (pi_bundle if name.startswith("pi") else smolvla_bundle)(name), dtype="float32", engine="eager"
    )
    g = Golden(golden / name)
    inputs = policy.processor.inputs(Observation.from_mapping(g.observation()))
    arrays = (inputs.pixels, inputs.camera_mask, inputs.tokens, inputs.token_mask, inputs.state)
    return policy, g, inputs, tuple(torch.from_numpy(array)[None] for array in arrays)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "rewrites"),
    pairs(CASES, (None, ()), ("smolvla-2cam", None), ("pi05-2cam", None), ("pi0-2cam", ())),
    indirect=["case"],
)
def test_stages_are_the_model(case, rewrites):
    policy, g, inputs, tensors = case
    model = policy.engine.model
    plan = Plan.of(model, rewrites=rewrites)
    found = stages(plan, Shapes.of(policy.manifest))
    vision, read, step, names, grows = found.vision, found.read, found.step, found.reads, found.grows
    reads = read(vision(tensors[0]), *tensors[1:])
    assert len(reads) == len(set(names)) == len(grows)
    evaluations = model.solver.steps(4), plan.time_embeddings(4)
    chunk = solve(lambda x, m: step(x, m, *reads), g["noise"], *evaluations)[0].numpy()
    assert_close(eager_rounding(model, inputs, g.numpy("noise")[0], 4), chunk)


@torch.no_grad()
@pytest.mark.slow  # tests/engine/test_onnx.py runs the graphs of such programs at other lengths
def test_stages_export_with_any_prompt_length(case):
    """One recorded program serves every prompt: recorded at one length, run at another."""
    policy, g, _, (pixels, camera_mask, tokens, token_mask, state) = case
    plan = Plan.of(policy.engine.model)
    found = stages(plan, Shapes.of(policy.manifest))
    vision, read, step, names, grows = found.vision, found.read, found.step, found.reads, found.grows
    image_tokens = vision(pixels)
    arguments = (image_tokens, camera_mask, tokens, token_mask, state)
    length, prefix = torch.export.Dim("length", min=2, max=500), torch.export.Dim("prefix", min=2, max=2000)
    options = {"strict": False, "prefer_deferred_runtime_asserts_over_guards": True}
    shapes = (None, None, {1: length}, {1: length}, None)
    read_program = torch.export.export(read, arguments, dynamic_shapes=shapes, **options).module()
    longer = torch.cat([tokens, tokens[:, -3:]], dim=1), torch.cat([token_mask, token_mask[:, -3:]], dim=1)
    other = (image_tokens, camera_mask, *longer, state)
    expected = read(*other)
    for name, got, wanted in zip(names, read_program(*other), expected, strict=True):
        torch.testing.assert_close(got, wanted, msg=name)

    axes = tuple(g and {g[0]: prefix + g[1] if g[1] else prefix} for g in grows)
    shapes = {"x": None, "time_embedding": None, "tensors": axes}
    time_embeddings = plan.time_embeddings(4)
    arguments = (g["noise"], time_embeddings[0], *read(*arguments))
    step_program = torch.export.export(step, arguments, dynamic_shapes=shapes, **options).module()
    torch.testing.assert_close(
        step_program(g["noise"], time_embeddings[3], *expected),
        step(g["noise"], time_embeddings[3], *expected),
    )
