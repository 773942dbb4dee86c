"""Published sizes of the families without a random checkpoint in the package."""

from __future__ import annotations

import pytest

from sinew.perf.program import Program, preset
from sinew.perf.request import Request
from sinew.presets.published import PUBLISHED

# Numbers that a bundle holds, by hand: towers, language model, table of tokens and head. A part that is missing or has
# another width changes them by more than a hundredth.
BILLIONS = {
    "gr00t-n1.5": 2.09,
    "gr00t-n1.6": 2.65,
    "openvla": 7.50,
    "vla-adapter": 1.39,
    "vla-jepa": 2.28,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes(name):
    model = preset(name).model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_products_of_ternary_weights_count():
    """Two FLOPs for each weight and row, whatever its bits: the language model's, for one view and twenty tokens."""
    assert "bitvla" in PUBLISHED
    trace = Program.load("bitvla", Request(1, 20)).trace
    d, f, keys, layers = 2560, 6912, 640, 30
    rows = 256 + 1 + 20 + 56 + 1  # patches, state, prompt, slots of the chunk, stop
    weights = layers * (2 * d * d + 2 * d * keys + 3 * d * f)
    attention = layers * 4 * rows * rows * d
    projector = 2 * (8 * d + d * d)
    assert trace.flops("prefix") == pytest.approx(2 * rows * weights + attention + projector, rel=0.01)
    assert trace.flops("vision") > 2 * 256 * 26 * (4 * 1152**2 + 2 * 1152 * 4304)
