"""``sinew bench``: time the stages of a bundle on this machine, or the answers of a server.

For a bundle, load, warm-up and steady state are timed separately. ``bench_server.py`` times a server.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.target import addresses_of
from sinew_client.untrusted import read_json

from sinew.bench.ladder import EngineResult, Observe
from sinew.bench.ladder import ladder as climb
from sinew.bench.measure import PHASES, PROMPT, SCHEMA, hardware, make_observation, measure
from sinew.bench.pauses import COLUMNS, TITLE, parse_pauses, pause_rows
from sinew.cli import terminal
from sinew.cli.bench_server import ASKING, AskingFlags, ask
from sinew.cli.options import RUNS, CountIfAny, Flag, Positive, PositiveIfAny, Runs, changed
from sinew.core import ObservationError, SinewError, progress
from sinew.core.hints import short_reason
from sinew.core.statistics import p99_of, ratio_of_medians, stage_statistics
from sinew.engine.backend import AUTO, BACKENDS

MAX_REPORT = 1 << 26  # largest report of an earlier run, in bytes
STATISTICS = ("mean", "p50", "p95", "p99", "max")


def bench(
    target: str,
    /,
    *,
    runs: CountIfAny = None,
    load: Runs = RUNS,
    server: AskingFlags = ASKING,
    threads: CountIfAny = None,
    image_size: str | None = None,
    prompt: str = PROMPT,
    solver_steps: int | None = None,
    fit_steps: str | None = None,
    ladder: Flag = False,
    deadline_ms: PositiveIfAny = None,
    idle: str | None = None,
    baseline: Path | None = None,
    slower: Positive = 5.0,
    faster: PositiveIfAny = None,
) -> int:
    """Time a bundle, or the answers of a server, stage by stage.

    The frames are noise and the state is zero, because their content does not change the work. The exit status is 1
    if the result is slower than --baseline allows.

    Args:
        target: Policy to time: a bundle, a folder of `sinew export`, a checkpoint or training run, a hub
            name, or a server's address (tcp://HOST:PORT).
        runs: Number of timed inferences, one after the other. Default: 20 for a bundle, 50 for a server.
        threads: Compute threads on this machine. Default: chosen from the cores of this process.
        image_size: HEIGHTxWIDTH of every frame. Default: the sizes that the bundle declares.
        prompt: The instruction.
        solver_steps: Number of solver steps. Default: the bundle's own number.
        fit_steps: Numbers of solver steps, separated by commas, for example 1,2,5,10. Sinew fits a line
            through the medians. This separates the prefix from a step on engines that run both as one.
        ladder: Time every engine that runs the bundle here, each in its own process. The table shows
            milliseconds, processor time, memory, and the error relative to eager.
        deadline_ms: Count the inferences that take longer than this. A server also rejects a request that
            would begin later than this after its arrival.
        idle: Seconds without a request, separated by commas, for example 0,1,10. Sinew times the first answer
            after each pause, 3 times. It is slower if clocks have fallen and caches hold other data.
        baseline: File that `--json FILE` wrote in an earlier run of the same work on the same machine. Sinew
            compares the medians.
        slower: Percent by which the median may exceed the baseline's. A larger difference that is not chance
            is a failure.
        faster: Number of times that this run must be as fast as the baseline, in place of --slower. For example 2
            for `--provider tensorrt` with a baseline of `--provider cuda`: a smaller ratio often means that a
            provider leaves operators to another one.
    """
    size = _image_size_of(image_size)
    here = {
        "--threads": threads, "--fit-steps": fit_steps, "--ladder": ladder or None, "--baseline": baseline,
        "--faster": faster,
    }  # fmt: skip
    if faster is not None and baseline is None:
        raise SinewError("--faster: expected a report to compare with; pass --baseline FILE too")
    before = None if baseline is None else read_report(baseline, "--baseline")
    pauses = parse_pauses(idle)
    if addresses_of(target):
        extra = changed(load) or next((flag for flag, value in here.items() if value is not None), None)
        if extra is not None:
            raise SinewError(
                f"{extra}: expected a policy that runs on this machine, got the server {target}; omit this flag"
            )
        return ask(target, runs or 50, size, prompt, solver_steps, deadline_ms, server, pauses)
    if (extra := changed(server)) is not None:
        raise SinewError(
            f"{extra}: expected the address of a server, tcp://HOST:PORT, got {target}; omit this flag"
        )
    runs = runs or 20
    counts = parse_steps(fit_steps) if fit_steps else ()
    options = load.keywords() | {"threads": threads}
    if ladder:
        for flag, other in {
            "--fit-steps": fit_steps, "--deadline-ms": deadline_ms, "--baseline": baseline, "--idle": idle
        }.items():  # fmt: skip
            if other is not None:
                raise SinewError(
                    f"{flag}: cannot be combined with --ladder, got {other}; omit one of the two"
                )
        if options.pop("engine") != AUTO:
            raise SinewError(
                f"--engine: cannot be combined with --ladder, which measures all engines, got {load.engine}; omit it"
            )
        observe = partial(make_observation, size=size, prompt=prompt, solver_steps=solver_steps)
        return print_ladder(Path(target), runs, options, observe)
    with progress.task("import", PHASES + runs) as advance:
        report = measure(
            Path(target),
            runs,
            options,
            lambda spec: make_observation(spec, size, prompt, solver_steps),
            advance,
            fit_steps=counts,
            pauses=pauses,
        )
    result = report.record | {"stages_ms": stage_statistics(report.timings, report.totals, report.apart)}
    if deadline_ms is not None:
        totals = np.array(result["samples_ms"]["total"])
        misses = int((totals > deadline_ms).sum())
        result["deadline"] = {"ms": deadline_ms, "misses": misses, "miss_rate": misses / runs}
    result["command"] = terminal.typed()
    print_report(result)
    failed = before is not None and compare(before, result, slower, faster)
    terminal.emit(result)
    return int(failed)


def read_report(path: Path, flag: str) -> dict[str, Any]:
    """Read the report of an earlier run, which may be from another person's machine.

    Args:
        path: The file.
        flag: The flag of the command line that names the file, for messages.

    Raises:
        SinewError: The file is not such a report.
    """
    try:
        report = read_json(path, MAX_REPORT)
        _work(report)
        if np.asarray(report["samples_ms"]["total"], np.float64).size and report["schema"] == SCHEMA:
            return report
    except OSError as error:
        raise SinewError(f"{flag} {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError):
        pass
    raise SinewError(
        f"{flag} {path}: expected a report of `sinew bench BUNDLE --json {path}`, but the file has another format;"
        " write it again with that command"
    )


def compare(
    before: dict[str, Any], result: dict[str, Any], slower: float, faster: float | None = None
) -> bool:
    """Compare the median with the baseline's median, print the ratio, and add it to the result.

    Engine and precision may differ from the baseline.

    Args:
        before: The report of the baseline.
        result: The report of this run.
        slower: Percent by which the median may exceed the baseline's.
        faster: Number of times that the run must be as fast as the baseline, which may be of another device; None uses
            ``slower``.

    Returns:
        True if the run is slower than allowed, and the difference is not chance.

    Raises:
        SinewError: The work or the machine differs.
    """
    for (name, was), (_, now) in zip(_work(before).items(), _work(result).items(), strict=True):
        # The ratio of two providers compares two devices.
        if was != now and not (faster and name == "device"):
            raise SinewError(
                f"--baseline: expected the same {name}, {now}, got {was}; measure the baseline again with this"
                " command"
            )
    samples = (each["samples_ms"]["total"] for each in (before, result))
    ratio, low, high = ratio_of_medians(*samples)
    failed = low > (1 / faster if faster else 1 + slower / 100)
    result["baseline"] = {
        "ratio": ratio,
        "interval": [low, high],
        "slower_percent": slower,
        "times_as_fast": faster,
        "failed": failed,
    }
    engine, dtype = (before["policy"][name] for name in ("engine", "dtype"))
    if faster:
        verdict = (
            f"less than {faster:g} times as fast" if failed else f"{faster:g} times as fast is not excluded"
        )
    else:
        verdict = f"slower by more than {slower:g} %" if failed else f"not shown to be {slower:g} % slower"
    earlier = f"{engine}, {dtype}, {before['date']}"
    console = terminal.console()
    console.print(
        f"{ratio:.3f} of the baseline's median ({low:.3f} to {high:.3f}; {earlier}): {verdict}",
        soft_wrap=True,
    )
    if faster and failed and (shares := result["policy"].get("assigned")):
        # A provider that leaves operators to another one is the usual cause of a ratio that is too small.
        console.print(f"providers: {shares}", soft_wrap=True, markup=False)
    return failed


def _work(record: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a report (such as the policy and the sizes) that must be equal in two runs for a
    comparison.
    """
    policy, machine = record["policy"], record["hardware"]
    names = ("architecture", "device", "frames", "chunk_size", "solver_steps", "prompt_tokens")
    return {"cpu": machine["cpu"], "cores": machine["cores"], "threads": record["threads"]} | {
        name: policy[name] for name in names
    }


