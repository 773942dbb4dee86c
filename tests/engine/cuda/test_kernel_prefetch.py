"""What a program asks for before its input is ready: its own part of the weight, once, and nothing beyond it.

What the instruction does cannot be seen without a GPU; which addresses it is given can.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sinew.engine.cuda.kernels import Workspace, lang
from sinew.engine.cuda.kernels.fp8_quantize import E4M3
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import FLOAT32, TILES
from tests.engine.cuda.kernel_checks import DEVICE, module_of, needs_triton

M, N, H, KV, D = 33, 37, 3, 2, 40
KERNELS = ("norm_linear", "gated_mlp", "qkv_rope", "splitk_linear", "fp8_product")
EVEN, UNEVEN = Tile(16, 16, 16, stages=2), Tile(16, 16, 16, 3, stages=2)  # programs per block of the weight

pytestmark = [
    needs_triton,
    pytest.mark.kernels,
    pytest.mark.skipif(DEVICE != "cpu", reason="watches the interpreter"),
]


def prepared(name: str, K: int, **dependent: bool) -> tuple[Launch, torch.Tensor, tuple[torch.Tensor, ...]]:
    """(launch, its weight, what it writes) on a small problem."""
    torch.manual_seed(0)
    x, module = torch.randn(M, K), module_of(name)
    weight = torch.randn({"gated_mlp": 2 * N, "qkv_rope": (H + 2 * KV) * D}.get(name, N), K)
    out = torch.zeros(M, N)
    if name == "fp8_product":
        weight = weight.to(E4M3)
        positional: list[Any] = [x.to(E4M3), torch.ones(M), weight, torch.ones(N), out]
        return module.prepare(*positional, tile=Tile(16, 16, 32, stages=2), **dependent), weight, (out,)
    if name == "splitk_linear":
        made = module.prepare(x, weight, out, Workspace(1 << 16, 64, "cpu"), tile=UNEVEN, **dependent)
        return made, weight, (out,)
    if name == "qkv_rope":
        tables = [torch.rand(M, D // 2) for _ in "cs"]
        outs = tuple(torch.zeros(M, heads, D) for heads in (H, KV, KV))
        workspace = Workspace(1 << 17, 64, "cpu")
        made = module.prepare(x, weight, *tables, *outs, workspace, tile=UNEVEN, **dependent)
        return made, weight, outs
    options = {"activation": "silu"} if name == "gated_mlp" else {}
    return module.prepare(x, weight, out, tile=EVEN, **options, **dependent), weight, (out,)


def number(value: Any) -> int:
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(getattr(value, "value", value))


@pytest.mark.parametrize("cap", [None, 2048], ids=["all", "capped"])
@pytest.mark.parametrize("K", [160, 80, 32])
@pytest.mark.parametrize("name", KERNELS)
def test_every_program_asks_for_its_part(
    name: str, K: int, cap: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cap is not None:
        monkeypatch.setattr(lang, "PREFETCH_BYTES", cap)
    made, weight, _ = prepared(name, K, pdl=True, prefetch=True)
    amount, size = made.arguments["PREFETCH"], weight.element_size()
    depth = -(-K // 16 // made.tile.split) * 16  # of one program
    rows = 32 if name in ("gated_mlp", "qkv_rope") else 16
    assert amount == min(depth, (cap or 1 << 16) // rows // size)
    asked = np.zeros(weight.numel(), int)

    def record(first, rows, row, amount, UPCAST) -> None:
        assert UPCAST
        start, rows, row, amount = (
            (number(first) - weight.data_ptr()) // size,
            *map(number, (rows, row, amount)),
        )
        assert start * size % 16 == 0
        for at in range(start, start + rows * row, row) if amount > 0 else ():
            assert 0 <= at <= weight.numel() - amount, "beyond the weight"
            assert amount * size % 16 == 0
            asked[at : at + amount] += 1

    monkeypatch.setattr(module_of(name), "ask_for", record)
    made()
    wanted = (torch.arange(K) % depth < amount).expand(len(weight), K).flatten()
    assert np.array_equal(asked, wanted.numpy())


@pytest.mark.parametrize("name", KERNELS)
def test_asking_changes_no_result(name: str) -> None:
    plain, _, want = prepared(name, 80)
    asking, _, got = prepared(name, 80, pdl=True, prefetch=True)
    assert (plain.arguments["PREFETCH"], plain.pdl) == (0, False)
    assert asking.arguments["PREFETCH"] > 0
    assert asking.options()["launch_pdl"]
    plain()
    asking()
    assert all(map(torch.equal, got, want))


def test_what_does_not_lie_for_it_is_not_asked_for() -> None:
    made, weight, _ = prepared("norm_linear", 50, pdl=True, prefetch=True)  # rows of 200 bytes
    assert made.arguments["PREFETCH"] == 0
    shifted = torch.zeros(weight.numel() + 1)[1:].view_as(weight)
    assert lang.prefetched(True, True, shifted, 16, 50) == 0
    with pytest.raises(ValueError, match="prefetch: expected pdl=True beside it, got pdl=False"):
        prepared("gated_mlp", 80, prefetch=True)


def test_tiles_have_a_thread_per_row_of_the_weight() -> None:
    regimes = [row for name in KERNELS for row in (*TILES[name].values(), FLOAT32.get(name, {}))]
    tiles = [tile for row in regimes for tile in row.values()]
    assert all(tile.n <= tile.warps * 32 for tile in tiles)
