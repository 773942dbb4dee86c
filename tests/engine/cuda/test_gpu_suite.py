"""``make gpu`` without a GPU: budgets, failures that stay where they happen, tables, and what it needs installed.
Its models, sections: test_gpu_ladder.py."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import carry, timeline
from benchmarks.gpu.models import MODELS, TARGETS
from benchmarks.gpu.roofline import work
from benchmarks.gpu.sections import SECTIONS, run_tests
from benchmarks.gpu.table import joined, markdown, table

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).resolve().parents[3]
# An interpreter without the packages of the test environment.
BASE_PYTHON = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")


# ----------------------------------------------------------------------------- budgets and processes


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_with(sections: dict[str, float | Exception], budget: float) -> tuple[dict, list[dict], list[float]]:
    """sections: name -> seconds that it takes, or what it raises. Returns document, what was saved, times given."""
    clock, saved, given = Clock(), [], []

    def run(name: str, seconds: float) -> dict:
        given.append(seconds)
        takes = sections[name]
        if isinstance(takes, Exception):
            raise takes
        clock.now += min(takes, seconds)
        return {"status": "done" if takes <= seconds else "partial", "reason": "", "rows": [{"name": name}]}

    def save(document: dict) -> None:
        saved.append(json.loads(json.dumps(document)))

    document = gpu.run_all(list(sections), budget, dict.fromkeys(sections, 50.0), run, save, {}, clock)
    return document, saved, given


def test_each_section_has_its_own_time_and_all_have_one() -> None:
    document, saved, given = run_with({"a": 20.0, "b": 80.0, "c": 10.0, "d": 1.0}, 80)
    assert {name: s["status"] for name, s in document["sections"].items()} == {
        "a": "done",
        "b": "partial",
        "c": "done",
        "d": "skipped",
    }
    assert given == [50.0, 50.0, 10.0]
    assert document["sections"]["d"]["reason"] == "0 of 80 s were left, which is too short for this section"
    assert [list(each["sections"]) for each in saved] == [
        ["a"],
        ["a", "b"],
        ["a", "b", "c"],
        ["a", "b", "c", "d"],
    ]


def test_the_default_budget_is_ten_minutes_at_worst() -> None:
    """The last section begins in time, does not end in time, and its process does not die; 15 s to start and print."""
    assert gpu.BUDGET + gpu.GRACE + gpu.STUCK + 15 <= 600


def test_a_section_that_fails_costs_only_itself() -> None:
    document, saved, _ = run_with({"a": 5.0, "b": RuntimeError("lost the device"), "c": 5.0}, 100)
    assert document["sections"]["b"] == {
        "status": "failed",
        "reason": "RuntimeError: lost the device",
        "rows": [],
    }
    assert document["sections"]["a"]["rows"] == [{"name": "a"}]
    assert document["sections"]["c"]["status"] == "done"
    assert len(saved) == 3


@pytest.mark.parametrize(
    ("text", "killed", "code", "status", "rows"),
    [
        ('{"row": {"a": 1}}\n{"status": "done", "reason": ""}\n', False, 0, "done", 1),
        ('{"row": {"a": 1}}\n{"row": {"a', True, -9, "partial", 1),
        ("", True, -9, "partial", 0),
        ('{"row": {"a": 1}}\n', False, -11, "failed", 1),
    ],
)
def test_rows_outlive_their_process(
    tmp_path: Path, text: str, killed: bool, code: int, status: str, rows: int
) -> None:
    path = tmp_path / "rows"
    path.write_text(text)
    record = gpu.read_rows(path, killed, code)
    assert (record["status"], len(record["rows"])) == (status, rows)
    assert record["reason"] or status == "done"


def test_sections_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    record = gpu.run_section("machine", 60, "cpu", True)
    assert record["status"] == "done"
    assert len(record["rows"]) == 2
    assert gpu.run_section("gaps", 60, "cpu", True)["reason"] == "launches and barriers need a GPU"
    monkeypatch.setattr(gpu, "GRACE", 0.5)
    record = gpu.run_section("ladder pi0.5", 0.1, "cpu", True)
    assert (record["status"], record["reason"]) == ("partial", "stopped at its time limit")


def test_a_section_counts_from_when_its_process_began(tmp_path: Path) -> None:
    """What importing took is gone. Without a GPU and at full size: ``bounds`` alone may run so."""
    rows = tmp_path / "rows"
    asked = ["--device", "cpu", "--section", "bounds", "--rows", str(rows)]
    assert gpu.main([*asked, "--deadline", str(time.monotonic() - 1)]) == 0
    (end,) = map(json.loads, rows.read_text().splitlines())
    assert end["status"] == "partial"
    assert end["reason"].startswith("the time limit of the section ended: pi0.5")


def test_a_process_that_does_not_die_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the driver cannot be interrupted, not even by SIGKILL."""
    waited, killed = [], []

    class Stuck:
        pid = 123456789

        def __init__(self, *args: object, **options: object) -> None:
            pass

        def wait(self, timeout: float) -> int:
            waited.append(timeout)
            raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", Stuck)
    monkeypatch.setattr(gpu.os, "killpg", lambda pid, signal: killed.append(pid))
    record = gpu.run_section("machine", 30, "cuda", False)
    assert record["status"] == "partial"
    assert waited == [30 + gpu.GRACE, gpu.STUCK]
    assert killed == [Stuck.pid]


