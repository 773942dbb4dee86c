"""The seven policies that vla.cpp's authors put on an 8 GB board: does `sinew perf fit` see them fit as they did?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sinew
from sinew.cli import main, terminal
from sinew.core import SinewError

from sinew_perf.cli import machine as perf_machine
from sinew_perf.cli import tiers as perf_tiers
from sinew_perf.request import TracedRequest
from sinew_perf.tiers import measured

MIB = 1 << 20
TIERS = {row.preset: (row.tier, row.rss) for row in measured()}  # their table "Hardware Tiers"
# What their leaderboard measured on a GPU with memory of its own (MiB), and what CUDA and buffers took of it: pi0's
# 5,548 less its weights without the token table.
ON_GPU = {row.preset: row.vram for row in measured() if row.preset not in ("smolvla", "bitvla")}
BUFFERS = 370


def fit(capsys, source: str, *options: Any, **more: Any) -> dict[str, Any]:
    terminal.take_json(["--json"])
    code = perf_machine.fit(source, *options, hardware="orin-nano", search=False, **more)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == (0 if found["fits"] else 1)
    return found


def tier(found: dict[str, Any]) -> str:
    return "fits" if found["fits"] else "alone" if found["fits_alone"] else "no"


@pytest.mark.slow  # seven programs of full size are traced: 40 CPU seconds
@pytest.mark.parametrize("source", TIERS)
def test_seven_policies_on_an_eight_gigabyte_board(source, capsys) -> None:
    """Their files of GR00T hold the projections of 32 robots, and what they measured is a
    whole token table and layers that nothing reads."""
    gr00t = source.startswith("gr00t")
    layout = {"embodiments": 32, "engine": "cuda"} if gr00t else {"engine": "eager"}
    views = TracedRequest(2) if source in ("smolvla", "pi0") else TracedRequest()
    found = fit(capsys, source, request=views, **layout)
    wanted, resident = TIERS[source]
    assert tier(found) == wanted
    total = found["total"] / MIB
    if resident is not None:
        assert total == pytest.approx(resident, rel=0.17)
    weights = sum(row["resident"] for row in found["report"]["weights"]) / MIB
    if source in ON_GPU:
        assert weights + BUFFERS == pytest.approx(ON_GPU[source], rel=0.025)
    alone = fit(capsys, source, request=views, alone=True, **layout)
    assert alone["fits"] == found["fits_alone"]
    # A bundle has one robot's projections, and reads rows of a table that stays in the file.
    ours = {"gr00t-n1.5": "fits", "gr00t-n1.6": "fits", "gr00t-n1.7": "alone"}
    if gr00t:
        assert tier(fit(capsys, source)) == ours[source]


PRINTED = """
BitVLA BitNet-SigLIP 8 100.0 37.85 235.9 1312 101.11 355.65 2199
GR00T-N1.7 Cosmos 16 98.0 10.26 84.1 6302 26.84 - -
GR00T-N1.6 Eagle 16 86.5 10.29 83.6 6048 26.70 - -
GR00T-N1.5 Eagle 16 96.0 14.17 147.0 4866 28.78 84.76* 5975
Evo-1 InternVL3 8 94.5 63.60 131.0 1564 131.01 458.84 2135
SmolVLA SmolVLM2 4 90.5 28.16 54.8 1410 65.41 141.81 2031
pi0 PaliGemma 32 87.5 9.74 207.2 5548 27.90 39.10* 6068
"""  # leaderboard, then AGX Orin, Orin Nano and its resident memory; *: simulator elsewhere


@pytest.mark.slow  # seven programs of full size are traced
def test_tiers_print_every_number_of_theirs(capsys, tmp_path) -> None:
    terminal.take_json(["--json", str(tmp_path / "tiers.json")])
    assert perf_tiers.tiers() == 0
    shown = capsys.readouterr().out.splitlines()
    rows = json.loads((tmp_path / "tiers.json").read_text())["policies"]
    assert [row["measured"]["rank"] for row in rows] == list(range(1, 8))
    for line in PRINTED.split("\n")[1:-1]:
        title, *numbers = line.split()
        own = " ".join(text.replace(",", "") for text in shown if title in text)
        assert all(number.rstrip("*") in own.split() for number in numbers), (title, own)
    for row in rows:
        theirs = row["measured"]
        assert (
            row["tier"] == theirs["tier"] if "tier" in theirs else row["tier"] == TIERS[theirs["preset"]][0]
        )
        assert row["steps"] == (theirs["steps"] or 0)
        assert row["ms"]["rtx3060"] < theirs["inference"]  # a bound is below what was measured
        assert row["params"] == pytest.approx(theirs["params"], rel=0.25)
        if (
            theirs["prefix_share"] is not None
        ):  # prefix-dominated as said; the compact ones less so in practice
            assert row["prefix_share"] > 50
    shares = {row["measured"]["preset"]: row["prefix_share"] for row in rows}
    assert shares["bitvla"] == max(shares.values()) == pytest.approx(99.5, abs=1)
    assert shares["pi0"] == pytest.approx(75, abs=6)


def test_some_tiers(capsys) -> None:
    terminal.take_json(["--json"])
    assert perf_tiers.tiers("SmolVLA") == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["policies"]
    assert row["measured"]["preset"] == "smolvla"
    with pytest.raises(SinewError, match="policy: expected one of bitvla, .*, got 'zebra'"):
        perf_tiers.tiers("zebra")


def test_what_a_board_cannot_be_asked_is_named() -> None:
    with pytest.raises(SinewError, match="--alone: the memory of h200 without other programs is unknown"):
        perf_machine.fit("pi0", hardware="h200", alone=True)
    pen = Path(sinew.__file__).parent / "assets" / "pen.gguf"
    with pytest.raises(
        SinewError, match="embodiments: expected 1, because pen has no weights per robot, got 32"
    ):
        perf_machine.fit(str(pen), embodiments=32, search=False)
    with pytest.raises(SinewError, match="device: engine cpu needs cpu, got 'cuda'"):
        perf_machine.fit(str(pen), engine="cpu", device="cuda", search=False)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "board.json"
    assert main(["bench", "pen", "--runs", "3", "--engine", "eager", "--json", str(path)]) == 0
    return path


def changed(report: Path, out: Path, **changes: Any) -> Path:
    """Write a report with other values: a key is a path whose parts are separated by two underscores."""
    record = json.loads(report.read_text())
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = record
        for part in parts:
            place = place[part]
        place[last] = value
    out.write_text(json.dumps(record))
    return out


def test_reports_of_other_machines_are_rows(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table shows what a user measured on a board and what was measured here."""
    hardware = {"hardware__board": "NVIDIA Jetson AGX Orin", "hardware__gpu": "[red]Orin[/]"}
    board = changed(report, tmp_path / "orin.json", **hardware, samples_ms__total=[20.0, 10.0, 40.0])
    capsys.readouterr()
    assert main(["perf", "tiers", "--report", str(report), "--report", str(board), "--json"]) == 0
    told = capsys.readouterr()
    rows = {row["machine"]: row for row in json.loads(told.out)["rows"]}
    own = json.loads(report.read_text())
    orin = rows.pop(f"[red]Orin[/], NVIDIA Jetson AGX Orin, {own['hardware']['cpu']}")
    assert (orin["p50_ms"], orin["engine"], orin["precision"]) == (20.0, "eager", "fp32")
    (here,) = rows.values()
    assert here["p50_ms"] == pytest.approx(np.median(own["samples_ms"]["total"]))
    assert here["peak_mib"] == own["memory_bytes"]["steady"]["peak"] >> 20


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_ms__total": [0.0]},
        {"samples_ms__total": ["fast"]},
        {"memory_bytes__steady": {}},
        {"hardware__cpu": None, "threads": "many"},
        {"schema": "sinew.bench/0"},
    ],
)
def test_a_report_with_wrong_values_is_rejected(
    changes: dict[str, Any], report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = changed(report, tmp_path / "broken.json", **changes)
    assert main(["perf", "tiers", "--report", str(broken)]) == 1
    assert f"--report {broken}: expected a report of `sinew bench" in capsys.readouterr().err


def test_presets_and_reports_do_not_mix(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "tiers", "pi0", "--report", str(report)]) == 1
    assert "expected no presets with it, got 'pi0'" in capsys.readouterr().err
