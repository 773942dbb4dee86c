"""``make gpu``: test and measure engine cuda on one NVIDIA GPU, in comparison with eager PyTorch.

Run ``python -m benchmarks.gpu [--budget S] [--only NAME,...] [--out DIR]`` in a checkout. It needs torch, triton and
numpy. It needs no network and no bundle (``docs/gpu.md``). After each section, it writes
``benchmarks/results/<gpu>-<time>.json`` and a table in Markdown next to this file. ``--pack`` writes one archive of all
files instead. Each section runs in its own process and with its own time limit. If a section crashes or takes too long,
the other sections still run, and the rows that it has already written are kept.

``--base ARCHIVE`` compares this tree with another one instead (``compare.py``).

``python -m benchmarks.gpu ahead`` compiles the kernels on a machine without a GPU and packs them (``ahead.py``).

The last line of the output is one JSON object. The exit status is 0 if each section that this machine supports
succeeded. The status is 1 if a section failed or if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# the modules in the checkout are enough, without an installation
sys.path[:0] = [str(ROOT / each) for each in ("", "packages/sinew-client/src", "perf")]

Record = dict[str, Any]
# seconds for all sections, so that a run takes ten minutes with GRACE, STUCK and 15 s for the start and the tables
BUDGET = 550
LEAST = 8  # a section is skipped if fewer seconds are left
GRACE = 20  # seconds that a section may take beyond its limit, to finish its current call
COMMIT = "commit"  # file in build/gpu that says from which commit the files were carried
STUCK = 15  # seconds to wait for a killed process, because a process inside the GPU driver may not end


# ----------------------------------------------------------------------------- one section, in its process


def child(name: str, deadline: float, rows: Path, device: str, tiny: bool, traces: Path | None = None) -> int:
    """Run one section. Writes each row as one line of a file, and the result of the section as the last line.

    Args:
        name: Name of the section.
        deadline: End of the section, in seconds of ``time.monotonic()``. All processes share this clock, so the time
            for imports counts too.
        rows: The file to write.
        device: Torch name of the device.
        tiny: Use small models.
        traces: Folder for traces.
    """
    import torch

    from benchmarks.gpu.sections import SECTIONS
    from benchmarks.gpu.session import NotHere, Session

    with rows.open("a", encoding="utf-8") as file:

        def write(record: Record) -> None:
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()

        status, reason = "done", ""
        try:
            torch.manual_seed(0)
            where = torch.device("cuda", 0) if device == "cuda" else torch.device(device)
            left = deadline - time.monotonic()
            SECTIONS[name][0](Session(where, left, lambda row: write({"row": row}), tiny, traces))
        except NotHere as error:
            status, reason = "skipped", str(error)
        except TimeoutError as error:
            status, reason = "partial", f"the time limit of the section ended: {error}"
        except Exception as error:  # noqa: BLE001 - the error is recorded, and the other sections still run
            status, reason = "failed", f"{type(error).__name__}: {error}"[:2000]
            traceback.print_exc()
        write({"status": status, "reason": reason})
    return 0


# ----------------------------------------------------------------------------- all sections


def run_section(name: str, seconds: float, device: str, tiny: bool, traces: Path | None = None) -> Record:
    """Run one section in its own process. Returns {"status", "reason", "seconds", "rows"}."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        start = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.gpu", "--section", name]
        command += ["--deadline", str(start + seconds)]
        command += ["--rows", str(rows), "--device", device, *(["--tiny"] if tiny else [])]
        command += [] if traces is None else ["--traces", str(traces.resolve())]
        environment = dict(os.environ)
        environment.setdefault("TRITON_INTERPRET", "0" if device.startswith("cuda") else "1")
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        killed = False
        try:
            code = process.wait(timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            killed = True
            # the section runs in its own process group, so this also ends the processes that it has started
            os.killpg(process.pid, signal.SIGKILL)
            try:
                code = process.wait(timeout=STUCK)
            except subprocess.TimeoutExpired:
                code = -signal.SIGKILL
        return {**read_rows(rows, killed, code), "seconds": round(time.monotonic() - start, 1)}


def read_rows(path: Path, killed: bool, code: int) -> Record:
    """Read the rows of a section, also if the section did not end normally. Drops a line that is incomplete."""
    rows, end = [], {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if "row" in record:
            rows.append(record["row"])
        else:
            end = record
    if not end:
        reason = "stopped at its time limit" if killed else f"its process ended with status {code}"
        end = {"status": "partial" if killed else "failed", "reason": reason}
    return {"rows": rows, **end}


def run_all(
    names: list[str],
    budget: float,
    seconds: dict[str, float],
    run: Callable[[str, float], Record],
    save: Callable[[Record], None],
    document: Record,
    clock: Callable[[], float] = time.monotonic,
) -> Record:
    """Run the sections one after the other.

    Args:
        names: The sections.
        budget: Seconds for all sections together.
        seconds: Time limit of each section. A section gets less if less of the budget is left.
        run: Runs one section.
        save: Called with the document after each section.
        document: The document to extend.
        clock: Returns the time in seconds.
    """
    start = clock()
    document["sections"] = {}
    for name in names:
        left = budget - (clock() - start)
        if left < LEAST:
            record = {
                "status": "skipped",
                "reason": f"{left:.0f} of {budget:.0f} s were left, which is too short for this section",
                "rows": [],
            }
        else:
            print(f"== {name}, up to {min(seconds[name], left):.0f} s", flush=True)
            try:
                record = run(name, min(seconds[name], left))
            except Exception as error:  # noqa: BLE001 - the other sections still run
                record = {"status": "failed", "reason": f"{type(error).__name__}: {error}", "rows": []}
        document["sections"][name] = record
        print(f"== {name}: {record['status']} {record.get('reason', '')}", flush=True)
        document["seconds"] = round(clock() - start, 1)
        save(document)
    return document


def facts(device: str) -> Record:
    """Return the facts about the machine and about this run."""
    import torch

    from sinew.engine.cuda.kernels.lang import triton

    found: Record = {
        "schema": "sinew.gpu/1",
        "gpu": platform.processor() or "cpu",
        "torch": torch.__version__,
        "triton": None if triton is None else triton.__version__,
        "cudnn": torch.backends.cudnn.version(),  # torch may use cuDNN for scaled_dot_product_attention
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "command": ["python", "-m", "benchmarks.gpu", *sys.argv[1:]],
    }
    if device.startswith("cuda"):
        where = torch.device(device)
        found |= {
            "gpu": torch.cuda.get_device_name(where),
            "uuid": uuid_of(where),
            "capability": list(torch.cuda.get_device_capability(where)),
            "cuda": torch.version.cuda,
            "memory_gib": round(torch.cuda.get_device_properties(where).total_memory / 2**30, 1),
        }
    return found


def uuid_of(device: Any) -> str:
    """Return the identity of a GPU as ``nvidia-smi`` prints it, or its index if this PyTorch does not have it."""
    import torch

    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index or 0) if found is None else f"GPU-{found}"


def commit() -> str:
    """Return the commit of this checkout, or of the checkout from which the files were carried."""
    if (carried := ROOT / "build" / "gpu" / COMMIT).is_file() and not (ROOT / ".git").exists():
        return carried.read_text()
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def lacking(device: str) -> list[str]:
    """Return one text for each requirement that this machine does not satisfy."""
    try:
        import torch
    except ImportError:
        return ["torch is not installed"]
    from sinew.engine.cuda.kernels.lang import triton

    found = ["triton is not installed"] if triton is None else []
    if device.startswith("cuda") and not torch.cuda.is_available():
        found.append(f"torch {torch.__version__} sees no CUDA device")
    return found


def stem(document: Record) -> str:
    """Return the start of the file names of a run: the GPU, and the date and time in UTC."""
    name = re.sub(r"[^a-z0-9]+", "-", document["gpu"].lower()).strip("-")
    return f"{name}-{document['date'][:16].replace(':', '').replace('T', '-')}"


def save_to(folder: Path) -> Callable[[Record], None]:
    """Return a function that writes the JSON document and the table. It writes each file in one atomic step."""
    from benchmarks.gpu.table import markdown

    def save(document: Record) -> None:
        name = stem(document)
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in (("json", json.dumps(document, indent=1)), ("md", markdown(document))):
            part = folder / f"{name}.{suffix}.part"
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(folder / f"{name}.{suffix}")
        document["file"] = f"{name}.json"

    return save


def pack(folder: Path, archive: Path) -> None:
    """Write all files of a folder to an archive, in one atomic step."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, path.name)
    part.replace(archive)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["ahead"]:
        from benchmarks.gpu import ahead

        return ahead.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all sections together")
    parser.add_argument("--only", help="sections, comma-separated; all that need a GPU by default")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--pack", action="store_true", help="write one archive for all files of the run")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="ARCHIVE",
        help="compare this tree with the one in ARCHIVE, in turns; --only then takes models",
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda:N; cpu with --tiny is for the suite's own tests"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="use small models; shows that the sections run, but measures nothing",
    )
    for name, kind in (("--section", str), ("--deadline", float), ("--rows", Path), ("--traces", Path)):
        # internal options, which run_section passes to the process of a section
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # section "bounds" only counts operations, so it needs no GPU
    at_home = (options.section or options.only) == "bounds"
    if options.device.startswith("cpu") and not options.tiny and not at_home:
        parser.error("--device cpu: add --tiny, because full-size models need a GPU")
    if missing := lacking(options.device):
        print(
            f"nothing was measured: {'; '.join(missing)}. docs/gpu.md says what is needed.", file=sys.stderr
        )
        print(json.dumps({"schema": "sinew.gpu/1", "status": "nothing was measured", "missing": missing}))
        return 1
    if options.section:
        where = options.device, options.tiny, options.traces
        return child(options.section, options.deadline, options.rows, *where)

    from benchmarks.gpu.clocks import Clocks
    from benchmarks.gpu.compare import compared
    from benchmarks.gpu.models import TARGETS
    from benchmarks.gpu.sections import SECTIONS

    known = [*TARGETS] if options.base is not None else [*SECTIONS]
    if unknown := set((options.only or known[0]).split(",")).difference(known):
        parser.error(f"--only: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    about = facts(options.device) | {"tiny": options.tiny}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory())) if options.pack else options.out
        write = save_to(folder)
        on_cpu = options.device.startswith("cpu")
        clocks = None if on_cpu else held.enter_context(Clocks(about["uuid"]))

        def save(document: Record) -> None:
            if clocks is not None:
                document["clocks"] = clocks.record()
            write(document)
            if options.pack:
                pack(folder, options.out / f"{stem(document)}.tgz")

        def timed(run: Callable[[str, float], Record]) -> Callable[[str, float], Record]:
            def timed_run(name: str, seconds: float) -> Record:
                start = time.monotonic()
                record = run(name, seconds)
                return record if clocks is None else record | {"clocks": clocks.since(start)}

            return timed_run

        if options.base is not None:
            names = options.only.split(",") if options.only else [*TARGETS]
            run = partial(compared, options.base, options.device, options.tiny)
            limits = dict.fromkeys(names, options.budget / len(names))
        else:
            names = [name for name in SECTIONS if name != "bounds" or options.device.startswith("cpu")]
            names = names if options.only is None else options.only.split(",")
            traces = folder / stem(about)
            run = partial(run_section, device=options.device, tiny=options.tiny, traces=traces)
            limits = {name: SECTIONS[name][1] for name in names if name in SECTIONS}
        document = run_all(names, options.budget, limits, timed(run), save, about)
        print((folder / document["file"]).with_suffix(".md").read_text(encoding="utf-8"))
    statuses = {name: section["status"] for name, section in document["sections"].items()}
    archive = {"archive": f"{stem(about)}.tgz"} if options.pack else {}
    print(json.dumps({"schema": "sinew.gpu/1", "file": document["file"], **archive, "sections": statuses}))
    return int("failed" in statuses.values())


if __name__ == "__main__":
    sys.exit(main())
