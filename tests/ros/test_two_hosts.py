"""Topics between two hosts, over DDS, while packets are lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network import Way, why_not


@pytest.fixture(autouse=True)
def two_hosts() -> None:
    pytest.importorskip("cyclonedds", reason="the extra `ros` is not installed")
    if reason := why_not():
        pytest.skip(f"two hosts need a network of their own: {reason}")


@pytest.mark.slow
def test_commands_arrive_where_one_packet_in_ten_is_lost() -> None:
    from tests.ros.two_hosts import measure

    found = measure(Way(delay=0.02, loss=0.1), 200)
    commands, states = found["/arm"], found["/joint_states"]
    assert found["packets_lost"] > 0
    assert commands["in_order"]  # none twice, none before an older one
    assert states["in_order"]
    assert commands["came"] > states["came"] > 100  # what is lost is sent again, of commands
    assert states["age_ms"]["p50"] >= 20.0  # they did travel over that line


@pytest.mark.slow
def test_a_policy_drives_an_arm_over_a_bad_line(tmp_path: Path) -> None:
    """The control period is kept, no trajectory comes twice or before an older one (`driven` sees to
    it), and pictures that are lost are not asked for again."""
    from tests.ros.two_hosts import driven

    found = driven(Way(delay=0.02, loss=0.1), tmp_path, "jpeg", quick=True)
    print(json.dumps(found))
    control, trajectories = found["control"], found["trajectories"]
    assert found["packets_lost"] > 0
    assert control["executed"] > 50
    assert control["failed_requests"] == 0
    assert control["rate_hz"] > 18.0  # of 20: nobody waits for a packet
    assert trajectories["came"] > 20
    assert (
        20.0 <= trajectories["age_ms"]["p50"] < trajectories["age_ms"]["max"]
    )  # of which some were sent again
    for topic in found["topics"].values():
        assert topic["sent"] > topic["came"] > topic["sent"] // 3
    assert (
        found["topics"]["state"]["came"] > found["topics"]["front"]["came"]
    )  # of one packet, and of several
