"""Topics between two hosts, over DDS, while packets are lost."""

from __future__ import annotations

import pytest

from benchmarks.network import Way, why_not


@pytest.mark.slow
def test_commands_arrive_where_one_packet_in_ten_is_lost() -> None:
    pytest.importorskip("cyclonedds", reason="the extra `ros` is not installed")
    if reason := why_not():
        pytest.skip(f"two hosts need a network of their own: {reason}")
    from tests.ros.two_hosts import measure

    found = measure(Way(delay=0.02, loss=0.1), 200)
    commands, states = found["/arm"], found["/joint_states"]
    assert found["packets_lost"] > 0
    assert commands["in_order"]  # none twice, none before an older one
    assert states["in_order"]
    assert commands["came"] > states["came"] > 100  # what is lost is sent again, of commands
    assert states["age_ms"]["p50"] >= 20.0  # they did travel over that line
