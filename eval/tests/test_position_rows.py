"""Rule 2: discrete choices are exact. SmolVLM's patch positions, whatever the dtype of the weights.

Appendix E of the vla.cpp supplement: computing the fractional coordinates and boundaries of SmolVLM's
position lookup in floating point selects a neighbour's row for almost every patch, in float32 at least,
and displaces the action chunk by two standard deviations without any error message.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from benchmarks import position_rows as ablation
from sinew.cli.bench import make_observation
from sinew.core import Observation
from sinew.layers.vit import position_rows
from sinew.policy import load
from tests.golden import Golden


def exact(count: int, side: int) -> list[int]:
    """The lookup as it is meant, in rational arithmetic: boundaries k / side, right-open buckets."""
    boundaries = [Fraction(k, side) for k in range(1, side)]
    return [sum(boundary <= Fraction(i, count) for boundary in boundaries) for i in range(count)]


def naive(count: int, side: int, dtype: torch.dtype) -> list[int]:
    """The lookup in floating point, as transformers 4.57 evaluates it: coordinates of a slightly shortened
    unit interval, compared in ``dtype`` with rounded boundaries."""
    boundaries = torch.arange(1 / side, 1.0, 1 / side, dtype=dtype)
    coordinates = (torch.arange(count, dtype=dtype) / count * (1 - 1e-6)).to(dtype)
    return torch.bucketize(coordinates, boundaries, right=True).tolist()


@pytest.mark.parametrize("side", [8, 14, 16, 27, 32])
@pytest.mark.parametrize("rows", [1, 7, 8, 16, 32])
@pytest.mark.parametrize("cols", [8, 13, 32])
def test_rows_are_those_of_exact_arithmetic(rows, cols, side):
    expected = [r * side + c for r in exact(rows, side) for c in exact(cols, side)]
    got = position_rows(rows, cols, side)
    assert got.dtype == torch.int64
    assert got.tolist() == expected


def test_full_grid_is_the_identity():
    assert position_rows(32, 32, 32).tolist() == list(range(1024))


def test_the_naive_rule_is_wrong_in_float32_and_right_in_bfloat16():
    """Why the rule matters: the same formula, two precisions, different rows."""
    wrong, right = naive(32, 32, torch.float32), naive(32, 32, torch.bfloat16)
    assert right == list(range(32))
    assert sum(a != b for a, b in zip(wrong, right, strict=True)) >= 30


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_served_model_reads_the_right_rows_in_every_precision(smolvla_bundle, golden, dtype):
    """Record the indices that really reach the table during an inference."""
    policy = load(smolvla_bundle("smolvla-2cam"), dtype=dtype, engine="eager")
    table = policy.engine.model.vision.position_embedding
    seen: list[torch.Tensor] = []
    handle = table.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    policy.infer(Golden(golden / "smolvla-2cam").observation())
    handle.remove()
    side = policy.engine.model.config.vision.side
    assert [ids.tolist() for ids in seen] == [list(range(side * side))]


@torch.inference_mode()
def test_a_shifted_row_would_fail_the_parity_gate(smolvla_bundle, golden, monkeypatch):
    """The golden gate sees the fault that an error-free run hides."""
    policy = load(smolvla_bundle("smolvla-2cam"), engine="eager")
    g = Golden(golden / "smolvla-2cam")
    right = torch.from_numpy(policy.infer(g.observation()).actions)

    def shifted(rows: int, cols: int, side: int, device: torch.device | None = None) -> torch.Tensor:
        axis = torch.tensor(naive(rows, side, torch.float32))
        return (axis[:, None] * side + axis[None, :]).flatten()

    monkeypatch.setattr("sinew.layers.vit.position_rows", shifted)
    wrong = torch.from_numpy(policy.infer(Observation.from_mapping(g.observation())).actions)
    assert float((wrong - right).abs().max()) > 1e-4


def test_indices_in_half_precision_are_refused(smolvla_bundle):
    table = load(smolvla_bundle("smolvla-2cam"), engine="eager").engine.model.vision.position_embedding
    with pytest.raises(TypeError, match="int64 or int32"):
        table(torch.arange(4, dtype=torch.bfloat16))


def test_played_episodes_read_the_wrong_rows(monkeypatch):
    """The program's ablation reaches the engine that plays: its episodes see other positions."""
    seen: list[bool] = []

    class Played:
        def __init__(self, _bundle: str, *, device: str, engine: str) -> None:
            self.policy = load(ablation.BUNDLE, device, engine=engine)
            expected = ablation.naive_rows(8, 8, 8)
            reads = self.policy.engine.model.vision.position_embedding
            reads.register_forward_pre_hook(lambda _, args: seen.append(torch.equal(args[0].cpu(), expected)))

    def play(env: object, adapter: object, policy: Played, conduct: object, seed: int) -> object:
        policy.policy.infer(make_observation(policy.policy.spec, None, "pick up the red cube", None))
        return type("Result", (), {"success": False})

    monkeypatch.setattr(ablation, "InProcess", Played)
    monkeypatch.setattr(ablation, "run_episode", play)
    with ablation.wrong_rows():
        ablation.play(1)
    assert seen
    assert all(seen)


def test_a_table_that_is_resized_moves_by_rounding_alone(case_bundle):
    """The second half of the appendix's table 7, on GR00T N1.6's tower: half precision moves the positions by about
    0.1 % and the chunk by as little at one step as at sixteen; a wrong row moves the other kind of tower by a third."""
    found = ablation.resized(case_bundle("groot-n16"), 2)
    assert found["relative_error"] == pytest.approx(3e-4, rel=0.9)
    moved = [row["resized_in_half"] for row in found["rows"]]
    assert max(moved) < 0.01 * found["rows"][0]["largest_action"]
    assert moved[-1] < 3 * moved[0] + 1e-6
    tower = load(ablation.BUNDLE, "cpu", engine="eager").engine.model.vision
    assert ablation.relative_error(tower, 8, 8, ablation.wrong_rows()) > 0.3
    with pytest.raises(SystemExit, match="got none"):
        ablation.resized(ablation.BUNDLE, 1)