@pytest.mark.parametrize(
    ("program", "seconds", "row"),
    [
        ("print('x\\n3 passed, 1 skipped in 2 s')", 60, {"returncode": 0, "passed": 3, "skipped": 1}),
        ("print('1 failed, 2 passed in 2 s'); exit(1)", 60, {"returncode": 1, "failed": 1, "passed": 2}),
        ("import time; print('..', flush=True); time.sleep(60)", 2, {"returncode": None, "tail": ".."}),
    ],
)
def test_runs_of_pytest_are_counted(program: str, seconds: float, row: dict) -> None:
    found = run_tests([sys.executable, "-c", program], seconds)
    assert row.items() <= found.items()
    json.dumps(found)


# ----------------------------------------------------------------------------- the table


@pytest.fixture
def document() -> dict:
    case = TARGETS["smolvla"].name
    rung = {"case": case, "target_ms": 3.5, "p95_ms": 3.2, "calls": 100, "l2": 4e-3, "drift": 0.0}
    sections = {
        "machine": [
            {"what": "product, bfloat16", "flops": 785e12},
            {"what": "copy", "bandwidth": 4.3e12},
            {"what": "product, e4m3", "flops": 1570e12},
        ],
        "checks": [
            {"kernel": "row_norm", "dtype": "torch.float32", "sizes": "{}", "error": ""},
            {"kernel": "gated_mlp", "dtype": "torch.float32", "sizes": "{}", "error": "L2 | of\n0.5"},
        ],
        "ladder smolvla": [
            {
                **rung,
                "rung": "engine",
                "p50_ms": 2.0,
                "p99_ms": 2.1,
                **{
                    f"{name}_bytes": gib << 30
                    for gib, name in enumerate(("weights", "held", "peak", "reserved", "device"), 1)
                },
            },
            {"case": case, "rung": "engine", "vision_ms": 1.1, "prefix_ms": 0.2, "head_ms": 0.9},
            {**rung, "rung": "fp8", "p50_ms": 4.0, "p99_ms": 6.0},
            {**rung, "rung": "eager", "p50_ms": 3.6, "p99_ms": None},
            {"case": case, "rung": "eager", "error": "its stages failed"},
            {"case": case, "rung": "graph", "error": "illegal access"},
        ],
        "ladder pi0": [
            {**rung, "case": "x", "rung": "engine", "p50_ms": 9.0, "p99_ms": 9.1, "target_ms": None}
        ],
        "timeline smolvla": [
            {
                "case": case,
                "variant": "engine",
                "what": "host",
                "graph_launches": 1,
                "kernel_launches": 0,
                "copies": {"HtoD (Pinned -> Device)": [3, 1900], "DtoH (Device -> Pinned)": [1, 28]},
                "host_us": 2100.0,
                "copying_us": 60.0,
                "launching_us": 400.0,
                "waiting_us": 1600.0,
                "rest_us": 40.0,
                "before_us": 20.0,
                "after_us": None,
            },
            {"case": case, "variant": "engine", "what": "replay", "launches": 9, "span_us": 2000.0},
            {
                "case": case,
                "variant": "engine",
                "what": "splitk_linear_kernel",
                "grid": "[4, 1, 1]",
                "launches": 2,
                "us": 40.0,
                "work": [(785 * 10**6, 43 * 10**6)] * 2,
            },
        ],
        "bounds": [{"case": case, "work": work(TARGETS["smolvla"])}],
        "inductor pi0.5": [],
    }
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-11-21T00:00:00Z",
        "seconds": 300.0,
        "sections": {
            name: {"status": "done", "seconds": 1.0, "rows": rows} for name, rows in sections.items()
        },
    }


