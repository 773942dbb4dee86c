"""Pages, gates and plans from another laboratory: what they name is used only if the person here typed it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the pen task needs the sim extra")

from sinew.cli import main
from sinew.core import SinewError

from sinew_eval.episodes import campaign
from sinew_eval.episodes.outside import TypedNames
from sinew_eval.episodes.settings import Task, Variant
from sinew_eval.evidence import leaderboard, repeat
from sinew_eval.farm import files, shards
from sinew_eval.foreign.model_server import _array
from sinew_eval.report.gate import GATES, read_gate

KEY = "a-key-of-a-robot"
DEEP = "[" * 200_000


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    words = [
        "eval",
        "expert",
        "--env",
        "sinew/Pen-v0",
        "--episodes",
        "2",
        "--workers",
        "1",
        "--out",
        str(folder),
    ]
    assert main(words) == 0
    return json.loads((folder / "report.json").read_text())


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that is here, and the file that it writes when it is imported."""
    flag = tmp_path / "imported"
    (tmp_path / "somebodys.py").write_text(
        f"open({str(flag)!r}, 'w').close()\n"
        "from sinew_eval.episodes.adapters import Direct as Adapter\n"
        "from sinew_eval.sim.pen import PenEnv as Env\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield flag
    sys.modules.pop("somebodys", None)


def written(path: Path, record: Any) -> Path:
    path.write_text(json.dumps(record))
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the error of a command that fails."""
    capsys.readouterr()
    assert main(["eval", *map(str, words)]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "a fault of this program" not in text
    return text


@pytest.mark.parametrize(("field", "name"), [("env", "somebodys:Env"), ("adapter", "somebodys:Adapter")])
def test_a_page_runs_code_only_if_it_was_typed(
    field: str,
    name: str,
    code: Path,
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = deepcopy(report)
    record["task"][field] = name
    path = written(tmp_path / "report.json", record)
    said = refused(capsys, "--repeat", path, "--workers", 1)
    assert f"task.{field} {name}" in said
    assert f"add: --{field} {name}" in said
    refused(capsys, "--repeat", path, "--workers", 1, f"--{field}", "another:Name")
    assert not code.exists()
    assert main(["eval", "--repeat", str(path), "--workers", "1", f"--{field}", name]) in (0, 1)
    assert code.exists()


def test_a_gate_runs_code_only_if_it_was_typed(
    code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads((GATES / "pen.json").read_text())
    record["protocol"] |= {"env": "somebodys:Env", "env_options": {"image_size": 64}}
    path = written(tmp_path / "gate.json", record)
    said = refused(capsys, "expert", "--gate", path, "--episodes", 1)
    assert "add: --env somebodys:Env --env-options" in said
    assert "--env-options" in refused(
        capsys, "expert", "--gate", path, "--env", "somebodys:Env", "--episodes", 1
    )
    capsys.readouterr()
    assert main(["validate", "pen", "--gate", str(path)]) == 1
    assert "add: --env somebodys:Env" in " ".join(capsys.readouterr().err.split())
    assert not code.exists()
    gate = read_gate(path)
    task = gate.task(TypedNames(env="somebodys:Env", env_options={"image_size": 64}))
    assert task.env == "somebodys:Env"


def test_a_plan_runs_code_only_if_it_was_typed(
    code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue = tmp_path / "run" / files.FOLDER
    files.EpisodeQueue(queue, "").make()
    plan = files.FarmPlan.of(Task("somebodys:Env"), [Variant("expert", handover="aligned")], [(0, 1)])
    plan.write(queue)
    assert "add: --env somebodys:Env" in refused(capsys, "--join", tmp_path / "run", "--shards", 1)
    with pytest.raises(SinewError, match="--env somebodys:Env"):  # a shard that is started by hand
        shards.work(queue, "other", TypedNames())
    assert not code.exists()
    assert plan.local("run", TypedNames(env="somebodys:Env"))[0].env == "somebodys:Env"


def test_a_page_contacts_no_server_and_sends_it_no_key(
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SINEW_API_KEY", KEY)
    heard = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            server.accept()[0].close()
            heard.set()

        threading.Thread(target=accept, daemon=True).start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for target in (address, address.replace("tcp", "vla-eval")):
            record = deepcopy(report)
            entry = record["variants"][0]
            entry["policy"] = {"kind": "server", "id": "x"}
            entry["variant"] |= {"target": target, "device": "auto"}
            path = written(tmp_path / "report.json", record)
            assert f"add: {target}" in refused(capsys, "--repeat", path, "--workers", 1)
            assert not heard.wait(0.2)
        recorded = repeat.read(path)
        mine = "tcp://127.0.0.1:1"
        assert recorded.local(TypedNames(policies=(mine,)))[1][0].target == mine
        assert not heard.wait(0.2)


@pytest.mark.parametrize("target", ["fifo", "/dev/zero", "../secret"])
def test_a_page_opens_no_file(
    target: str, report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "fifo")
    record = deepcopy(report)
    record["variants"][0]["policy"] = {"kind": "bundle", "id": "0" * 64}
    record["variants"][0]["variant"]["target"] = str(tmp_path / target)
    path = written(tmp_path / "report.json", record)
    assert "SHA-256 0000000000000000" in refused(capsys, "--repeat", path, "--workers", 1)
    # Typed, it is a regular file or an error
    assert "expected a regular file" in refused(capsys, tmp_path / "fifo", "--repeat", path, "--workers", 1)


def test_deep_json_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gate.json").write_text(DEEP)
    assert "levels of containers" in refused(capsys, "expert", "--gate", tmp_path / "gate.json")
    queue = tmp_path / "run" / files.FOLDER
    files.EpisodeQueue(queue, "").make()
    (queue / files.PLAN).write_text(DEEP)
    assert "levels of containers" in refused(capsys, "--join", tmp_path / "run")
    (queue / files.PLAYED / "5000-x").write_text(DEEP)
    (tmp_path / "run" / campaign.LOG).write_text(DEEP + "\n")
    assert shards.left_over(queue) == campaign.read_log(tmp_path / "run" / campaign.LOG) == {}
    plan = files.FarmPlan.of(Task("sinew/Pen-v0"), [Variant("expert")], [(0, 5000)])
    (job,) = plan.jobs
    (queue / files.PLAYED / job.name).write_text(DEEP)
    reader = files.EpisodeQueue(queue, "x")
    assert reader.read(job, plan.keys[0]) is None
    assert not reader.played(job)  # it is open again
    (queue / files.PLAYED / job.name).mkdir()
    assert shards.left_over(queue) == {}


def test_counts_are_bounded(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {name: value for name, value in report.items() if name != "outcomes"}
    record["seeds"] = {"first": 0, "count": 10**10}
    with pytest.raises(SinewError, match=r"seeds.count: expected a whole number from 0 to 1000000"):
        leaderboard.boards([written(tmp_path / "report.json", record)])
    gate = json.loads((GATES / "pen.json").read_text())
    gate["episodes"] = 10**10
    path = written(tmp_path / "gate.json", gate)
    assert "episodes: expected a whole number from 1 to 1000000" in refused(capsys, "expert", "--gate", path)
    gate |= {"episodes": 100_000, "rule": {"floor": 0.0, "max_drop": 1.0, "alpha": 0.0, "inside": False}}
    never = read_gate(written(path, gate))
    assert never.fails_from(range(never.first_seed, never.first_seed + 100_000)) == 0  # within a second


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("by_task",), {"a": {"interval": "xy"}, "b": {}}),
        (("peak_bytes",), "x"),
        (("bundle",), {"bytes": [1]}),
        (("bundle",), {"name": [1]}),
        (("latency_ms",), {"p50": "x"}),
        (("chunk_size",), 10**400),
        (("policy",), [1]),
    ],
)
def test_a_leaderboard_names_a_field_of_another_type(
    place: tuple[str, ...], value: Any, report: dict[str, Any], tmp_path: Path
) -> None:
    record = deepcopy(report)
    record["variants"][0][place[0]] = value
    with pytest.raises(SinewError, match=rf"variants\[0\]: {place[0]}.*expected"):
        leaderboard.boards([written(tmp_path / "report.json", record)])


@pytest.mark.parametrize(
    "value",
    [
        {"__ndarray__": True, "data": memoryview(b"1234"), "dtype": "i4,(", "shape": [1]},
        {"__ndarray__": True, "data": memoryview(b"1234"), "dtype": "<f4", "shape": [1 << 80]},
        {"__ndarray__": True, "data": memoryview(b"1234"), "dtype": "<f4", "shape": [[1]]},
        {"__ndarray__": True, "data": "1234", "dtype": "<f4", "shape": [1]},
    ],
)
def test_an_array_of_a_model_server_is_read_within_bounds(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        _array(value)


def test_a_report_keeps_file_names_without_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a lab's run"
    words = [
        "eval",
        "expert",
        "--env",
        "sinew/Pen-v0",
        "--episodes",
        "1",
        "--workers",
        "1",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["sinew", *words])
    assert main(words) == 0
    for name in ("report.json", "report.html", "report.md"):
        assert str(tmp_path) not in (out / name).read_text()
    capsys.readouterr()
    assert main(["leaderboard", str(out), "--out", str(tmp_path / "board.html")]) == 0
    assert str(tmp_path) not in (tmp_path / "board.html").read_text()
