"""Launches of kernels: what they refuse, and which tiles they take. What the compiler makes of them is in
test_fake_gpu.py."""

from __future__ import annotations

import pytest
import torch

from sinew.engine.cuda.kernels import KERNELS, Workspace
from sinew.engine.cuda.kernels.lang import MissingTriton, triton
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.kernels.tiles import ON_90, TILES, default, tile_for
from tests.engine.cuda.kernel_checks import CHECKS

CPU = torch.device("cpu")


def test_errors_name_the_tensor() -> None:
    x, w = torch.zeros(3, 32), torch.zeros(8, 32)
    with pytest.raises(ValueError, match=r"bias: expected shape \[8\], got \[9\]"):
        KERNELS["norm_linear"].launch(x, w, bias=torch.zeros(9))
    with pytest.raises(ValueError, match=r"weight: expected dtype torch.float32, got torch.bfloat16"):
        KERNELS["splitk_linear"].launch(x, w.bfloat16(), workspace=Workspace(1, 1, "cpu"))
    with pytest.raises(ValueError, match=r"weight: expected contiguous memory"):
        KERNELS["gated_mlp"].launch(x, torch.zeros(32, 8).T, activation="silu")
    deep = torch.zeros(3, 512), torch.zeros(8, 512)  # in parts, which are joined in the workspace
    with pytest.raises(ValueError, match=r"workspace: expected at least \d+ floats, got 1"):
        KERNELS["splitk_linear"].launch(*deep, workspace=Workspace(1, 1, "cpu"))
    heads = torch.zeros(3, 1, 16), torch.zeros(3, 1, 16), torch.zeros(3, 1, 16)
    with pytest.raises(
        ValueError, match=r"workspace: must be passed for a tile that splits the depth into 2 parts"
    ):
        KERNELS["qkv_rope"].launch(
            torch.zeros(3, 32), torch.zeros(48, 32), *2 * [torch.zeros(3, 8)], *heads, tile=Tile(split=2)
        )
    with pytest.raises(ValueError, match=r"activation: expected one of gelu_tanh, silu, got 'relu'"):
        KERNELS["gated_mlp"].launch(x, w, activation="relu")
    q, kv = torch.zeros(1, 2, 3, 24), (torch.zeros(1, 4, 1, 24),) * 2
    mask = torch.ones(1, 2, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"q: expected a head size that is a power of two"):
        KERNELS["packed_attention"].launch(q, kv, mask, workspace=Workspace(1, 1, "cpu"))
    with pytest.raises(ValueError, match=r"k: expected 2 observations, got 1"):
        KERNELS["packed_attention"].launch(
            torch.zeros(2, 2, 3, 16), (torch.zeros(1, 4, 1, 16),) * 2, mask.expand(2, -1, -1),
            workspace=Workspace(1, 1, "cpu"),
        )  # fmt: skip


@pytest.mark.skipif(triton is not None, reason="triton is installed")
def test_without_triton_a_launch_says_so() -> None:
    with pytest.raises(MissingTriton, match="pip install"):
        KERNELS["norm_linear"].launch(torch.zeros(3, 32), torch.zeros(8, 32))


def test_the_registry_the_tiles_and_the_checks_name_the_same_kernels() -> None:
    assert set(KERNELS) == set(TILES) == set(CHECKS)
    assert set(ON_90) < set(TILES)


def test_only_the_measured_architecture_has_tiles_of_its_own() -> None:
    problem = "splitk_linear", (50, 1024, 4096), torch.bfloat16
    others = {default(*problem, capability) for capability in (80, 86, 87, 89, 100, 110, 120, 130)}
    assert others == {tile_for(*problem, CPU)}
    assert default(*problem, 90) not in others
    with pytest.raises(ValueError, match=r"compute capability: expected 8\.0 or newer, got 7\.5"):
        default(*problem, 75)


def test_a_gpu_takes_the_tile_of_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "splitk_linear", (50, 1024, 4096), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert tile_for(*problem, torch.device("cuda:0")) == default(*problem, 90)