def test_the_table_says_what_was_measured(document: dict) -> None:
    text = markdown(document)
    lines = text.splitlines()
    assert lines[0] == "# NVIDIA H200, 2026-11-21"
    case = TARGETS["smolvla"].name
    assert f"| {case} | engine | 3.5 | 2.000 | 500 | 5 % | yes | 4.0e-03 |" in lines
    assert f"| {case} | fp8 | 3.5 | 4.000 | 250 | 50 % | no | 4.0e-03 |" in lines
    assert not any("| 9.000 | 111 |" in line for line in lines)  # which nobody asked for
    kept = f"| {case} | eager | 3.600 | 3.200 | - | - | 100 | 4.0e-03 | 0.0e+00 | its stages failed |"
    assert kept in lines
    stage = next(line for line in lines if line.startswith(f"| {case} | engine") and "(" in line)
    assert stage == f"| {case} | engine | 1.100 (50 %) | 0.200 (36 %) | 0.900 (51 %) | 2.000 (54 %) |"
    assert f"| {case} | engine | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 |" in lines
    assert (
        f"| {case} | engine | 1 | 0 | 3 HtoD (Pinned -> Device), 1900 bytes and 1 DtoH (Device -> Pinned), 28 bytes |"
        " 2100 | 60 | 400 | 1600 | 40 | 20 | - |"
    ) in lines
    limits = f"| {case} | engine | splitk_linear_kernel | [4, 1, 1] | 2 | 40 | 20 | memory | 50 % |"
    assert limits in lines  # 10 us of reading each, 1 us of arithmetic
    assert (
        f"* {case}, engine: weights of these read at 0.04 TB/s over the whole replay, 1 % of a copy's rate"
        in lines
    )
    assert "1 of 2 kernel checks hold, 0 do not apply." in text
    assert "| gated_mlp | torch.float32 | {} | L2 / of 0.5 |" in lines
    assert "785 TFLOP/s" in text
    assert "illegal access" in text


def test_the_table_of_what_there_is(document: dict) -> None:
    del document["sections"]["machine"]
    assert "The limits of the device were not measured" in markdown(document)
    assert "illegal access" in markdown(document)
    document["sections"] = {"machine": {"status": "failed", "reason": "no | device", "rows": []}}
    assert "| machine | failed | 0 | 0 | no / device |" in markdown(document).splitlines()
    assert table(("a",), []) == ""
    assert "These numbers measure nothing" in markdown(document | {"tiny": True})


def test_one_table_of_several_calls(document: dict) -> None:
    """The rooflines are counted at home, the ceilings are measured on the machine."""
    counted = {"gpu": "cpu", "sections": {"bounds": document["sections"]["bounds"]}}
    whole = markdown(document)
    del document["sections"]["bounds"]
    assert "(54 %)" in whole
    assert "(54 %)" not in markdown(document)
    assert "2.000 (54 %)" in markdown(joined([document, counted]))


def test_results_are_written_whole(tmp_path: Path, document: dict) -> None:
    gpu.save_to(tmp_path)(document)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "nvidia-h200-2026-11-21-0000.json",
        "nvidia-h200-2026-11-21-0000.md",
    ]
    assert json.loads((tmp_path / document["file"]).read_text())["gpu"] == "NVIDIA H200"


