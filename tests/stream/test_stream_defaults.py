"""A stream that was told nothing is the one that the tables are of."""

from __future__ import annotations

import logging

import pytest
from sinew_client.control.defaults import usual_guidance
from sinew_eval.episodes.settings import StreamCosts

from sinew.cli import main
from sinew.cli.run_stream import STREAM
from sinew.policy import open_bundle
from sinew.stream import StreamSettings


def test_nothing_continues_an_old_window_unless_it_is_asked_for() -> None:
    """On the pen guidance costs 7 and 8 points (docs/late-answers.md), and the pen's streams were played without."""
    assert STREAM.rtc == "auto"
    assert StreamSettings(30.0).guidance == StreamCosts.parse("33:2.1").guidance == "none"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ("blocks", "a newer window replaces the old one at once: in a test, 18 of 20 pens were caught"),
        ("blocks-rtc", "a newer window replaces the old one at once: in a test, 18 of 20 pens were caught"),
        ("pen", "a newer window replaces the old one at once: in a test, 18 of 20 pens were caught"),
        ("act", "its head (single) does not support guidance"),
    ],
)
def test_the_choice_for_a_policy_is_said_with_its_reason(policy: str, why: str) -> None:
    guidance, reason = usual_guidance(open_bundle(policy).manifest.spec.to_dict())
    assert guidance == "none"
    assert reason.startswith(why)


def test_the_verb_prints_it(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO):
        command = [
            "run",
            str(open_bundle("pen").path),
            "--stream",
            "--robot",
            "dry",
            "--prompt",
            "catch",
            "--seconds",
            "0.5",
        ]
        assert main(command) in (0, 3)  # on a busy machine no window may come in time
    capsys.readouterr()
    assert any(record.getMessage().startswith("rtc none: a newer window") for record in caplog.records)
