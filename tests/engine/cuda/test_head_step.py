"""A whole step of the head as one operation: a second implementation, in plain PyTorch over weights in tiles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sinew.engine.cuda.fused.layers import FusedAdaptiveLayer, FusedLayer
from sinew.engine.cuda.fused.ops import References
from sinew.engine.cuda.fused.step import HeadStep
from sinew.layers.attention import attend
from sinew.layers.decoder import ACTIVATIONS
from sinew.layers.norm import rms_normalize
from sinew.models.expert import ExpertModel
from sinew.policy import load
from tests.cases import golden_cases
from tests.covering import some
from tests.engine.cuda.cuda_cases import BOUND, ONE_PER_MODEL, Case, Frozen, golden_case, shaken
from tests.engines import run_one
from tests.golden import Golden
from tests.models.stages import observation

TILE = 64  # rows and columns of a tile


class PlainStep(HeadStep):
    """A step without any operation of ``Ops``.

    The weights of each block of the head are one stream of tiles, in the order in which the step reads them.
    """

    name = "plain-step"

    @classmethod
    def why_not(cls, model: Any) -> str | None:
        if not isinstance(model, ExpertModel):
            return "the head is not an expert over keys and values"
        fused = all(isinstance(layer, (FusedLayer, FusedAdaptiveLayer)) for layer in model.expert.layers)
        return None if fused else "the layers of the head are not fused"

    def __init__(self, model: Any):
        super().__init__(model)
        expert, sizes = model.expert, model.config.expert
        self.is_self = getattr(expert, "is_self", [True] * len(expert.layers))
        self.adaptive = isinstance(expert.layers[0], FusedAdaptiveLayer)
        # The method that splits a row of pi0.5's table.
        self.modulations = model.modulations if self.adaptive else None
        self.heads, self.final_eps = (sizes.num_heads, sizes.num_kv_heads), expert.norm.eps
        self.blocks: list[Any] = []
        for number, layer in enumerate(expert.layers):
            first = layer.attn.q_proj if layer.attn.is_cross else layer.attn.qkv_proj
            read = [first, layer.attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
            self.register_buffer(f"block_{number}", torch.cat([tiled(each.weight) for each in read]))
            shapes, biases = [each.weight.shape for each in read], [each.bias for each in read]
            self.blocks.append((shapes, biases, layer.input_norm.eps, layer.post_norm.eps, layer.mlp.kind))
        # The projections at both ends of a step stay where the model has them.
        names = ("action_in_proj", "action_part", "action_time_mlp_out", "action_out_proj")
        ends = {name: getattr(model, name) for name in names if hasattr(model, name)}
        self.ends = {name: (each.weight, each.bias) for name, each in ends.items()}

    def forward(self, x: Tensor, time_embedding: Tensor, context: Any) -> Tensor:
        state, own_rotation, (H, KV) = context.state, context.rotations[0], self.heads
        per_layer, final = [((), ())] * len(self.blocks), ()
        if self.adaptive:
            per_layer, final = self.modulations(time_embedding)
            h = F.linear(x, *self.ends["action_in_proj"])
        else:
            mixed = F.linear(x, *self.ends["action_part"]) + time_embedding[:, None]
            h = F.linear(F.silu(mixed), *self.ends["action_time_mlp_out"])
        h = h if state is None else torch.cat([state, h], dim=1)
        for number, ((before, after), kv) in enumerate(zip(per_layer, context.kv, strict=True)):
            shapes, biases, first_eps, second_eps, activation = self.blocks[number]
            weights = untiled(getattr(self, f"block_{number}"), shapes)
            qkv = F.linear(norm(h, first_eps, before), weights[0], biases[0])
            if self.is_self[number]:
                q, k, v = qkv.unflatten(-1, (H + 2 * KV, -1)).split([H, KV, KV], dim=-2)
                keys, values = (torch.cat(pair, 1) for pair in zip(kv, (own_rotation(k), v), strict=True))
                attended = attend(own_rotation(q), keys, values, context.masks[0])
            else:
                q = context.rotations[1](qkv.unflatten(-1, (H, -1)))
                attended = attend(q, *kv, context.masks[1])
            h = h + gate(before) * F.linear(attended, weights[1], biases[1])
            opened, up = F.linear(norm(h, second_eps, after), weights[2], biases[2]).chunk(2, -1)
            h = h + gate(after) * F.linear(ACTIVATIONS[activation](opened) * up, weights[3], biases[3])
        h = h if state is None else h[:, 1:]
        return F.linear(norm(h, self.final_eps, *final), *self.ends["action_out_proj"])


def norm(h: Tensor, eps: float, modulation: Any = ()) -> Tensor:
    h = rms_normalize(h, eps)
    return h * (1 + modulation.scale) + modulation.shift if modulation else h


def gate(modulation: Any) -> Any:
    return modulation.gate if modulation else 1.0


def tiled(weight: Tensor) -> Tensor:
    """Cut a matrix into tiles, [tiles, TILE, TILE], row of tiles by row of tiles. The last ones are padded."""
    N, K = weight.shape
    padded = F.pad(weight.detach(), (0, -K % TILE, 0, -N % TILE))
    return padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).transpose(1, 2).flatten(0, 1)


def untiled(stream: Tensor, shapes: list[Any]) -> list[Tensor]:
    weights, at = [], 0
    for N, K in shapes:
        rows, columns = math.ceil(N / TILE), math.ceil(K / TILE)
        tiles = stream[at : at + rows * columns].unflatten(0, (rows, columns))
        weights.append(tiles.transpose(1, 2).flatten(2).flatten(0, 1)[:N, :K])
        at += rows * columns
    return weights


@pytest.fixture
def open_case(golden, smolvla_bundle, pi_bundle):
    def make(name: str) -> Case:
        bundle = pi_bundle if name.startswith("pi") else smolvla_bundle
        return shaken(golden_case(golden, bundle, name))

    return make


@pytest.fixture
def with_step(monkeypatch):
    monkeypatch.setattr(References, "steps", (PlainStep,))


def outcome(engine) -> Any:
    return next(each for each in engine.plan.outcomes if each.name == "fuse head step")


@pytest.mark.parametrize("name", ONE_PER_MODEL)
def test_a_whole_step_gives_the_actions_of_the_layers(open_case, with_step, name):
    """In one graph and in stages, under a recorder, and without a layer of the head."""
    case = open_case(name)
    recorder = Frozen()
    engine = case.engine(recorder)
    assert outcome(engine).status == "applied"
    assert "plain-step" in outcome(engine).reason
    for layer in engine.model.expert.layers:
        layer.project = layer.query = layer.finish = None
    assert case.gap(engine) <= BOUND
    whole, _ = run_one(engine, case.inputs(), case.noise, 4)
    apart, _ = run_one(engine, case.inputs(), case.noise, 4, apart=True)
    assert np.array_equal(whole, apart)
    assert recorder.log.count("replay step") == 4


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_a_layout_of_its_own_is_counted_and_recorded(open_case, with_step, monkeypatch, name):
    """The streams are in the memory of the engine, and a recording reads nothing from the host."""
    case = open_case(name)
    engine = case.engine()
    streams = sum(tensor.nbytes for tensor in engine.model.head_step.buffers())
    monkeypatch.setattr(References, "steps", ())
    assert engine.facts.weights_nbytes == case.engine().facts.weights_nbytes + streams
    stages = engine.audit(case.inputs().batched(), 4)
    assert [stage.breaks for stage in stages] == [()] * 3
    assert case.gap(engine) <= BOUND
    engine.model.head_step.block_0 = engine.model.head_step.block_0.roll(1, 0)  # two tiles in a wrong order
    assert case.gap(engine) > BOUND


WITHOUT = {
    "act-2cam": "the layers of ACT compute each step; not plain-step (the head is not an expert",
    "groot-n17": "the layers of Gr00tQwen compute each step; not plain-step (the head is not an expert",
    "openvla-ar": "OpenVLA generates tokens and has no solver steps",
}


@pytest.mark.parametrize("case", WITHOUT)
def test_a_family_without_a_whole_step_is_told_by_name(with_step, case_bundle, case):
    policy = load(case_bundle(case), "cpu", "fp32", "eager", allow_missing_cameras=True)
    seen = observation(case, Golden(golden_cases() / case))
    engine = Case(policy, seen, policy.processor.noise(seen)[0]).engine()
    assert outcome(engine).status == "not applicable"
    assert outcome(engine).reason.startswith(WITHOUT[case])


def test_the_layers_compute_a_step_unless_an_operation_does(open_case, monkeypatch):
    """Without kernels, too, and if a listed operation does not support the device."""
    case = open_case("pi0-2cam")
    assert (
        outcome(case.engine()).reason
        == "the layers of PI0 compute each step; References has no operation for a whole step"
    )
    monkeypatch.setattr(PlainStep, "why_not", classmethod(lambda cls, model: "96 of 132 SMs are free"))
    monkeypatch.setattr(References, "steps", (PlainStep,))
    engine = case.engine()
    assert outcome(engine).reason.endswith("not plain-step (96 of 132 SMs are free)")
    assert case.gap(engine) <= BOUND
    assert "PlainOps has no operation" in outcome(case.engine(kernels=False)).reason
