"""What robots say of their own runs, from their loops to the dashboard and Prometheus."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ConnectionLost, ServerError, schema
from sinew_client.control import Loop, Reporter, Servers, Settings
from sinew_client.control.authority import ALIGNING, HUMAN, RETURNING
from sinew_client.control.facts import facts_of
from sinew_client.control.reporter import _in_force
from sinew_client.control.robots import Dry
from sinew_client.control.safety import Limits
from sinew_client.errors import RequestError
from sinew_client.robot_report import FARTHEST, MAX_BYTES, MAX_COUNTS, MAX_POINTS, MAX_TEXT, RobotReport

from sinew.cli import main
from sinew.core import VectorSpec
from sinew.policy import load
from sinew.serve.dashboard import news
from sinew.serve.device_lock import DeviceLock
from sinew.serve.metrics import SESSION_S
from sinew.serve.robots import MAX_ROBOTS, Robots
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires
from tests import processes
from tests.contract.test_clients import Server
from tests.hostile.decoders import REPORT
from tests.serve.puppet import SPEC, WAIT_S, Puppet, desk, until
from tests.serve.test_dashboard import events

SAYS = ["--robot", "dry", "--prompt", "go", "--seconds", "600", "--set", "stale=60", "--json"]

COUNT = type(schema.Report().held.add())


def looped(source: Any, hz: float = 50.0, **more: Any) -> Loop:
    settings = Settings(hz=hz, motion={"kind": "absolute"}, watchdog=False, **{"deadline": 10.0, **more})
    return Loop(Dry(SPEC.to_dict()), source, settings, 2, "go")


@pytest.mark.usefixtures("dry_ends")
@pytest.mark.parametrize("by", [(), ("--stream",)], ids=["chunks", "stream"])
def test_a_robot_tells_its_server_how_it_runs(
    by: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    listen, policy = Listen(dashboard=True), load("pen", engine="eager", threads=1)
    policy.warm_up()
    with desk(("native", "web"), policy=policy, device_lock=DeviceLock(), listen=listen) as at:
        if not by:
            assert main(["run", at.native, *SAYS, "--set", "report=false"]) == 0
            assert at.service.robots.rows() == []
            capsys.readouterr()
        assert main(["run", at.native, *by, *SAYS]) == 0
        told = json.loads(capsys.readouterr().out)
        (row,) = at.service.robots.rows()
        assert (row["client"], row["name"], row["state"]) == ("127.0.0.1", "dry", "ended")
        assert (row["steps"], row["held"]) == (told["ticks" if by else "steps"], told["held"])
        assert 0 < row["age_p50_ms"] <= row["age_p95_ms"]


ARM = """<robot name="arm"><link name="base"/><link name="one"/><link name="two"/><link name="tip"/>
<joint name="a" type="revolute"><parent link="base"/><child link="one"/><origin xyz="0 0 0.1"/><axis xyz="0 0 1"/>
<limit lower="-3" upper="3"/></joint>
<joint name="b" type="revolute"><parent link="one"/><child link="two"/><origin xyz="0 0 0.2"/><axis xyz="0 1 0"/>
<limit lower="-3" upper="3"/></joint>
<joint name="end" type="fixed"><parent link="two"/><child link="tip"/><origin xyz="0.5 0 0"/></joint></robot>"""


@pytest.mark.usefixtures("dry_ends")
def test_an_arm_that_is_known_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy of joints is driven as without the description; its server is told where base, joints and tip are."""
    (tmp_path / "arm.urdf").write_text(ARM)
    shown = ["--set", f"kinematics={tmp_path / 'arm.urdf'}"]
    puppet = Puppet()
    puppet.spec = replace(SPEC, action=VectorSpec(2, ("a", "b")))
    with desk(policy=puppet) as at:
        assert main(["run", at.native, *SAYS, "--hz", "50", *shown]) == 0
        assert "2 joints from base to tip, to show the arm" in capsys.readouterr().err
        (row,) = at.service.robots.rows()
        assert row["arm"] == pytest.approx((0, 0, 0, 0, 0, 0.1, 0, 0, 0.3, 0.5, 0, 0.3))
        assert row["steps"] > row["held"].get("no chunk yet", 0)
        lost = ["--set", 'kinematics_options={"unit": "turns"}']
        assert main(["run", at.native, *SAYS, *shown, *lost]) == 1


