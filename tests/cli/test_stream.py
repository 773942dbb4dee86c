"""``sinew run --stream`` with a policy in this process: the report, the live view, the planner, and what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from sinew_client import ClientError
from sinew_client.control import Loop, Planner, Settings, Stream, StreamReport
from sinew_client.control.facts import facts_of
from sinew_client.control.pace import Pace
from sinew_client.control.planner import open_planner
from sinew_client.control.stream import Watching
from sinew_client.faults import Faults
from sinew_client.streams import StreamWindow

from sinew.cli import main
from sinew.cli.run_stream_view import StreamView, report_table


def test_a_dry_robot_streams(
    rolling_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "stream.jsonl"
    asked = [
        "run",
        str(rolling_bundle),
        "--stream",
        "--engine",
        "eager",
        "--prompt",
        "go",
        "--seconds",
        "1.5",
    ]
    assert main([*asked, "--record", str(journal), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["label"].startswith("gradual flow matching")
    assert result["ticks"] == 150
    assert result["windows"] > 0
    assert result["errors"] == 0
    assert set(result["histograms_ms"]) == {"sensor", "image"}
    assert main(["recording", "replay", str(journal), "--json"]) == 0
    repeated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (repeated["commands"], repeated["differ"]) == (150, 0)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--hz", "50"], "rate: expected 100 nodes per second"),
        (["--set", "fusion=mean"], "fusion: expected one of"),
        (["--set", "planner=json:nothing"], "planner json:nothing"),
        (["--robot", "submarine"], "--robot: expected"),
    ],
)
def test_what_does_not_fit_is_refused(
    rolling_bundle: Path, capsys: pytest.CaptureFixture[str], flags: list[str], text: str
) -> None:
    asked = [
        "run",
        str(rolling_bundle),
        "--stream",
        "--engine",
        "eager",
        "--prompt",
        "go",
        "--seconds",
        "0.1",
        *flags,
    ]
    assert main(asked) == 1
    assert text in " ".join(capsys.readouterr().err.split())


def test_a_planner_rewrites_the_instruction() -> None:
    said: list[str] = []
    bad = (RuntimeError("lost"), SystemExit(1), GeneratorExit(), "x" * 4097, "\ud800")
    answers: list[Any] = ["put it down", None, "go", "", *bad, "x" * 4096]

    def plan(prompt: str, seen: Any) -> Any:
        assert prompt == "go"
        assert seen == {"state": 1}
        if isinstance(answer := answers.pop(0), BaseException):
            raise answer
        return answer

    planner = Planner(plan, 0.01, lambda: ("go", {"state": 1}), said.append)
    while answers:
        planner.once()
    planner.close()
    assert (said, planner.calls, planner.changes, planner.failures) == (["put it down", "x" * 4096], 10, 2, 5)
    with pytest.raises(ClientError, match=r"^planner sys:path: expected a callable, got list$"):
        open_planner("sys:path")
    assert open_planner("json:dumps") is json.dumps


def test_a_planner_is_called_at_its_rate_until_it_ends() -> None:
    looks: Any = iter([None, ("go", {}), ("go", {})])
    seen_all, waited = threading.Event(), []

    def look() -> Any:
        for found in looks:
            return found
        seen_all.set()
        return None

    planner = Planner(lambda *_: None, 10.0, look, waited.append)
    assert (planner._period, planner._thread.daemon) == (0.1, True)
    assert seen_all.wait(60)
    planner.close(60)
    assert not planner._thread.is_alive()
    assert (planner.calls, planner.changes) == (2, 0)  # where there was something to see
    planner._thread = SimpleNamespace(join=waited.append)  # type: ignore[assignment]
    planner.close()
    assert waited == [1.0]
    Planner(lambda *_: None, 0.01, lambda: None, waited.append).close(60)
    for hz in (0.009, 10.1):
        with pytest.raises(ClientError, match=rf"^planner: expected 0.01 to 10 calls a second, got {hz}$"):
            Planner(lambda *_: None, hz, lambda: None, waited.append)


class Replayed:
    """A link whose windows answer the last sample at once."""

    label = "a test"

    def __init__(self) -> None:
        self.sent: list[tuple[float, Any]] = []
        self.answered = self.errors = 0
        self.error, self.faults = "", Faults()

    def send(self, state: Any, time: float, delay: int = 1, images: Any = None, *_: Any, **__: Any) -> bool:
        self.sent.append((time, images))
        return True

    def windows(self) -> list[StreamWindow]:
        found = []
        for number, (time, _) in enumerate(self.sent[self.answered :], self.answered):
            rows, frame = (
                np.full((8, 1), time, np.float32),
                max(at for at, seen in self.sent if seen and at <= time),
            )
            found.append(StreamWindow(round(time * 100) + 1, rows, time, frame, 1.0, 2.0, 3.0, number))
        self.answered = len(self.sent)
        return found


class Arm:
    """Counts; observes at every call."""

    def __init__(self) -> None:
        self.seen = self.rows = self.holds = 0

    def observe(self) -> dict[str, Any]:
        self.seen += 1
        return {"images": {"front": np.zeros((4, 4, 3), np.uint8)}, "state": np.zeros(2)}

    def act(self, row: np.ndarray) -> None:
        self.rows += 1

    def hold(self) -> None:
        self.holds += 1


def test_what_the_view_and_the_report_show() -> None:
    arm, link, clock = Arm(), Replayed(), [0.0]
    pace = Pace(0.01, now=lambda: clock[0], sleep=lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    settings = Settings(100.0, fusion="latest_only")
    loop = Loop(Watching(arm, 25.0, lambda: clock[0]), Stream(link), settings, 1, "go", pace)
    loop.run(40)
    report = StreamReport.of(loop)
    assert (arm.rows, arm.seen) == (39, 40)  # the first tick had nothing yet
    assert [images is not None for _, images in link.sent[:5]] == [
        True,
        False,
        False,
        False,
        True,
    ]  # 25 of 100 Hz
    assert (report.windows, report.misses, report.held) == (39, 0, {"no window yet": 1})
    assert report.measured["sensor_age_ms"]["max"] == pytest.approx(10.0)  # a tick
    assert report.measured["image_age_ms"]["max"] == pytest.approx(40.0)  # a frame's period
    assert report.measured["sensor_reaction_ms"]["max"] <= 20.0
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(StreamView(loop, facts_of(loop.robot)).picture())
    console.print(report_table(report))
    text = console.export_text()
    assert (report.frames, report.frames_used) == (10, 10)
    for part in (
        "a test",
        "10 sent, 10 of them looked at",
        "sensor reaction",
        "of 100 per second",
        "no window yet",
    ):
        assert part in text
