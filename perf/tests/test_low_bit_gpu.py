"""Low-bit weights on a GPU, predicted: the engine's rule and its numbers, the gain, and the memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import sinew
import torch
from sinew.bundle import Bundle
from sinew.engine.cuda.lowbit import choice
from sinew.engine.cuda.open import cuda_engine
from sinew.lowbit.recipes import parse_recipe
from tests.engine.cpu.test_cpu_engine import RECIPES, stored

from sinew_perf.gains import order
from sinew_perf.hardware import hardware, load_hardware
from sinew_perf.memory import fits
from sinew_perf.program import PublishedProgram
from sinew_perf.roofline import seconds

PEN = Path(sinew.__file__).parent / "assets" / "pen.gguf"
# The compute capability of each machine of NVIDIA that has bf16 (NVIDIA's table of CUDA GPUs).
CAPABILITIES = {
    80: ("a100",),
    86: ("rtx3060", "a10g"),
    87: ("agx-orin", "orin-nx", "orin-nano"),
    89: ("rtx4090", "rtx4090-boosted", "l40s"),
    90: ("h100", "h200", "h200-measured"),
    100: ("b100",),
    110: ("thor", "thor-measured"),
    120: ("rtx5090", "rtx5070"),
}


def test_the_engines_balances_are_those_of_the_machines() -> None:
    machines = hardware()
    listed = {name for names in CAPABILITIES.values() for name in names}
    assert listed == {name for name, each in machines.items() if each.kind == "gpu" and "bf16" in each.peak}
    assert {
        capability: min(math.floor(machines[name].balance) for name in names)
        for capability, names in CAPABILITIES.items()
    } == choice.BALANCE


@pytest.mark.parametrize(("machine", "parts"), [("agx-orin", "head"), ("thor", "language and head")])
def test_gains_advise_low_bit_weights_where_reading_limits(machine: str, parts: str) -> None:
    """The rows of SmolVLA's language model are more than an Orin's balance, and fewer than a Thor's."""
    found = order("smolvla", load_hardware(machine))
    rows = {gain.name: gain for gain in found.taken}
    names = [f"{stored} weights of {parts}" for stored in ("int8", "q4_0")]
    assert {*names, "bf16", "engine cuda"} <= rows.keys()
    eight, four = (rows[name] for name in names)
    assert four.after_ms < eight.after_ms < eight.before_ms == four.before_ms
    recipe = ",".join(f"{part}=int8" for part in parts.split(" and "))
    assert eight.line == f"sinew quantize --recipe {recipe}, then --engine cuda"
    assert "never run on a GPU" in eight.fidelity


def test_the_advice_for_fp8_is_a_recipe_that_is_accepted() -> None:
    (gain,) = (each for each in order(str(PEN), load_hardware("h200")).taken if each.name == "fp8")
    assert gain.line == "sinew quantize --recipe language=fp8, then --engine cuda"
    assert parse_recipe("language=fp8")["language"] == "fp8"


def test_a_gain_is_that_of_the_roofline() -> None:
    """The first change after bf16 and the engine, traced with the formats that it states."""
    board = load_hardware("orin-nano")
    gain = next(each for each in order("smolvla", board).taken if each.name == "int8 weights of head")
    before = next(
        each for each in order("smolvla", board).taken if each.name == "engine cuda" and not each.instead
    )
    dtypes = {"vision": "bf16", "language": "bf16", "head": "int8"}
    alone = PublishedProgram.load("smolvla", dtypes=dtypes, engine="plan").components("fused")
    wide = PublishedProgram.load("smolvla", dtypes="bf16", engine="plan").components("fused")
    assert 1e3 * seconds(wide, board) == pytest.approx(before.after_ms)
    assert seconds(alone, board) < seconds(wide, board)
    assert gain.before_ms <= before.after_ms


@pytest.mark.parametrize("balance", [math.inf, 0])
def test_memory_is_what_the_engine_holds(tmp_path: Path, monkeypatch, balance: float) -> None:
    """Byte for byte, whether weights stay low-bit or are converted."""
    path = stored(PEN, RECIPES["q4_0"], tmp_path / "small.gguf")
    report = fits(path, 1 << 40, engine="cuda", device="cuda", search=False, balance=balance).report
    monkeypatch.setattr(choice, "BALANCE", {80: balance})
    engine = cuda_engine(Bundle(path), torch.device("cpu"), "bf16")
    assert report.weights_nbytes == engine.facts.weights_nbytes
    kinds = {row.dtype for row in report.weights}
    assert ("q4_0" in kinds) == (balance > 0)
