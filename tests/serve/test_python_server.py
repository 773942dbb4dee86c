"""``sinew.Server``: a policy on the wires from a program of one's own."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ServerError
from sinew_client.open_policy import OpenPolicy

import sinew
from sinew.core import ActionChunk, Observation, SinewError
from tests.serve.puppet import FRAME, GOOD, SPEC

PEN = Path(sinew.__file__).parent / "assets" / "pen.gguf"


class Own(OpenPolicy):
    """Says its state's first number, or what the instruction names."""

    spec = SPEC

    def __init__(self) -> None:
        self.begun: list[str] = []

    def infer(self, observation: Observation, *, timeout: float | None = None) -> ActionChunk:
        rows = {"nan": np.full((3, 2), np.nan), "wide": np.zeros((3, 5))}
        return ActionChunk(
            np.asarray(rows.get(observation.prompt, np.full((3, 2), observation.state[0])), np.float32)
        )

    def reset(self, session: str = "") -> None:
        self.begun.append(session)


def test_an_open_policy_is_served_and_stays_the_callers() -> None:
    with sinew.load(PEN, engine="eager", threads=1) as policy:
        observation = policy.dummy_observation()
        asked = {**vars(observation), "seed": 3}
        wanted = policy.infer(asked).actions
        with sinew.Server(policy, ["native:0", "openpi:0", "http:0"]) as server:
            assert set(server.addresses) == {"native", "openpi", "http"}
            with Client(server.addresses["native"]) as client:
                assert np.array_equal(client.infer(asked).actions, wanted)
            assert not server.wait(0.0)
        server.close()
        assert server.wait(0.0)
        assert np.array_equal(policy.infer(asked).actions, wanted)
        with sinew.Server(
            policy, [f"native:{server.addresses['native'].rpartition(':')[2]}"]
        ):  # its port is free
            pass


def test_a_path_is_opened_and_closed_with_the_server() -> None:
    with sinew.serve(PEN, ["native:0"], engine="eager", threads=1) as server:
        with Client(server.addresses["native"]) as client:
            assert client.spec.name == "pen"
        opened = server._scheduler.policy
    with pytest.raises(SinewError, match="closed"):
        opened.infer(opened.dummy_observation())
    with pytest.raises(
        SinewError, match="engine: this option needs a path or a name, and the policy is open already"
    ):
        sinew.serve(Own(), engine="eager")
    with pytest.raises(SinewError, match="gone"):
        sinew.serve("gone.gguf", ["native:0"])


def test_a_class_of_ones_own_is_served_on_every_wire() -> None:
    own = Own()
    with sinew.Server(own, ["native:0", "openpi:0"], api_key="secret") as server:
        with Client(server.addresses["native"], api_key="secret") as client:
            state = np.array([2.5, 0.0])
            chunk = client.infer({**GOOD, "state": state, "session": "arm", "time": 7.0})
            assert (chunk.actions == 2.5).all()
            assert (chunk.session, chunk.time) == ("arm", 7.0)
            client.reset("arm")
            for wrong, message in (
                ({"prompt": "nan"}, "must return a finite array \\[H, 2\\]"),
                ({"prompt": "wide"}, "must return a finite array \\[H, 2\\]"),
                ({"state": np.zeros(3)}, "state"),
                ({"images": {"front": FRAME, "back": FRAME}}, "back"),
            ):
                with pytest.raises(ServerError, match=message):
                    client.infer({**GOOD, **wrong})
        assert own.begun == ["arm"]
        with Client(server.addresses["native"], api_key="other") as stranger, pytest.raises(ServerError):
            stranger.infer(GOOD)


class Slow(Own):
    """Computes until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.free = threading.Event(), threading.Event()

    def infer(self, observation: Observation, *, timeout: float | None = None) -> ActionChunk:
        self.asked.set()
        self.free.wait(60)
        return super().infer(observation)


def test_who_waits_is_answered_when_the_deadline_has_passed() -> None:
    slow = Slow()
    with sinew.Server(slow, ["native:0"]) as server:

        def first() -> None:
            with Client(server.addresses["native"], timeout=60) as client:
                client.infer(GOOD)

        computing = threading.Thread(target=first)
        computing.start()
        assert slow.asked.wait(60)
        with (
            Client(server.addresses["native"], timeout=60) as client,
            pytest.raises(ServerError, match="deadline"),
        ):
            client.infer({**GOOD, "deadline_ms": 20.0})
        slow.free.set()
        computing.join()


def test_a_server_is_closed_from_another_thread_and_says_who_can_reach_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    server = sinew.Server(Own(), ["native:0"], host="0.0.0.0")
    assert "reachable from other machines" in caplog.text
    threading.Timer(0.05, server.close).start()
    assert server.wait(60)


@pytest.mark.parametrize(
    ("wires", "message"), [(["nativ"], "expected one of"), (["native:0", "native:1"], "listed twice")]
)
def test_wires_that_are_none_are_refused(wires: list[str], message: str) -> None:
    with pytest.raises(SinewError, match=message):
        sinew.Server(Own(), wires)


def test_a_taken_port_is_refused_and_frees_the_others() -> None:
    with sinew.Server(Own(), ["native:0"]) as first:
        port = first.addresses["native"].rpartition(":")[2]
        with pytest.raises(SinewError, match="in use"):
            sinew.Server(Own(), ["openpi:0", f"native:{port}"])


def test_a_policy_without_a_specification_is_no_policy() -> None:
    class Nothing:
        spec: Any = property(lambda self: (_ for _ in ()).throw(SinewError("no specification")))

    with pytest.raises(SinewError, match="no specification"):
        sinew.Server(Nothing(), ["native:0"])  # type: ignore[arg-type]
