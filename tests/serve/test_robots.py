"""What robots say of their own runs: from their loops over a socket to the dashboard, `sinew top` and Prometheus."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ServerError, schema
from sinew_client.control import Loop, Reporter, Servers, Settings
from sinew_client.control.reporter import quantile
from sinew_client.control.robots import Dry
from sinew_client.errors import RequestError
from sinew_client.robot_report import MAX_BYTES, MAX_COUNTS, MAX_TEXT, RobotReport

from sinew.cli import main
from sinew.policy import Policy, load
from sinew.serve.dashboard import news
from sinew.serve.deploy import deploy
from sinew.serve.device_lock import DeviceLock
from sinew.serve.launch import ServingLimits
from sinew.serve.metrics import SESSION_S
from sinew.serve.robots import MAX_ROBOTS, Robots
from sinew.serve.service import Service
from sinew.serve.supervise import Supervisor
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires
from tests.contract.test_clients import Server
from tests.hostile.decoders import REPORT
from tests.serve.puppet import SPEC, WAIT_S, desk, until
from tests.serve.test_dashboard import events
from tests.serve.test_server import free_port

SAYS = ["--prompt", "go", "--seconds", "0.6", "--json"]


def data(report: RobotReport = REPORT, **changes: Any) -> bytes:
    """The bytes of a report, of which fields of the message are changed after its own cuts."""
    message = report.to_message()
    for name, value in changes.items():
        if isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message.SerializeToString()


def looped(servers: Any, **settings: Any) -> Loop:
    more = {
        "handover": "freeze",
        "motion": {"kind": "absolute"},
        "deadline": 0.2,
        "watchdog": False,
        **settings,
    }
    return Loop(Dry(SPEC.to_dict()), servers, Settings(hz=50.0, **more), 2, "go")


# ----------------------------------------------------------------------------- the line a user types


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    """A server in this process with a trained policy: its native wire, and its page."""
    policy = load("pen", engine="eager", threads=1)
    assert isinstance(policy, Policy)
    supervisor = Supervisor(60.0)
    first = deploy(policy, ServingLimits(), supervisor, DeviceLock())
    service = Service(first)
    native, page = open_wires({"native": 0, "http": 0}, Listen(dashboard=True))
    for wire in (native, page):
        wire.start(service)
    yield SimpleNamespace(service=service, native=native.address, page=page.dashboard)
    service.stopping()
    first.scheduler.stop()
    assert first.scheduler.join(WAIT_S)
    for wire in (native, page):
        wire.stop()


@pytest.mark.parametrize("verb", ["run", "stream"])
def test_a_robot_tells_its_server_how_it_runs(
    verb: str, server: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    server.service.robots._robots.clear()
    if verb == "run":
        assert main([verb, server.native, "--robot", "dry", *SAYS, "--no-report"]) == 0
        assert server.service.robots.rows() == []
        capsys.readouterr()
    assert main([verb, server.native, "--robot", "dry", *SAYS]) == 0
    told = json.loads(capsys.readouterr().out)
    (row,) = server.service.robots.rows()
    assert (row["wire"], row["client"], row["name"], row["state"]) == ("native", "127.0.0.1", "dry", "ended")
    assert row["steps"] == told["steps" if verb == "run" else "ticks"]
    assert row["held"] == told["held"]
    assert 0 < row["age_p50_ms"] <= row["age_p95_ms"]
    assert row["episodes"] is None
    assert "range" in row["limits"]
    assert main(["top", server.page, "--seconds", "0.3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["health"]["robots"]
    assert [(each["number"], each["steps"]) for each in shown] == [(1, row["steps"])]
    said = server.service.metrics.exposition().decode()
    assert 'sinew_robots{state="ended"} 1.0' in said
    assert f'sinew_robot_steps_total{{robot="1"}} {float(row["steps"])}' in said


# ----------------------------------------------------------------------------- holds


def test_a_server_that_was_away_is_told_why_its_robot_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over real sockets: the server ends, the robot holds, another one begins on its port, and its page says why."""
    monkeypatch.setattr(news, "HEALTH_S", 0.05)
    port = free_port()
    loop = looped(Servers([f"tcp://127.0.0.1:{port}"]))
    driving = threading.Thread(target=loop.run)
    with contextlib.ExitStack() as stack:
        with desk(listen=Listen(port=port)) as first:
            stack.enter_context(Reporter(loop, loop_servers(loop), name="arm", period=0.05))
            driving.start()
            stack.callback(driving.join)
            stack.callback(loop.stop)
            until(lambda: any(row["state"] == "moves" for row in first.service.robots.rows()))
        until(lambda: loop.source.failures and "127.0.0.1" in loop.reason, "the robot to hold")
        with desk(("native",), listen=Listen(port=port)) as second:
            until(lambda: second.service.robots.rows() and loop.controller.chunks > 3)
            (page,) = open_wires({"http": 0}, Listen(dashboard=True))
            page.start(second.service)
            stack.callback(page.stop)
            host, _, at = page.address.rpartition("//")[2].rpartition(":")
            viewer = http.client.HTTPConnection(host, int(at), timeout=WAIT_S)
            viewer.request("GET", "/v1/events")
            told = (record["robots"] for name, record in events(viewer.getresponse()) if name == "health")
            away = {
                "no answer within 0.2 s",
                f"RequestTimeout: no answer from tcp://127.0.0.1:{port} within 0.2 s",
            }
            (row,) = next(rows for rows in told if rows and away & set(rows[0]["held"]))
            viewer.close()
            assert row["name"] == "arm"
            assert row["failed_requests"] > 0
            assert all(row["held"][reason] > 0 for reason in away & set(row["held"]))
            loop.stop()
            driving.join()
    loop.close()


