"""Blocks that no rewrite knows: subclasses of those it does know. Every engine leaves them alone, computes the same
actions, and says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sinew.core import Observation
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.fuse import ON_CUDA
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.onnx.export import join_attention
from sinew.engine.plan.engine import PlannedEngine
from sinew.engine.plan.plan import REWRITES, Plan
from sinew.engine.plan.rewrite import RewriteOutcome
from sinew.layers.decoder import DecoderAttention
from sinew.layers.linear import Linear
from sinew.layers.norm import rms_normalize
from sinew.layers.rope import Rotation
from sinew.layers.vit import ViTAttention
from sinew.policy import load
from tests.closeness import assert_close
from tests.covering import pairs
from tests.engines import eager_rounding, run_one
from tests.golden import Golden

CPU = torch.device("cpu")


class NormedAttention(DecoderAttention):
    """Queries and keys are normalised per head before they are rotated, as in Qwen3."""

    def project(self, h: Tensor, rotate: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.key_value(h, h)
        q, k = (3 * rms_normalize(x, 1e-6).to(x.dtype) for x in (self.query(h), k))
        return rotate(q), rotate(k), v


class RotaryAttention(ViTAttention):
    """Queries and keys are rotated by their position, and large, so that what they see matters."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        rotate = Rotation.at(torch.arange(x.shape[1], device=x.device)[None], self.head_dim, 100.0)
        q, k = (rotate(30 * p.unflatten(-1, (-1, self.head_dim))).flatten(2) for p in (q, k))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(self.attend(*self.project(x)))


class TernaryLinear(Linear):
    """Weights of -1, 0 and 1 times one scale for the whole matrix, as in BitNet. Says nothing of itself."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        return nn.functional.linear(x, (self.weight / scale).round().clamp(-1, 1) * scale, self.bias)


def decoder_attention(model: nn.Module) -> list[str]:
    return _become(model, DecoderAttention, NormedAttention, lambda m: not m.is_cross)


def vision_attention(model: nn.Module) -> list[str]:
    return _become(model, ViTAttention, RotaryAttention)


def ternary_layers(model: nn.Module) -> list[str]:
    return _become(model, Linear, TernaryLinear, lambda m: min(m.weight.shape) > 16)


def _become(
    model: nn.Module, known: type, unknown: type, where: Callable[[nn.Module], bool] = lambda _: True
) -> list[str]:
    found = [(name, module) for name, module in model.named_modules() if type(module) is known]
    names = []
    for name, module in found:
        if where(module):
            module.__class__ = unknown
            names.append(name)
    assert names
    return names


UNKNOWN = {
    NormedAttention: decoder_attention,
    RotaryAttention: vision_attention,
    TernaryLinear: ternary_layers,
}


CASES = ("smolvla-2cam", "pi0-2cam", "pi05-2cam")
CELLS = pairs(CASES, UNKNOWN, *zip(CASES, UNKNOWN, strict=True))


@pytest.fixture(params=CASES)
def case(request, golden, smolvla_bundle, pi_bundle):
    name = request.param
    policy = load(
        (pi_bundle if name.startswith("pi") else smolvla_bundle)(name), dtype="float32", engine="eager"
    )
    g = Golden(golden / name)
    generator = torch.Generator().manual_seed(5)
    for parameter in policy.engine.model.parameters():  # norms far from one, so that losing one shows
        if parameter.ndim == 1:
            parameter.data = parameter + torch.rand(parameter.shape, generator=generator) - 0.5
    inputs = policy.processor.inputs(Observation.from_mapping(g.observation()))
    return policy, inputs, g.numpy("noise")[0]


def assert_said(outcomes: tuple[RewriteOutcome, ...], kind: type) -> None:
    """Some rewrite names the class that it does not know; none that packs or fuses everything claims it all."""
    assert any(kind.__name__ in outcome.reason for outcome in outcomes), outcomes


@pytest.mark.parametrize(("case", "kind"), CELLS, indirect=["case"])
def test_every_rewrite_leaves_an_unknown_block_alone(case, kind):
    policy, inputs, noise = case
    model = policy.engine.model
    plain = run_one(EagerEngine(model, CPU), inputs, noise, 3)[0]
    names = UNKNOWN[kind](model)
    wanted = eager_rounding(model, inputs, noise, 3)
    assert wanted.refusal(plain)  # a rewrite that takes it for what it knew would be seen
    for rewrites in (*([one] for one in REWRITES), list(REWRITES)):
        plan = Plan.of(model, 3, rewrites)
        assert_close(wanted, run_one(PlannedEngine(plan, CPU), inputs, noise, 3)[0], str(rewrites))
    assert_said(plan.outcomes, kind)
    modules = dict(plan.model.named_modules())
    kept = [name for name in names if name in modules]  # what is cut off is not there any more
    assert kept
    assert {type(modules[name]) for name in kept} == {kind}


@pytest.mark.parametrize("options", [{}, {"kernels": False}], ids=["kernels", "torch"])
@pytest.mark.parametrize(("case", "kind"), CELLS, indirect=["case"])
def test_the_cuda_engine_leaves_an_unknown_block_alone(case, kind, options):
    policy, inputs, noise = case
    model = policy.engine.model
    UNKNOWN[kind](model)
    plan = Plan.of(model, rewrites=ON_CUDA)
    engine = CudaEngine(plan, CPU, processing=policy.manifest.processing, options=CudaOptions(**options))
    fused = engine.plan.outcomes[len(plan.outcomes) :]
    found, wanted = run_one(engine, inputs, noise, 3)[0], eager_rounding(model, inputs, noise, 3)
    assert_close(wanted, found)
    assert_said((*plan.outcomes, *fused), kind)
    for name, module in engine.model.named_modules():
        if isinstance(module, kind):
            assert type(module) is kind, name


def test_the_onnx_operator_takes_plain_attention_alone(case):
    model = case[0].engine.model
    assert join_attention(Plan.of(model, rewrites=()).model).status == "applied"
    vision_attention(model)
    reference = Plan.of(model, rewrites=()).model
    outcome = join_attention(reference)
    assert outcome.status == "not applicable"
    assert "RotaryAttention is a subclass of ViTAttention" in outcome.reason
    pixels = torch.from_numpy(case[1].pixels)[None]
    with torch.no_grad():  # the operator has no implementation: what runs here does not use it
        assert torch.equal(reference.embed_images(pixels), model.embed_images(pixels))
