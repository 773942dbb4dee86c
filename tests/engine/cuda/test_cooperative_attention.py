"""Attention whose programs wait for each other: against softmax in float64, where it is offered, and that it ends.

The interpreter runs programs one after another, so a launch is two there: all programs up to their arrival, then all
from their wait on. What a waiting program looks at, and how it counts, is the compiled kernel's own text in both.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.shapes import dims, problems
from sinew.engine.cuda.kernels import Workspace, packed_attention, tuning
from sinew.engine.cuda.kernels.launch import Tile
from sinew.engine.cuda.kernels.tiles import ARCHITECTURES, LARGEST_SPLIT, candidates
from tests.engine.cuda.kernel_checks import AT_ONCE, DEVICE, needs_triton

HEADS = [each for each in problems() if each.kernel == "packed_attention" and each.where.startswith("head")]
PI05 = next(each for each in HEADS if each.model == "pi0.5")


def softmax(q, k, v, mask) -> np.ndarray:
    """Each query of each head by itself, in float64; one that sees nothing averages all values."""
    out, group = np.empty_like(q), q.shape[1] // k.shape[1]
    for m, h in np.ndindex(q.shape[:2]):
        seen = mask[m] if mask[m].any() else np.ones_like(mask[m])
        scores = (k[seen, h // group] @ q[m, h] if mask[m].any() else np.zeros(len(k))) / np.sqrt(q.shape[2])
        weights = np.exp(scores - scores.max())
        out[m, h] = weights @ v[seen, h // group] / weights.sum()
    return out


def case(
    M: int, H: int, KV: int, D: int, P: int, S: int, key_mask: bool = False, hidden: int = 0, seed: int = 0
):
    """(q, prefix, own or None, mask) on the device of the checks; the first ``hidden`` keys may be seen by none."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    mask = torch.rand(1 if key_mask else M, P + S, generator=generator) > 0.3
    mask[:, :hidden] = False
    if not key_mask:
        mask[M // 2] = False
    own = (new(S, KV, D), new(S, KV, D)) if S else None
    return new(M, H, D), (new(P, KV, D), new(P, KV, D)), own, mask.to(DEVICE).expand(M, -1)


def run(q, kv, own, mask, tile: Tile, turns: int = 0) -> tuple[torch.Tensor, Workspace]:
    workspace = Workspace(1 << 16, 64, DEVICE)
    workspace.parts.fill_(float("nan"))
    workspace.turns.fill_(turns)
    tile = Tile(tile.m, tile.n, split=-(-mask.shape[1] // tile.n), cooperative=True)
    out = packed_attention.packed_attention(q, kv, mask, own=own, workspace=workspace, tile=tile)
    return out, workspace


@pytest.mark.kernels
@needs_triton
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    M=st.integers(1, 9),
    KV=st.integers(1, 2),
    G=st.integers(1, 4),
    D=st.sampled_from([16, 32]),
    P=st.integers(1, 70),
    S=st.integers(0, 19),
    key_mask=st.booleans(),
    hidden=st.integers(0, 40),
    n=st.sampled_from([16, 32]),
    turns=st.sampled_from([0, LARGEST_SPLIT, 2**31 - LARGEST_SPLIT]),  # the last: the counter turns negative
)
def test_it_is_softmax(G: int, KV: int, n: int, turns: int, **sizes) -> None:
    q, kv, own, mask = case(H=KV * G, KV=KV, **sizes)
    out, workspace = run(q, kv, own, mask, Tile(16, n), turns)
    k, v = kv if own is None else (torch.cat(pair) for pair in zip(kv, own, strict=True))
    want = softmax(*(tensor.double().cpu().numpy() for tensor in (q, k, v)), mask.cpu().numpy())
    assert np.abs(out.double().cpu().numpy() - want).max() <= 4e-6
    assert not (workspace.turns % LARGEST_SPLIT).any()


@pytest.mark.kernels
@needs_triton
def test_programs_that_wait_in_vain_give_up_and_say_so() -> None:
    """A counter that never comes to a whole round, as if a program of the launch had not run."""
    out, _ = run(*case(5, 6, 2, 16, 37, 5), AT_ONCE, turns=1)
    assert out.isnan().all()


def test_a_program_per_block_of_keys_or_a_refusal() -> None:
    q, kv, own, mask = case(5, 6, 2, 16, 37, 5)
    for split in (2, 4):
        with pytest.raises(ValueError, match=r"tile: expected split 3, at most 64, got "):
            packed_attention.prepare(
                q,
                kv,
                mask,
                q,
                Workspace(1 << 16, 64, DEVICE),
                own=own,
                tile=Tile(16, 16, split=split, cooperative=True),
            )


def test_more_programs_than_multiprocessors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two heads of keys, one block of 15 rows and three of keys each: six programs."""
    monkeypatch.setattr(packed_attention, "multiprocessors", lambda device: 5)
    with pytest.raises(ValueError, match=r"tile: expected at most 5 programs at once, got 6"):
        run(*case(5, 6, 2, 16, 37, 5), AT_ONCE)


def at_once(capability: int, multiprocessors: int | None = None) -> dict[str, int]:
    """Programs of the cooperative tiles that are offered for each head."""
    found = {}
    for problem in HEADS:
        rows, *_, heads, _ = dims(problem)
        offered = candidates("packed_attention", dims(problem), torch.bfloat16, capability, multiprocessors)
        assert not offered[0].cooperative  # before one has run on a GPU
        for tile in offered:
            if tile.cooperative:
                found[f"{problem.name}, {tile.m}"] = -(-rows // tile.m) * heads * tile.split
    return found


def test_it_is_offered_where_its_programs_run_at_once() -> None:
    h200 = at_once(90, 132)
    assert (
        h200
        == at_once(90)
        == {
            "pi0.5 head attention, 64": 112,
            "pi0 head attention, 64": 72,
            "smolvla head attention, 32": 100,
            "smolvla head attention, 64": 60,
            "smolvla head cross, 32": 75,
            "smolvla head cross, 64": 45,
        }
    )
    assert at_once(90, 112) == h200
    assert "pi0.5 head attention, 64" not in at_once(90, 111)
    assert at_once(80) == {name: count for name, count in h200.items() if count <= 108}
    assert at_once(90, 44) == {}
    for capability in ARCHITECTURES:  # a prefix of more blocks than a stored tile may have
        long = candidates("packed_attention", (50, 64 * 65, 0, 1, 256), torch.bfloat16, capability, 132)
        assert not any(tile.cooperative for tile in long)


def test_a_tuned_one_is_left_where_the_device_has_become_smaller(tmp_path, monkeypatch) -> None:
    """As a slice of the same name might have."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    has = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    device = torch.device("cuda:0")
    problem = "packed_attention", dims(PI05), torch.bfloat16, device
    tuning.choose.cache_clear()
    entry = tuning.tune(*problem, lambda tile: tile, lambda tile: 1.0 - 0.5 * tile.cooperative)
    assert json.loads(tuning.cache_file(device).read_text())
    tile, reason = tuning.choose(*problem)
    assert (tile.cooperative, tile.split) == (True, 16)
    assert entry["tile"]["cooperative"] is True
    assert reason.startswith("tuned")
    has.multi_processor_count = 60
    tuning.choose.cache_clear()
    tile, reason = tuning.choose(*problem)
    tuning.choose.cache_clear()
    assert not tile.cooperative
    assert reason == "default: the tuned tile is not offered with 60 multiprocessors"


def test_the_launch_is_a_cooperative_one_behind_a_plain_edge() -> None:
    q, kv, own, mask = case(5, 6, 2, 16, 37, 5)
    workspace, tile = Workspace(1 << 16, 64, DEVICE), Tile(16, 16, split=3, cooperative=True)
    made = packed_attention.prepare(q, kv, mask, q, workspace, own=own, tile=tile, pdl=True)
    assert made.options()["launch_cooperative_grid"] is True
    assert "launch_pdl" not in made.options()
    assert made.arguments["PDL"] is True  # the kernel after it may begin early
