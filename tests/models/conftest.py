"""Golden cases of every family, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sinew.policy import Policy, load
from tests.golden import Golden


@pytest.fixture(scope="session")
def open_case(
    golden, smolvla_bundle, pi_bundle, groot_bundle, evo1_bundle, jepa_bundle, openvla_bundle
) -> Callable[[str], tuple[Policy, Golden]]:
    """``open_case("pi0-2cam")``: the policy, loaded anew on eager in float32, and what its reference gave."""
    makers = {"smolvla": smolvla_bundle, "pi": pi_bundle, "groot": groot_bundle, "evo1": evo1_bundle}

    def open_(case: str) -> tuple[Policy, Golden]:
        make = next((make for prefix, make in makers.items() if case.startswith(prefix)), openvla_bundle)
        bundle = jepa_bundle if case == "vla-jepa" else make(case)
        policy = load(bundle, dtype="float32", engine="eager", allow_missing_cameras=True)
        return policy, Golden(golden / case)

    return open_
