"""Settings for all tests of the ROS packages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.puppet import WAIT_S


@pytest.fixture(autouse=True)
def loops_may_be_late() -> Iterator[None]:
    """A paused control loop has a minute to hold its robot, because a busy machine may stop the loop for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinew_ros.driven.HOLDS_S", WAIT_S)
        yield
