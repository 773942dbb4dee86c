"""A stream that was told nothing is the one that the tables are of."""

from __future__ import annotations

import inspect

from sinew.cli.stream import stream
from sinew.eval.sources import StreamCosts
from sinew.stream import StreamSettings


def test_nothing_continues_an_old_window_unless_it_is_asked_for() -> None:
    """On the pen guidance costs 7 and 8 points (docs/control.md), and the pen's streams were played without."""
    asked = inspect.signature(stream).parameters["rtc"].default
    assert asked == StreamSettings(30.0).guidance == StreamCosts.parse("33:2.1").guidance == "none"
