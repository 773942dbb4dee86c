"""What `sinew eval` finds out before it loads a policy."""

from __future__ import annotations

import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the blocks task needs the sim extra")

from sinew.cli import main
from sinew.presets import golden


def test_cameras_are_checked_before_a_policy_is_loaded(capsys, monkeypatch):
    """The header says which cameras a bundle has, and the environment's first observation which frames there are."""
    monkeypatch.setattr("sinew.policy.choose", None)  # what a load calls first; it would be a TypeError
    monkeypatch.setattr("sinew.eval.policies.chosen", None)
    for arguments, words in (
        (
            ["--rename", "front=camera9"],
            "--rename front=camera9: expected one of the cameras ['camera1', 'camera2']",
        ),
        (
            [],
            "sinew/Blocks-v0: the policy does not take its observations: images.front: expected one of the cameras",
        ),
        (["--rename", "front=camera1"], "images.wrist: expected one of the cameras ['front', 'camera2']"),
        (["--env", "sinew/Pen-v0"], "sinew/Pen-v0: the policy does not take its observations: images."),
    ):
        assert main(["eval", str(golden.BUNDLE), "--episodes", "1", *arguments]) == 1
        assert words in " ".join(capsys.readouterr().err.split())