def print_ladder(bundle: Path, runs: int, options: dict[str, Any], observe: Observe) -> int:
    """Time every engine, and print a row for each. Return 1 if no engine ran."""
    console, rungs = terminal.console(), list[EngineResult]()
    with progress.task(f"timing {bundle.name}", len(BACKENDS)) as advance:
        for rung in climb(bundle, runs, options, observe, advance):
            rungs.append(rung)
    reference = next((rung for rung in rungs if BACKENDS[rung.engine].reference and not rung.reason), None)
    records = [rung.record(reference) for rung in rungs]
    title = f"milliseconds over {runs} runs, each engine in its own process"
    columns = (">p50", ">max", ">of eager", ">CPU s", ">ready s", ">peak", ">error")
    table = terminal.table(title, "engine", "computes", *columns)
    for row in (row for row in records if "reason" not in row):
        apart = ("-", "-") if "error" not in row else (f"{row['of_reference']:.2f}", f"{row['error']:.1e}")
        table.add_row(
            row["engine"], row["about"], f"{row['p50_ms']:.1f}", f"{row['max_ms']:.1f}", apart[0],
            f"{row['cpu_s']:.3f}", f"{row['ready_s']:.1f}", _mib(row["peak_bytes"]), apart[1],
        )  # fmt: skip
    if any("reason" not in row for row in records):
        console.print(table)
    for row in records:
        if "reason" in row:
            console.print(f"{row['engine']}: {row['reason']}", markup=False)
    terminal.emit({"bundle": str(bundle), "runs": runs, "hardware": hardware(), "engines": records})
    return int(all("reason" in row for row in records))