def test_what_is_no_arm_is_not_reported() -> None:
    """Robots of others may have an attribute of that name."""
    for points in (
        None,
        np.full((3, 3), np.nan),
        np.zeros((3, 2)),
        np.zeros((65, 3)),
        np.full((1, 3), FARTHEST),
        np.diag([0.0, 0.0, FARTHEST]),
        "abc",
    ):
        loop = looped(lambda: lambda *_: np.zeros((4, 2), np.float32))
        for given in (points, lambda points=points: points):
            robot = SimpleNamespace(arm_points=given)
            assert Reporter(loop, Servers("tcp://a:1"), facts=facts_of(robot)).look().arm == ()
        loop.close()
    robot = SimpleNamespace(arm_points=lambda: np.full((MAX_POINTS, 3), -9.5))
    assert Reporter(loop, Servers("tcp://a:1"), facts=facts_of(robot)).look().arm == (-9.5,) * 3 * MAX_POINTS


def test_a_server_that_was_away_is_told_why_its_robot_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends, the robot holds, another one begins on its port, and its page says why."""
    monkeypatch.setattr(news, "HEALTH_S", 0.05)
    port = processes.free_port()
    servers = Servers(
        [f"tcp://127.0.0.1:{processes.free_port()}", f"tcp://127.0.0.1:{port}"]
    )  # nobody is at the first
    loop = looped(servers)
    driving = threading.Thread(target=loop.run)
    with contextlib.ExitStack() as stack:
        with desk(listen=Listen(port=port)) as first:
            stack.enter_context(Reporter(loop, servers, period=0.05))
            driving.start()
            stack.callback(driving.join)
            stack.callback(loop.stop)
            until(lambda: any(row["state"] == "moves" for row in first.service.robots.rows()))
        until(lambda: "no server answers" in loop.reason, "the robot to hold")
        with desk(listen=Listen(port=port)) as second:
            (page,) = open_wires({"http": 0}, Listen(dashboard=True))
            page.start(second.service)
            stack.callback(page.stop)
            viewer = http.client.HTTPConnection(page.address.rpartition("//")[2], timeout=WAIT_S)
            viewer.request("GET", "/v1/events")
            told = (record["robots"] for name, record in events(viewer.getresponse()) if name == "health")
            (row,) = next(rows for rows in told if rows and "no server answers" in str(rows[0]["held"]))
            viewer.close()
            assert row["failed_requests"] > 0
            assert str(port) in servers.present
            until(lambda: any(row["state"] == "moves" for row in second.service.robots.rows()))
            loop.stop()
            driving.join()
    loop.close()


@pytest.mark.parametrize("code", ["bad_request", "unauthorized", "unknown"])
def test_a_server_that_takes_no_reports_is_asked_once(
    code: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinew_client.control.reporter.TIMEOUT_S", WAIT_S)  # who is slow is asked again
    caplog.set_level("INFO", "sinew_client.control.reporter")
    with Server(does=code) as old:
        loop = looped(servers := Servers(old.address))
        with Reporter(loop, servers, period=0.005) as reporter:
            until(lambda: reporter.refused)
            time.sleep(0.05)
        assert old.asked == 1
        assert [old.address in each.message for each in caplog.records] == [True]
        loop.close()


@pytest.mark.parametrize("driver", [ALIGNING, HUMAN, RETURNING])
def test_a_server_accepts_the_report_of_each_driver(driver: str) -> None:
    """Also while the robot returns to its rest pose: a robot whose report is rejected sends no further one."""
    loop = looped(lambda: lambda *_: np.zeros((4, 2), np.float32))
    loop.controller.driver = driver
    with desk() as server, Client(server.native, timeout=WAIT_S) as client:
        report = Reporter(loop, Servers(server.native)).look()
        assert report.state == driver
        client.report(report)
        assert RobotReport.parse(report.to_message().SerializeToString()).state == driver
    loop.close()


def test_what_a_report_says_of_a_run() -> None:
    chunk = np.full((4, 2), 3.0, np.float32)
    loop = looped(lambda: lambda *_: chunk, 200.0, limits={"high": [1.0, 9.0], "velocity": 1000.0})
    reporter = Reporter(
        loop, Servers("tcp://a:1"), facts=facts_of(SimpleNamespace(finished=4, successes=print))
    )
    assert reporter.look().state == "starting"
    until(lambda: loop.run(loop.steps + 1) and loop.controller.chunks)
    loop.run(loop.steps + 3)
    found = reporter.look()
    assert found.state == ("holds" if loop.reason else "moves")
    assert found.limits == ("range", "velocity")
    assert found.clipped == {"0.range": found.clipped_commands}
    assert found.clipped_commands == loop.steps - sum(found.held.values()) > 0
    assert (found.episodes, found.successes) == (4, None)  # no number
    loop.pause()
    loop.run(loop.steps + 1)
    assert (reporter.look().state, reporter.look().reason) == ("paused", "paused")
    assert reporter.look(ended=True).state == "ended"
    loop.close()


def test_rates_and_ages_are_those_of_the_last_ten_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of this machine; totals are of the whole run."""
    now = [10.0]
    monkeypatch.setattr("sinew_client.control.reporter.time", SimpleNamespace(monotonic=lambda: now[0]))
    loop = looped(lambda: lambda *_: np.zeros((4, 2), np.float32), hz=20.0)
    controller = loop.controller
    loop.steps, controller.ages[2] = 100, 50
    reporter = Reporter(
        loop, Servers("tcp://a:1"), facts=facts_of(SimpleNamespace(finished=np.int64(7), successes=True))
    )
    assert reporter.look().rate_hz == 0.0  # of no time
    now[0], loop.steps = 10.5, 110
    assert reporter.look().rate_hz == 20.0
    now[0], loop.steps = 12.0, 140
    controller.ages.update({2: 10, 4: 30})
    found = reporter.look()
    assert (found.rate_hz, found.rows_hz, found.age_p50_ms, found.age_p95_ms) == (20.0, 20.0, 200.0, 200.0)
    assert (found.steps, found.hz, found.state, found.episodes, found.successes) == (140, 20.0, "moves", 7, 1)
    now[0], loop.steps = 13.0, 144
    controller.ages[8] += 40
    found = reporter.look()
    assert (found.rate_hz, found.rows_hz) == (14.667, 26.667)
    assert (found.age_p50_ms, found.age_p95_ms) == (300.0, 400.0)
    for _ in range(10):
        found = reporter.look()
        now[0] += 1.0
    assert (found.rate_hz, found.rows_hz, found.age_p50_ms) == (0.0, 0.0, None)
    controller.ages[8] -= 1  # a robot did not take a row
    controller.handed.steps = -1
    found = reporter.look()
    assert (found.rows_hz, found.steps_by_hand, found.takeovers) == (0.0, 0, 0)
    loop.close()


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (OSError("no route"), False),
        (ConnectionLost("gone"), False),
        (ServerError("busy", "later"), False),
        (ServerError("unknown", "what?"), True),
    ],
)
def test_only_who_refuses_reports_is_told_nothing_more(
    error: Exception, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("sinew_client.control.reporter.Client", lost)
    loop = looped(lambda: lambda *_: np.zeros((4, 2), np.float32))
    reporter = Reporter(loop, Servers("tcp://a:1"))
    reporter._tell(reporter.look(), 1.0)
    assert reporter.refused == ({"tcp://a:1"} if refused else set())
    loop.close()


def test_limits_are_in_force_where_one_number_has_them() -> None:
    for given, names in (
        ({"low": [None, 0.0]}, ("range",)),
        ({"high": [None, 0.0], "jump": [1.0, None]}, ("range", "jump")),
        ({"workspace_low": [None, 0.0]}, ("workspace",)),
        ({"acceleration": [1.0, None], "workspace_high": [0.0, None]}, ("acceleration", "workspace")),
    ):
        assert _in_force(Limits.parse(given, 2)) == names


def test_the_end_of_a_run_waits_for_two_reports_and_no_longer() -> None:
    """For one that is under way, and the last; neither keeps the process."""
    loop, waited = looped(lambda: lambda *_: np.zeros((4, 2), np.float32)), []
    reporter = Reporter(loop, Servers("tcp://a:1"))
    assert (reporter._thread.daemon, reporter._period) == (True, 1.0)
    reporter._thread = SimpleNamespace(join=waited.append)  # type: ignore[assignment]
    reporter.__exit__()
    assert waited == [pytest.approx(1.3)]
    loop.close()


def data(report: RobotReport = REPORT, **changes: Any) -> bytes:
    message = report.to_message()
    for name, value in changes.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message.SerializeToString()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("state", "flies", "one of starting, moves, .*, got 'flies'"),
        ("reason", "x" * (MAX_TEXT + 1), f"printable text of at most {MAX_TEXT} characters"),
        ("reason", "\x1b[2J", "printable text"),
        ("hz", float("nan"), "a number from 0 to 2.53, got nan"),
        ("age_p50_ms", -1.0, "a number"),
        ("steps", 2**64 - 1, "a number"),
        ("limits", ["speed"], "one of range, velocity"),
        ("limits", ["range"] * 13, "at most 12 entries"),
        ("held", [COUNT(name="a")] * 2, "each name once"),
        ("clipped", [COUNT(name="\0")], "printable"),
        ("successes", 4, "at most 3 episodes, got 4"),
    ],
)
def test_a_report_that_cannot_be_is_refused_by_its_field(field: str, value: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=f"^report.{field}: expected {expected}"):
        RobotReport.parse(data(**{field: value}))


