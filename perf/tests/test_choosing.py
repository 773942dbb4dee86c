"""Which mode of inference costs least, including its failures: by hand, by drawn episodes, and from reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew.cli import main
from sinew.core import SinewError

from sinew_perf.choosing import Mode, ranges, read_mode, select

ROBOT, EDGE, CLOUD = Mode("robot", 98, 100, 1.0), Mode("edge", 90, 100, 0.3), Mode("cloud", 60, 100, 0.1)


def written(folder: Path, name: str, wins: int, task: str = "sinew/Pen-v0", **more: int) -> Path:
    variants = [
        {"label": label, "variant": {"latency": "50ms"}, "wins": count, "episodes": 100}
        for label, count in ({"pen": wins} | more).items()
    ]
    folder = folder / name
    folder.mkdir()
    report = {"schema": "sinew.eval/1", "task": {"env": task}, "variants": variants}
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_the_expected_cost_has_the_failures_in_it() -> None:
    assert EDGE.expected(10.0) == pytest.approx(0.3 + 0.1 * 10.0)
    assert Mode("edge", 90, 100, 0.3, available=0.5).expected(10.0) == pytest.approx(0.3 + 0.55 * 10.0)


def test_ranges_are_the_lower_envelope() -> None:
    """As a search over many costs of a failure finds it."""
    modes = [ROBOT, EDGE, CLOUD, Mode("never", 59, 100, 0.2)]
    found = ranges(modes)
    assert [name for _, name in found] == ["cloud", "edge", "robot"]
    for failure in np.geomspace(1e-3, 1e4, 400):
        best = min(modes, key=lambda mode: mode.expected(failure))
        assert [name for start, name in found if start <= failure][-1] == best.name
    assert found[1][0] == pytest.approx((0.3 - 0.1) / 0.3)
    assert found[2][0] == pytest.approx((1.0 - 0.3) / 0.08)


@pytest.mark.parametrize(("failure", "name"), [(0.1, "cloud"), (3.0, "edge"), (100.0, "robot")])
def test_the_consequence_of_a_failure_decides(failure: float, name: str) -> None:
    selection = select([ROBOT, EDGE, CLOUD], failure)
    assert selection.chosen.mode.name == name
    assert selection.sure
    assert selection.episodes == 0
    assert selection.chosen.low < selection.chosen.expected < selection.chosen.high


def test_few_episodes_do_not_decide_and_state_how_many_would() -> None:
    selection = select([Mode("a", 19, 20, 1.0), Mode("b", 18, 20, 0.9)], 10.0)
    assert not selection.sure
    assert selection.episodes is not None
    many = selection.episodes
    assert select([Mode("a", 19 * many, 20 * many, 1.0), Mode("b", 18 * many, 20 * many, 0.9)], 10.0).sure
    assert select([Mode("a", 9, 10), Mode("b", 9, 10)], 1.0).episodes is None


def test_a_sure_choice_is_right_as_often_as_it_states() -> None:
    """Against drawn truths: the mode whose true cost is least is chosen in at least 95 % of the sure choices."""
    rng = np.random.default_rng(5)
    right = sure = 0
    for number in range(300):
        truth = rng.uniform(0.5, 1.0, 2)
        modes = [
            Mode(f"{k}", int(rng.binomial(100, p)), 100, float(rng.uniform(0, 0.5)))
            for k, p in enumerate(truth)
        ]
        selection = select(modes, 3.0, seed=number)
        if selection.sure:
            costs = [mode.cost + (1 - p) * 3.0 for mode, p in zip(modes, truth, strict=True)]
            sure += 1
            right += selection.chosen.mode is modes[int(np.argmin(costs))]
    assert sure > 150
    assert right / sure > 0.95


def test_an_unreliable_network_makes_the_robot_better() -> None:
    robot, cloud = Mode("robot", 90, 100, 1.0), Mode("cloud", 99, 100, 1.0)
    assert select([robot, cloud], 50.0).chosen.mode.name == "cloud"
    assert select([robot, Mode("cloud", 99, 100, 1.0, available=0.8)], 50.0).chosen.mode.name == "robot"


def test_a_command_reads_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robot, cloud = written(tmp_path, "robot", 99), written(tmp_path, "cloud", 70, other=20)
    modes = ("--mode", f"robot={robot}", "--mode", f"cloud={cloud}/report.json:pen", "--cost", "robot=1")
    assert main(["perf", "choose", *modes, "--failure-cost", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["chosen"] == "robot"
    assert result["ranges"] == [[0.0, "cloud"], [pytest.approx(1 / 0.29), "robot"]]
    assert main(["perf", "choose", *modes, "--failure-cost", "3.5"]) == 1
    out = capsys.readouterr().out
    assert "not decided" in out
    assert "play more episodes: about" in out


def test_a_report_cannot_style_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report may come from another machine. Brackets in its names are text, and not a broken style."""
    task = "x [/bold] [link=http://evil.example]y"
    modes = [
        part
        for name in ("[/a]", "b")
        for part in ("--mode", f"{name}={written(tmp_path, name[-1:] + 'f', 99, task=task)}")
    ]
    assert main(["perf", "choose", *modes, "--failure-cost", "1"]) in (0, 1)
    out = capsys.readouterr().out
    assert "[/bold]" in out
    assert "[/a]" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mode", "a={robot}"), "expected at least two modes"),
        (("--mode", "a={robot}", "--mode", "b={sweep}"), "several variants: write --mode b="),
        (("--mode", "a={robot}", "--mode", "b={sweep}/report.json:no"), "no variant 'no'"),
        (("--mode", "a={robot}", "--mode", "b={other}"), "expected reports of one task"),
        (("--mode", "a={robot}", "--mode", "a={other}"), "a is another mode's name"),
        (("--mode", "a"), "--mode a: expected NAME=REPORT"),
        (("--mode", "a={robot}", "--cost", "b=1"), "--cost b: expected one of a"),
        (("--mode", "a={robot}", "--cost", "a=-1"), "--cost a=-1: expected a number from 0"),
        (("--mode", "a={robot}", "--available", "a=2"), "--available a=2: expected a number from 0 to 1"),
        (("--mode", "a={robot}", "--mode", "b=nowhere"), "--mode b: expected report.json of sinew eval"),
    ],
)
def test_inputs_that_do_not_fit_are_named(
    tmp_path: Path, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: dict[str, Any] = {
        "robot": written(tmp_path, "robot", 99),
        "sweep": written(tmp_path, "sweep", 99, second=90),
        "other": written(tmp_path, "other", 99, task="sinew/Blocks-v0"),
    }
    typed = [text.format(**folders) for text in arguments]
    assert main(["perf", "choose", *typed, "--failure-cost", "1"]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"wins": 200}, {"wins": "many"}, {"episodes": 0}, {"label": None}])
def test_broken_reports_are_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    path = written(tmp_path, "x", 5) / "report.json"
    report = json.loads(path.read_text())
    report["variants"][0] |= change
    report["variants"].append(5 if change == {"label": None} else {"label": "y"})
    path.write_text(json.dumps(report))
    with pytest.raises(SinewError, match="--mode x: expected report.json of sinew eval"):
        read_mode("x", f"{path}:pen")