def print_report(result: dict[str, Any]) -> None:
    policy, stages, memory = result["policy"], result["stages_ms"], result["memory_bytes"]
    console = terminal.console()
    console.print(
        f"{policy['name']} ({policy['architecture']}), engine {policy['engine']}, {policy['dtype']} on"
        f" {policy['device']},"
        f" {result['threads']} threads, {policy['views']} views, {policy['solver_steps']} solver steps,"
        f" {policy['prompt_tokens']} prompt tokens",
        f"engine: {short_reason(policy['engine_reason'])}; device: {policy['device_reason']};"
        f" dtype: {policy['dtype_reason']}{'; ' if policy['assigned'] else ''}{policy['assigned']}",
        f"{result['hardware']['cpu']}, {result['hardware']['cores']} cores,"
        f" {', '.join(f'{name} {version}' for name, version in result['software'].items())},"
        f" sinew {result['sinew']}",
        sep="\n",
    )
    title = f"milliseconds over {result['runs']} runs in the steady state{p99_of(result['runs'])}"
    table = terminal.table(title, "stage", *(f">{name}" for name in STATISTICS))
    for stage, statistics in stages.items():
        if stage == "steps":
            for step, row in enumerate(statistics, start=1):
                table.add_row(f"  step {step}", *_cells(row), style="dim")
        else:
            bold = "bold" if stage == "total" else None
            table.add_row(stage, *_cells(statistics), style=bold, end_section=stage == "postprocess")
    console.print(table)
    if "after_pause" in result:
        console.print(terminal.table(TITLE, *COLUMNS, rows=pause_rows(result["after_pause"])))
    print_roofline(result["roofline"], stages)
    lines = [
        (
            f"import {result['import_ms']:.0f} ms, load {result['load_ms']:.0f} ms,"
            f" warm-up {result['warm_up_ms']:.0f} ms"
        ),
        (
            f"chunk rate {result['chunks_per_second']:.3f} chunks/s;"
            f" action rate {result['actions_per_second']:.1f} actions/s ({policy['chunk_size']} per chunk)"
        ),
        (
            f"peak memory {_mib(memory['steady']['peak'])} (weights {_mib(memory['weights'])},"
            f" before load {_mib(memory['after_import']['peak'])})"
        ),
    ]
    if "fit" in result:
        fit = result["fit"]
        lines.append(
            f"inference(T) = {fit['prefix_ms']:.2f} ms + T * {fit['step_ms']:.3f} ms over T ="
            f" {', '.join(map(str, fit['steps']))}, with at most {fit['residual_ms']:.2f} ms of error;"
            f" {fit['prefix_share']:.0%} of the time is outside of the steps"
        )
    if "deadline" in result:
        deadline = result["deadline"]
        lines.append(
            f"deadline {deadline['ms']:g} ms missed in {deadline['misses']} of {result['runs']} runs"
        )
    console.print("\n".join(lines))


