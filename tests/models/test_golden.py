"""The golden data inside the package is what the fixtures hold, and its check can fail."""

from __future__ import annotations

import numpy as np
import torch

import sinew.families.smolvla.golden
from sinew.policy import Policy
from tests.golden import Golden


def test_check_passes(caplog):
    ((name, passed, detail),) = sinew.families.smolvla.golden.check()
    assert passed, f"{name}: {detail}"
    assert not caplog.records  # of its frames, which no camera of the user's sends


def test_data_is_the_fixture(golden):
    g, stored = Golden(golden / "smolvla-2cam"), sinew.families.smolvla.golden.observation()
    expected = g.observation()
    assert stored.keys() == expected.keys()
    assert stored["prompt"] == expected["prompt"]
    for name, frame in expected["images"].items():
        assert np.array_equal(stored["images"][name], frame)
    for key in ("state", "noise"):
        assert np.array_equal(stored[key], expected[key])


def test_check_fails_when_the_engine_is_wrong(monkeypatch):
    original = Policy.__init__

    def damaged(self, *args, **kwargs):
        original(self, *args, **kwargs)
        weight = self.engine.model.vision.layers[0].norm1.weight
        weight.data = weight + torch.full_like(weight, 0.5)

    monkeypatch.setattr(Policy, "__init__", damaged)
    ((_, passed, detail),) = sinew.families.smolvla.golden.check()
    assert not passed
    assert "reinstall" in detail
