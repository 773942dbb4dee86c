"""What `sinew eval` finds out before it loads a policy."""

from __future__ import annotations

import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the blocks task needs the sim extra")

from sinew.cli import main
from tests.cases import tiny_bundle


def test_cameras_are_checked_before_a_policy_is_loaded(capsys, monkeypatch):
    """The header says which cameras a bundle has, and the environment's first observation which frames there are."""
    monkeypatch.setattr("sinew.assemble.choose", None)  # what a load calls first; it would be a TypeError
    monkeypatch.setattr("sinew_eval.episodes.policies.chosen", None)
    for arguments, words in (
        (
            ["--rename", "front=camera9"],
            "--rename front=camera9: expected one of the cameras ['camera1', 'camera2']",
        ),
        (
            [],
            "so they do not fit, pass its own environment as --env ID, MODULE:CLASS or a suite's task",
        ),
        (["--rename", "front=camera1"], "images.wrist: expected one of the cameras ['front', 'camera2']"),
        (["--env", "sinew/Pen-v0"], "do not fit: images."),
    ):
        assert main(["eval", str(tiny_bundle()), "--episodes", "1", *arguments]) == 1
        assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        (
            "pen",
            ["--env", "sinew/Blocks-v0"],
            [
                "the policy's state and actions have 1 and 1 numbers, the environment's have 4 and 4",
                "this policy fits sinew/Pen-v0",
                "`sinew eval blocks --env sinew/Blocks-v0` plays this environment",
            ],
        ),
        (
            "egg",
            ["--env", "sinew/Pen-v0"],
            ["this policy fits sinew/Egg-v0", "`sinew eval pen --env sinew/Pen-v0`"],
        ),
        ("blocks", ["--rename", "top=wrist"], ["rename the cameras with --rename wrist=top"]),
    ],
)
def test_what_does_not_fit_says_what_does(
    target: str, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", target, "--episodes", "1", *arguments]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words)
    assert "(rename" not in lines[0]  # of Python's own