def loop_servers(loop: Loop) -> Servers:
    """The servers that a loop asks."""
    return loop.source._connect  # type: ignore[attr-defined, no-any-return]


def test_reports_go_where_requests_go() -> None:
    """Of two addresses the second answers; its policy's name goes along."""
    with desk() as at:
        at.service.policies.put("other", at.service.policies.get())
        servers = Servers([f"tcp://127.0.0.1:{free_port()}/other", f"{at.native}/other"])
        loop = looped(servers, deadline=WAIT_S)
        with Reporter(loop, servers, period=0.02):
            loop.run(60)
            until(lambda: loop.controller.chunks or loop.run(loop.steps + 5))
            until(at.service.robots.rows)
        assert servers.present == f"{at.native}/other"
        assert [row["policy"] for row in at.service.robots.rows()] == ["other"]
        loop.close()


@pytest.mark.parametrize("code", ["bad_request", "unauthorized"])
def test_a_server_that_takes_no_reports_is_asked_once(code: str, caplog: pytest.LogCaptureFixture) -> None:
    """A server of before there were reports, which does not know the kind, or one that wants another key."""
    caplog.set_level("INFO", "sinew_client.control.reporter")
    with Server(does=code) as old:
        loop = looped(servers := Servers([old.address]))
        with Reporter(loop, servers, period=0.005) as reporter:
            until(lambda: reporter.refused)
            time.sleep(0.05)
        assert (old.asked, reporter.failed, reporter.sent) == (1, 1, 0)
        assert [old.address in each.message for each in caplog.records] == [True]
        loop.close()


def test_what_a_report_says_of_a_run() -> None:
    chunk = np.full((4, 2), 3.0, np.float32)
    given = {"limits": {"high": [1.0, 9.0], "velocity": 1000.0}}
    settings = Settings(hz=200.0, motion={"kind": "absolute"}, watchdog=False, **given)
    loop = Loop(Dry(SPEC.to_dict()), lambda: lambda *_: chunk, settings, 2)
    robot = SimpleNamespace(finished=4, successes=3)
    reporter = Reporter(loop, SimpleNamespace(present=""), robot=robot)
    reporter._note()
    assert reporter.look().state == "starting"
    loop.run(1)
    until(lambda: loop.run(loop.steps + 1) and loop.controller.chunks)
    loop.run(loop.steps + 3)
    found = reporter.look()
    assert found.state == ("holds" if loop.reason else "moves")
    assert found.limits == ("range", "velocity")
    assert found.clipped == {"0.range": found.clipped_commands}
    assert found.clipped_commands == loop.steps - sum(found.held.values()) > 0
    assert (found.episodes, found.successes) == (4, 3)
    loop.pause()
    loop.run(loop.steps + 1)
    assert (reporter.look().state, reporter.look().reason) == ("paused", "paused")
    assert reporter.look(ended=True).state == "ended"
    assert [quantile({1: 2, 5: 17, 9: 1}, share) for share in (0.5, 0.1, 0.95, 1.0)] == [5, 1, 5, 9]
    loop.close()


# ----------------------------------------------------------------------------- bounds, and robots that lie


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "flies"}, "report.state: expected one of starting, moves, .*, got 'flies'"),
        ({"state": ""}, "report.state: "),
        ({"reason": "x" * (MAX_TEXT + 1)}, f"report.reason: expected printable text of at most {MAX_TEXT}"),
        ({"reason": "\x1b[2J"}, "report.reason: expected printable text"),
        ({"name": "a\nb"}, "report.name: "),
        ({"hz": float("nan")}, "report.hz: expected a number from 0 to 2\\^53, got nan"),
        ({"rate_hz": float("inf")}, "report.rate_hz: "),
        ({"age_p50_ms": -1.0}, "report.age_p50_ms: "),
        ({"steps": 2**64 - 1}, "report.steps: "),
        ({"limits": ["speed"]}, "report.limits: expected one of range, velocity"),
        ({"limits": ["range"] * 13}, "report.limits: expected at most 12 entries, got 13"),
        ({"held": [schema.Report().held.add(name="a")] * 2}, "report.held: expected each name once"),
        (
            {"held": [schema.Report().held.add(name=str(n)) for n in range(13)]},
            "report.held: expected at most 12",
        ),
        ({"clipped": [schema.Report().clipped.add(name="\0")]}, "report.clipped: expected printable"),
        ({"successes": 4}, "report.successes: expected at most 3 episodes, got 4"),
    ],
)
def test_a_report_that_cannot_be_is_refused_by_its_field(changes: dict[str, Any], said: str) -> None:
    robots = Robots()
    robots.put("native", "peer", "", "", data())
    before = robots.rows()[0]["state"]
    with pytest.raises(RequestError, match=said) as caught:
        robots.put("native", "peer", "", "", data(**changes))
    assert len(str(caught.value)) < 500
    assert [row["state"] for row in robots.rows()] == [before]