def test_bytes_that_are_no_report() -> None:
    for given in (b"\x0a\xff", b"\x12\x01\xff", bytes(MAX_BYTES + 1)):
        with pytest.raises(RequestError, match="report: expected a Report of at most 8192 bytes, got "):
            RobotReport.parse(given)


def test_a_report_is_cut_to_what_may_be_sent() -> None:
    held = {f"{number} \n{'x' * 1000}": number for number in range(50)}
    long = replace(REPORT, name="a\tb" * 200, held=held, clipped={"\U0001f916" * 500: 1})
    found = RobotReport.parse(data(long))
    assert (len(found.name), len(found.held)) == (MAX_TEXT, MAX_COUNTS)
    assert (sum(found.held.values()), found.held["others"]) == (sum(held.values()), sum(range(39)))
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


def test_reports_over_the_wire() -> None:
    with desk(api_key="k") as at:

        def report(path: str = "", key: str = "k", session: str = "arm") -> None:
            with Client(at.native + path, timeout=WAIT_S, api_key=key) as client:
                client.report(replace(REPORT, held={"paused": 2, 'evil" 1\\': 3, "b": 4}), session)

        refused = {
            "key": ("", "unauthorized"),
            "session": ("x" * 129, "session: "),
            "path": ("/x", "policy: "),
        }
        for name, (value, said) in refused.items():
            with pytest.raises(ServerError, match=said):
                report(**{name: value})
        assert at.service.robots.rows() == []
        report()
        (row,) = at.service.robots.rows()
        assert "run" not in row  # which would let others speak for it
        assert [row[name] for name in ("session", "number", "clipped")] == ["arm", 1, REPORT.clipped]
        said = at.service.metrics.exposition().decode()
    for line in (
        'held_steps_total{reason="other",robot="1"} 7.0',
        'row_age_seconds{quantile="0.95",robot="1"} 0.08',
        'episodes_total{outcome="won",robot="1"} 2.0',
        'steps_total{robot="1"} 100.0',
    ):
        assert f"sinew_robot_{line}" in said.splitlines()
    assert 'sinew_robots{state="holds"} 1.0' in said
    assert "evil" not in said
