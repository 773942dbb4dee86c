"""Every stage of every golden case against its reference, within what rounding does to it (tests/closeness.py)."""

from __future__ import annotations

from tests.models.stages import CASES, each, stages


@each(CASES)
def test_every_stage_matches(case, open_case):
    wrong = {name: found.refusal(expected) for name, found, expected in stages(case, *open_case(case))}
    assert len(wrong) >= 3
    assert not any(wrong.values()), {name: why for name, why in wrong.items() if why}
