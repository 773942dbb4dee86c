"""From a latency to success: what a measured surface says of machines and networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sinew.cli import main
from sinew.core import SinewError
from sinew.core.statistics import wilson

from sinew_perf import plots
from sinew_perf.success import LatencySpread, Rate, Way, best, read_surface, reasons

# `sinew eval pen --env sinew/Pen-v0 --replan 2 --episodes 100 --sweep handover=aligned,naive --sweep latency=...`
ALIGNED = {0: 98, 33: 98, 67: 96, 100: 98, 133: 63, 167: 22, 200: 10, 233: 1, 267: 0}
NAIVE = {0: 98, 33: 33, 67: 0, 100: 0}


def written(folder: Path, **changes: Any) -> Path:
    variants = [
        {"variant": {"handover": name, "replan": 2, "latency": f"{ms}ms"}, "wins": wins, "episodes": 100}
        for name, curve in (("aligned", ALIGNED), ("naive", NAIVE))
        for ms, wins in curve.items()
    ]
    report = {
        "schema": "sinew.eval/1",
        "control_hz": 60.0,
        "task": {"env": "sinew/Pen-v0"},
        "variants": variants,
    }
    path = folder / "report.json"
    path.write_text(json.dumps(report | changes))
    return path


def test_a_latency_takes_effect_at_the_next_control_step(tmp_path: Path) -> None:
    task, (aligned, naive) = read_surface(written(tmp_path))
    assert task == "sinew/Pen-v0"
    assert aligned.measured[6] == (98, 100)  # 100 ms at 60 Hz
    for ms in (84.0, 100.0):  # both are six steps
        assert aligned.at(ms) == Rate(0.98, *wilson(98, 100))
    between = aligned.at(110.0)  # seven steps, half of the way to eight
    assert between is not None
    assert between.success == pytest.approx((0.98 + 0.63) / 2)
    assert aligned.at(284.0) is None  # 267 ms were seventeen steps, which are 283 ms
    assert naive.at(100.1) is None


def test_a_distribution_is_the_mean_of_its_percentiles(tmp_path: Path) -> None:
    _, (aligned, naive) = read_surface(written(tmp_path))
    same = aligned.of(LatencySpread(100.0))
    assert same == aligned.at(100.0)
    wide = aligned.of(LatencySpread(100.0, 40.0))
    assert wide is not None
    assert same is not None
    assert wide.low < wide.success < same.success - 0.1  # half of its answers are later than 100 ms
    # Half of these answers are later than any that was played, and count as failures.
    later = naive.of(LatencySpread(100.0, 8.0))
    flat = naive.of(LatencySpread(100.0))
    assert later is not None
    assert flat is not None
    assert later.high == pytest.approx(flat.high / 2, rel=0.05)


def test_the_latency_that_keeps_a_success_and_the_reason(tmp_path: Path) -> None:
    _, ways = read_surface(written(tmp_path))
    aligned, naive = ways
    assert (aligned.budget_ms(0.95), naive.budget_ms(0.95)) == (100.0, 0.0)
    assert aligned.budget_ms(0.99) == -1.0
    assert aligned.budget_ms(0.95, 20.0) < 80.0
    chosen = best(ways, LatencySpread(90.0))
    assert chosen is not None
    assert chosen[0] is aligned
    assert best(ways, LatencySpread(900.0)) is None
    first, second = reasons(ways, 0.95, 0.0)
    assert first.startswith("aligned, replan 2: enough up to 100 ms; 80 %")
    assert second.startswith("naive, replan 2: enough up to 0 ms")
    flat = Way("freeze", "1", 20.0, {0: (20, 20), 4: (20, 20)})
    assert reasons([flat], 0.95, 0.0) == [
        "freeze, replan 1: enough up to 200 ms, the largest latency that was played"
    ]


def test_the_line_that_a_user_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine on the robot that suffices, and the same machine behind a link that is too slow."""
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    report, picture = written(tmp_path), tmp_path / "success.png"
    line = [
        "perf",
        "need",
        "--success",
        "0.95",
        "--report",
        str(report),
        "--model",
        "pi0.5",
        "--hardware",
        "h100,h200",
    ]
    assert main([*line, "--plot", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]
    assert {row["machine"] for row in found if row["enough"]} == {"h100", "h200"}
    assert all(row["success"]["success"] >= 0.95 for row in found if row["enough"])
    assert picture.stat().st_size > 10_000
    assert main([*line, "--network", "4g", "--json"]) in (0, 1)
    slow = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]
    for near, far in zip(
        sorted(r["latency_ms"] for r in found), sorted(r["latency_ms"] for r in slow), strict=True
    ):
        assert far > near
    assert main([*line, "--jitter-ms", "400"]) == 1
    assert "no machine reaches 95%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"schema": "other"}, "schema: expected sinew.eval/1"),
        ({"control_hz": 0}, "control_hz: expected 0.001 to 100000, got 0"),
        ({"variants": [{"variant": {}}]}, "KeyError: 'latency'"),
        ({"variants": 3}, "TypeError"),
        ({"variants": []}, "expected at least two latencies"),
        ({"task": None}, "TypeError"),
        (
            {
                "variants": [
                    {"variant": {"handover": "a", "replan": 1, "latency": "0"}, "wins": 9, "episodes": 8}
                ]
            },
            "wins: expected 0 to 8 of at least one episode, got 9",
        ),
    ],
)
def test_a_file_that_is_no_report_of_latencies(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SinewError, match=r"--report .*report\.json: ") as caught:
        read_surface(written(tmp_path, **changes))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (["--success", "0.9"], "--success, --report: pass both or neither"),
        (["--success", "0.9", "--report", "r.json", "--rate", "5"], "cannot be combined with --rate"),
        (["--rate", "5", "--jitter-ms", "3"], "also pass --success and --report"),
    ],
)
def test_flags_that_do_not_belong_together(
    line: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perf", "need", *line]) == 1
    assert text in capsys.readouterr().err


def test_names_of_machines_do_not_lie_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the figure needs matplotlib")
    _, ways = read_surface(written(tmp_path))
    figures: list[Any] = []
    monkeypatch.setattr(plots.figures, "save", lambda figure, path: figures.append(figure))
    plots.success(
        ways, 0.95, [("a", 10.0), ("b", 11.0), ("c", 90.0), ("d", 900.0)], tmp_path / "x.png", "pen"
    )
    (figure,) = figures
    assert [text.get_text() for text in figure.axes[0].texts] == ["a", "c"]
