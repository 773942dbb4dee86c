"""What the tests of a roofline ask for ends with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sinew.cli import terminal


@pytest.fixture(autouse=True)
def in_words_again() -> Iterator[None]:
    """Have the next test print words: some of these call a verb's function and say ``--json`` themselves."""
    yield
    terminal.take_json([])