def print_roofline(record: dict[str, Any], stages: dict[str, Any]) -> None:
    """Print the comparison with the machine's peaks. ``stages`` has the report's statistics, for the medians."""
    console = terminal.console()
    if "reason" in record:
        console.print(f"roofline: {record['reason']}")
        return
    columns = (">p50", ">roofline", ">achieved", ">GFLOP/s", ">of sgemm", ">predicted", ">band")
    title = "against the roofline of this machine's measured peaks, milliseconds"
    table, peak = terminal.table(title, "stage", *columns), record["sgemm_gflops"]
    for stage, row in record["stages_ms"].items():
        p50 = stages[stage]["p50"]
        ideal = row.get("roofline")
        most = f"to {row['high']:.2f}" if row.get("high") is not None else "or more"
        table.add_row(
            stage,
            f"{p50:.2f}",
            "-" if ideal is None else f"{ideal:.2f}",
            "-" if ideal is None else f"{100 * ideal / p50:.0f} %",
            f"{1e3 * row['gflop'] / p50:.1f}",
            f"{100 * 1e3 * row['gflop'] / p50 / peak:.0f} %" if peak else "-",
            f"{row['predicted']:.2f}" if "predicted" in row else "-",
            f"{row['low']:.2f} {most}" if "low" in row else "-",
        )
    console.print(table)


def _cells(statistics: dict[str, float]) -> list[str]:
    return [f"{statistics[name]:.2f}" for name in STATISTICS]


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def parse_steps(text: str) -> tuple[int, ...]:
    """Parse numbers of solver steps, such as ``"1,2,5"``. A fit needs at least two different numbers."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and 1 <= int(part) <= 1000 for part in parts) or len(set(parts)) < 2:
        raise ObservationError(
            "--fit-steps", "two or more numbers from 1 to 1000, such as 1,2,5,10", repr(text)
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _image_size_of(text: str | None) -> tuple[int, int] | None:
    """Parse height and width, such as ``480x640``; None if the flag is absent.

    Raises:
        ObservationError: The text has another form.
    """
    if text is None:
        return None
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise ObservationError("--image-size", "HEIGHTxWIDTH, such as 480x640", repr(text))
    return int(height), int(width)