# ----------------------------------------------------------------------------- the command


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "nothing was measured" in said.err
    assert "sees no CUDA device" in said.err
    assert json.loads(said.out.splitlines()[-1])["status"] == "nothing was measured"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu"], "--device cpu: add --tiny"),
        (["--device", "cpu", "--tiny", "--only", "machine,laddr"], "got laddr"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert words in capsys.readouterr().err


# Packages that a machine with torch, triton and numpy alone does not have.
OTHERS = (
    "PIL",
    "cyclopts",
    "gguf",
    "google",  # protobuf
    "hypothesis",
    "msgspec",
    "onnxruntime",
    "pytest",
    "rich",
    "safetensors",
    "tokenizers",
    "zmq",
)
# Run every section without time. A section that finds its files stops at its first look at the clock.
NO_TIME = """
import json, sys
import benchmarks.gpu.__main__
import torch
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.session import NotHere, Session
found = {}
for name, (run, _) in SECTIONS.items():
    if name.startswith(("machine", "inductor")):
        continue
    found[name] = "done"
    try:
        run(Session(torch.device("cpu"), 0.0, lambda row: None, tiny=True))
    except (NotHere, TimeoutError) as error:
        found[name] = type(error).__name__
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The unpacked archive of a borrowed machine, and an environment with torch, triton and numpy alone."""
    folder = tmp_path_factory.mktemp("carried")
    for name in carry.files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "build" / "gpu").mkdir(parents=True, exist_ok=True)
    (folder / "build" / "gpu" / gpu.COMMIT).write_text("v1-2-gabc")
    bare = folder / "site"
    bare.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.suffix != ".pth" and not path.name.startswith(("__editable__", "_pytest", *OTHERS)):
            (bare / path.name).symlink_to(path)
    return folder, os.environ | {"PYTHONPATH": str(bare), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


def test_the_whole_command_in_a_bare_environment(
    carried: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """On the carried files, without an installation of Sinew."""
    folder, environment = carried
    command = [
        BASE_PYTHON,
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--tiny",
        "--pack",
        "--out",
        str(tmp_path),
    ]
    command += ["--only", "machine,tests,ladder pi0,timeline pi0,bounds"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["sections"] == dict.fromkeys(("machine", "ladder pi0", "timeline pi0", "bounds"), "done") | {
        "tests": "skipped"
    }
    assert [path.name for path in tmp_path.iterdir()] == [last["archive"]]
    with tarfile.open(tmp_path / last["archive"]) as tar:
        names = tar.getnames()
        made = json.load(tar.extractfile(last["file"]))
        text = tar.extractfile(last["file"].replace(".json", ".md")).read().decode()
    traces = [name for name in names if name.endswith("json.gz")]
    assert len(traces) == len(timeline.VARIANTS)
    assert len(names) == 2 + len(traces)
    assert made["sections"]["tests"]["reason"].startswith("the golden cases were left at home")
    assert made["tiny"] is True
    assert made["commit"] == "v1-2-gabc"
    assert "Stages against the roofline" in text
    assert "A chunk on the host\n" in text


def test_every_section_finds_its_files_on_a_borrowed_machine(carried: tuple[Path, dict[str, str]]) -> None:
    folder, environment = carried
    done = subprocess.run(
        [BASE_PYTHON, "-c", NO_TIME], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ends = {"gaps": "NotHere", "tests": "NotHere", "tiles": "NotHere"}
    ends["repeats"] = "done"  # a CPU has no launches to repeat
    first = {name: name.partition(" ")[0] for name in SECTIONS}
    assert found == {
        name: ends.get(kind, "TimeoutError")
        for name, kind in first.items()
        if kind not in ("machine", "inductor")
    }


def test_what_is_carried_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """No golden cases unless somebody asks, and less than a borrowed machine accepts before the files are packed."""
    names = carry.files()
    assert not [name for name in names if name.startswith(carry.FIXTURES)]
    assert sum((ROOT / name).stat().st_size for name in names) < carry.MOST
    assert [name for name in carry.files(fixtures=True) if name.startswith(carry.FIXTURES)]
    monkeypatch.setattr(carry, "OUT", tmp_path / "carry.tgz")
    monkeypatch.setattr(carry, "ROOT", tmp_path)
    monkeypatch.setattr(carry, "files", lambda fixtures: ["a"])
    (tmp_path / "a").write_bytes(os.urandom(5000))
    assert carry.main([]) == 0
    assert (tmp_path / gpu.COMMIT).read_text() == gpu.commit() != "unknown"
    monkeypatch.setattr(carry, "MOST", 4000)
    assert carry.main([]) == 1
    assert "too large" in capsys.readouterr().err


def test_the_make_target_needs_no_environment() -> None:
    done = subprocess.run(
        ["make", "-n", "gpu", "PYTHON_GPU=some-python"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "some-python -m benchmarks.gpu" in done.stdout
    assert "pip" not in done.stdout
    assert "venv" not in done.stdout


def test_what_ten_minutes_are_for_comes_first() -> None:
    """Compiling the large models is what is left out."""
    assert gpu.BUDGET + gpu.GRACE < 600
    names = list(SECTIONS)
    assert names[:5] == ["machine", "checks", "gaps", "ladder pi0.5", "timeline pi0.5"]
    assert names.index("timeline pi0") < names.index("library pi0.5") < names.index("ladder groot")
    assert all(name.startswith("inductor") for name in names[-len(MODELS) :])


def test_a_timeline_sums_kinds_and_gaps() -> None:
    def launch(name: str, start: float, length: float, grid: int) -> dict:
        return {"name": name, "cat": "kernel", "ts": start, "dur": length, "args": {"grid": [grid, 1, 1]}}

    events = [launch("a", 0, 10, 1), launch("b", 12, 5, 2), launch("a", 16, 10, 1), launch("a", 30, 4, 3)]
    whole, *kinds = timeline.rows_of(events)
    assert (whole["launches"], whole["span_us"], whole["busy_us"]) == (4, 34, 29)
    assert whole["gaps_us"] == 5
    assert [(row["what"], row["launches"], row["us"]) for row in kinds] == [
        ("a", 2, 20),
        ("b", 1, 5),
        ("a", 1, 4),
    ]


def call(start: float, *inside: dict) -> list[dict]:
    """A chunk of 100 us in a trace, and what the host and the device did meanwhile."""
    whole = {"cat": "user_annotation", "name": timeline.CALL, "ts": start, "dur": 100.0}
    return [whole, *({**event, "ts": start + event["ts"]} for event in inside)]


def runtime(name: str, start: float, length: float) -> dict:
    return {"cat": "cuda_runtime", "name": name, "ts": start, "dur": length}


GRAPH = runtime("cudaGraphLaunch_v10000", 12.0, 30.0)


def test_the_host_is_one_launch_and_its_copies() -> None:
    events = call(0.0, GRAPH, runtime("cudaDeviceGetAttribute", 2.0, 1.0))
    events += call(
        200.0,
        {"cat": "user_annotation", "name": "copies", "ts": 1.0, "dur": 10.0},
        runtime("cudaMemcpyAsync", 2.0, 4.0),
        runtime("cudaMemcpyAsync", 7.0, 3.0),
        GRAPH,
        {"cat": "user_annotation", "name": "chunk", "ts": 11.0, "dur": 32.0},
        {
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD (Pinned -> Device)",
            "ts": 6,
            "dur": 2,
            "args": {"bytes": 9},
        },
        {
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD (Pinned -> Device)",
            "ts": 9,
            "dur": 2,
            "args": {"bytes": 8},
        },
        {
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoH (Device -> Pinned)",
            "ts": 90,
            "dur": 2,
            "args": {"bytes": 7},
        },
        runtime("cudaStreamSynchronize", 50.0, 45.0),
    )
    row = timeline.host_row(events)
    assert (row["graph_launches"], row["kernel_launches"]) == (1, 0)
    assert row["copies"] == {"HtoD (Pinned -> Device)": [2, 17], "DtoH (Device -> Pinned)": [1, 7]}
    parts = [row[f"{name}_us"] for name in ("host", "copying", "launching", "waiting", "rest")]
    assert parts == [100, 10, 30, 45, 15]
    assert (row["before_us"], row["after_us"]) == (6, 8)
    assert row["calls"][0] == ("cudaStreamSynchronize", 1, 45.0)
    assert ("cudaMemcpyAsync", 2, 7.0) in row["calls"]
    with pytest.raises(RuntimeError, match=r"as many launches of graphs for each chunk, got \[1, 2\]"):
        timeline.host_row([*call(0.0, GRAPH), *call(200.0, GRAPH, GRAPH)])
    outside = timeline.host_row(call(0.0, GRAPH, runtime("cudaLaunchKernel", 60.0, 5.0)))
    assert (outside["kernel_launches"], outside["launching_us"]) == (1, 35)


def test_a_chunk_of_several_launches_fails_its_section() -> None:
    timeline.check_one_launch({"engine": 1, "fp8": 1})
    with pytest.raises(
        RuntimeError, match="expected one launch of a graph for each chunk, got .*'graph': 12"
    ):
        timeline.check_one_launch({"engine": 1, "graph": 12})


def test_a_trace_holds_the_last_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    events = [told, *call(0.0, GRAPH), *call(200.0, GRAPH), runtime("cudaFree", 400.0, 1.0)]
    path = tmp_path / "out" / "x.json.gz"
    assert timeline.kept(events, path) == "x.json.gz"
    shown = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert shown == [told, *call(200.0, GRAPH)]
    monkeypatch.setattr(timeline, "MOST_TRACE", 10)
    with pytest.raises(RuntimeError, match="y.json.gz: expected at most 10 bytes of a trace, got"):
        timeline.kept(events, tmp_path / "y.json.gz")
    assert not (tmp_path / "y.json.gz").exists()


def test_work_is_told_of_kinds_that_are_alone() -> None:
    """Two kinds of one name and grid differ in their blocks: which launch is whose is not known."""
    known = {("a", "[1, 1, 1]"): [(8, 4)] * 2, ("b", "[1, 1, 1]"): [(8, 4)] * 2}

    def launch(name: str, start: float, block: int) -> dict:
        facts = {"grid": [1, 1, 1], "block": [block, 1, 1], "stream": 7}
        return {"name": name, "cat": "kernel", "ts": start, "dur": 1, "args": facts}

    events = [launch("a", 0, 128), launch("a", 2, 128), launch("b", 4, 128), launch("b", 6, 256)]
    whole, *kinds = timeline.rows_of(events, known)
    assert whole["streams"] == 1
    assert [(row["what"], row.get("work")) for row in kinds] == [
        ("a", known["a", "[1, 1, 1]"]),
        ("b", None),
        ("b", None),
    ]


def test_the_timeline_runs_without_a_gpu(tmp_path: Path) -> None:
    record = gpu.run_section("timeline smolvla", 120, "cpu", True, tmp_path / "cpu-2026-11-27")
    assert record["status"] == "done", record
    hosts = [row for row in record["rows"] if row["what"] == "host"]
    traces = [row["file"] for row in record["rows"] if row["what"] == "trace"]
    assert traces == [f"cpu-2026-11-27-smolvla-{v}.json.gz" for v in timeline.VARIANTS]
    for row, trace in zip(hosts, traces, strict=True):
        shown = json.loads(gzip.decompress((tmp_path / trace).read_bytes()))["traceEvents"]
        spans = [event["name"] for event in shown if event.get("cat") == "user_annotation"]
        assert spans == [timeline.CALL, "copies", "chunk", "copies"]
        assert row["graph_launches"] == 0
        assert 0 < row["copying_us"] < row["host_us"]
    record["rows"] = [row for row in record["rows"] if row["what"] not in ("host", "trace")]
    assert {row["variant"] for row in record["rows"]} == set(timeline.VARIANTS)
    assert all(row["launches"] > 0 for row in record["rows"])