def test_bytes_that_are_no_report() -> None:
    for given, said in (
        (b"\x0a\xff", "expected a message Report"),
        (b"\x12\x01\xff", "expected a message Report"),
        (bytes(MAX_BYTES + 1), "expected at most 8192 bytes, got 8193"),
        (b"", "report.state"),
    ):
        with pytest.raises(RequestError, match=said):
            RobotReport.parse(given)


def test_a_report_is_cut_to_what_may_be_sent() -> None:
    held = {f"{number} \n{'x' * 1000}": number for number in range(50)}
    found = RobotReport.parse(
        data(replace(REPORT, name="a\tb" * 200, held=held, clipped={"\U0001f916" * 500: 1}))
    )
    assert len(found.name) == MAX_TEXT
    assert len(found.held) == MAX_COUNTS
    assert sum(found.held.values()) == sum(held.values())
    assert found.held["others"] == sum(range(39))
    assert RobotReport.parse(data()) == REPORT


def test_a_liar_changes_its_own_row_alone() -> None:
    clock = [0.0]
    robots = Robots(lambda: clock[0])
    robots.put("native", "honest", "arm", "", data())
    honest = robots.rows()[0]
    for run in range(3 * MAX_ROBOTS):  # as many robots as it likes, of the same session's name
        robots.put("native", "liar", "arm", "", data(replace(REPORT, run=run, steps=2**53, state="human")))
    rows = robots.rows()
    assert rows[0] == honest
    assert len(rows) == MAX_ROBOTS == len({row["number"] for row in rows})
    robots.put("native", "late", "arm", "", data())  # who has none gets a place of who has most
    assert {"honest", "late"} < {row["client"] for row in robots.rows()}
    clock[0] = SESSION_S / 2
    robots.put("native", "honest", "arm", "", data())
    clock[0] = SESSION_S + 1
    (row,) = robots.rows()
    assert (row["client"], row["number"], row["heard_s"]) == ("honest", 1, SESSION_S / 2 + 1)
    clock[0] = 2 * SESSION_S
    assert robots.rows() == []


def test_labels_of_metrics_are_known_words() -> None:
    with desk() as at, Client(at.native, timeout=WAIT_S) as client:
        client.report(replace(REPORT, held={"paused": 2, 'evil" 1\\': 3, "b": 4}), 'se"ss')
        said = at.service.metrics.exposition().decode()
        for line in (
            'sinew_robot_held_steps_total{reason="other",robot="1"} 7.0',
            'sinew_robot_held_steps_total{reason="paused",robot="1"} 2.0',
            'sinew_robot_row_age_seconds{quantile="0.95",robot="1"} 0.08',
            'sinew_robot_episodes_total{outcome="won",robot="1"} 2.0',
            'sinew_robots{state="holds"} 1.0',
        ):
            assert line in said.splitlines()
        assert "evil" not in said
        assert 'se\\"ss' not in said


def test_reports_over_the_wire_are_refused_by_name_and_requests_are_answered() -> None:
    with desk(api_key="k") as at:
        with Client(at.native, timeout=WAIT_S) as client, pytest.raises(ServerError, match="unauthorized"):
            client.report(REPORT)
        long = "x" * 129
        for path, session, said in (
            ("", long, "session: expected at most 128"),
            ("/nobody", "", "unknown_policy"),
        ):
            with (
                Client(at.native + path, timeout=WAIT_S, api_key="k") as client,
                pytest.raises(ServerError, match=said),
            ):
                client.report(REPORT, session)
        assert at.service.robots.rows() == []
        with Client(at.native, timeout=WAIT_S, api_key="k") as client:
            client.report(REPORT, "arm")
            assert client.infer({"images": {}, "state": [0.5, 0], "prompt": "go"}).actions.shape == (3, 2)
        (row,) = at.service.robots.rows()
        expected = {**REPORT.to_dict(), "session": "arm", "number": 1}
        del expected["run"]  # which would let others speak for it
        assert {name: row[name] for name in expected} == expected
        assert set(row) - set(expected) == {"wire", "client", "policy", "heard_s"}
