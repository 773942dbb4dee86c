"""Vision towers by their fields, against the same computed by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from sinew.engine.plan.gelu import SIGMOID_GELU, SigmoidMLP
from sinew.layers.vit import VisionTransformer, ViTConfig, ViTMLP

SIGLIP = ViTConfig(12, 20, 2, 3, 28, 14, 1e-6)
DINO = ViTConfig(
    12, 20, 2, 3, 28, 14, 1e-6, activation="gelu", prefix_tokens=5, layer_scale=True, final_norm=False
)


def tower(config: ViTConfig) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(config)
    for parameter in model.parameters():  # no norm, bias or scale may be neutral
        nn.init.normal_(parameter, 0.3, 0.5)
    return model.requires_grad_(False)


def by_hand(model: VisionTransformer, pixels: torch.Tensor) -> torch.Tensor:
    config = model.config
    x = model.patch_embedding(pixels).flatten(2).transpose(1, 2) + model.position_embedding.weight
    if config.prefix_tokens:
        x = torch.cat([model.prefix[None].repeat(len(x), 1, 1), x], dim=1)
    for layer in model.layers:
        h = F.layer_norm(x, (12,), layer.norm1.weight, layer.norm1.bias, 1e-6)
        q, k, v = (
            (h @ p.weight.T + p.bias).view(len(x), -1, 3, 4).transpose(1, 2)
            for p in (layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj)
        )
        out = ((q @ k.transpose(2, 3)) / 2).softmax(-1) @ v
        out = layer.attn.o_proj(out.transpose(1, 2).flatten(2))
        x = x + out * (layer.scale1.weight if config.layer_scale else 1)
        h = F.layer_norm(x, (12,), layer.norm2.weight, layer.norm2.bias, 1e-6)
        h = layer.mlp.fc1(h)
        if config.activation == "gelu":
            h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
        else:
            h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        x = x + layer.mlp.fc2(h) * (layer.scale2.weight if config.layer_scale else 1)
    if config.final_norm:
        x = F.layer_norm(x, (12,), model.norm.weight, model.norm.bias, 1e-6)
    return x[:, config.prefix_tokens :]


def test_fields():
    pixels = torch.randn(2, 3, 28, 28)
    for config in (SIGLIP, DINO):
        model = tower(config)
        found = model(pixels)
        assert found.shape == (2, 4, 12)
        torch.testing.assert_close(found, by_hand(model, pixels), rtol=1e-5, atol=1e-5)


def test_fields_matter():
    """Each of them changes the result, so that the comparison above can fail."""
    pixels = torch.randn(1, 3, 28, 28)
    model = tower(DINO)
    before = model(pixels)
    for change in (model.prefix, model.layers[0].scale1.weight, model.layers[1].scale2.weight):
        kept = change.clone()
        change += torch.randn_like(change)
        assert not torch.allclose(model(pixels), before)
        change.copy_(kept)
    model.layers[0].mlp.approximate = "tanh"
    assert not torch.equal(model(pixels), before)


def test_plain_towers_have_no_new_parameters():
    names = set(VisionTransformer(SIGLIP).state_dict())
    assert not [name for name in names if "scale" in name or "prefix" in name]


def test_the_exact_gelu_is_left_alone():
    exact, tanh = tower(DINO), tower(SIGLIP)
    model = nn.ModuleDict({"exact": exact, "tanh": tanh})
    pixels = torch.randn(1, 3, 28, 28)
    before = exact(pixels), tanh(pixels)
    outcome = SIGMOID_GELU.apply(SimpleNamespace(named_modules=model.named_modules))
    assert type(exact.layers[0].mlp) is ViTMLP
    assert type(tanh.layers[0].mlp) is SigmoidMLP
    assert "exact form" in str(outcome)
    assert torch.equal(exact(pixels), before[0])
    torch.testing.assert_close(tanh(pixels), before[1])


def test_the_channels_of_a_token_lie_together():
    """From the first block on: norms of a stream laid out as the patch embedding gives it took ten times as long."""
    model = tower(replace(SIGLIP, final_norm=False))
    seen = []
    model.layers[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].stride(-1)))
    assert model(torch.zeros(2, 3, 28, 28)).is_contiguous()
    assert seen == [1]
