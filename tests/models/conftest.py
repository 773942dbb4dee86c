"""The golden cases of every family, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sinew.policy import Policy, load
from tests.golden import Golden


@pytest.fixture(scope="session")
def open_case(golden: Path, case_bundle: Callable[[str], Path]) -> Callable[[str], tuple[Policy, Golden]]:
    """Return ``open_case``. ``open_case("pi0-2cam")`` loads the policy on eager in float32, and the outputs of its
    reference."""

    def open_(case: str) -> tuple[Policy, Golden]:
        policy = load(case_bundle(case), dtype="float32", engine="eager", allow_missing_cameras=True)
        return policy, Golden(golden / case)

    return open_
