"""``sinew perf fleet``: predict how many robots one machine serves, from the calibrated model and from measured
batches.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, validators
from sinew.cli import terminal
from sinew.cli.options import CountIfAny, Flag, NotNegative, Positive
from sinew.core import SinewError, machine


def fleet(
    source: str,
    /,
    *,
    hz: Positive = 10.0,
    deadline_ms: Positive = 100.0,
    max_batch: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=64))] = 8,
    overhead_ms: NotNegative = 2.0,
    share: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=1))] = 0.99,
    threads: CountIfAny = None,
    engine: Literal["eager", "plan"] = "plan",
    measure: Flag = False,
) -> int:
    """Predict how many robots one machine answers in time, one request after another and in batches.

    The prediction uses the calibrated model (`sinew perf calibrate`), and with --measure also batches that are
    timed here. It has two cases. Staggered robots send their requests at different times of a period. Robots in
    step send them at the same time, for example after one trigger. Then fewer robots are answered in time.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset. A preset needs no --measure.
        hz: Requests per second of each robot.
        deadline_ms: Maximum time from a robot's frame to its answer, in milliseconds.
        max_batch: Maximum batch, as for `sinew serve`.
        overhead_ms: Time of a request outside of the policy, in milliseconds: protocol, decoding, preparing,
            network.
        share: Fraction of requests that must meet the deadline.
        threads: Compute threads of the calibration to use. Default: those of the engine's newest calibration.
        engine: Engine of the calibration to use.
        measure: Load the policy and time its batches.
    """
    from sinew_perf import fleet as model
    from sinew_perf.machine import fit as calibration
    from sinew_perf.machine.batches import predicted, sizes
    from sinew_perf.machine.calibrate import disturbed

    count = calibration.threads_of(threads, engine)
    notes: list[str] = []
    tables: dict[str, dict[int, float]] = {}
    band = None
    try:
        tables["predicted"], band = predicted(source, count, engine, max_batch)
        if note := disturbed(calibration.calibrated(source, count, engine)):
            notes.append(f"predicted: {note} (`sinew perf calibrate`)")
    except SinewError as error:
        if not measure:
            raise
        terminal.say(str(error))
    if measure:
        if note := machine.busy():
            notes.append(f"measured: {note}; measure again when idle")
        tables["measured"] = model.measured(source, threads, engine, sizes(max_batch))
    rows: list[dict[str, Any]] = []
    for origin, times in tables.items():
        for batch, in_step in itertools.product((1, max_batch), (False, True)):
            fleet_size = model.most_robots(
                model.between(times),
                hertz=hz,
                deadline_s=deadline_ms / 1e3,
                max_batch=batch,
                overhead_s=overhead_ms / 1e3,
                share=share,
                in_step=in_step,
            )
            rows.append(
                {
                    "times": origin,
                    "max_batch": batch,
                    "requests": "in step" if in_step else "staggered",
                    "robots": 0 if fleet_size is None else fleet_size.robots,
                    "p99_ms": None if fleet_size is None else 1e3 * fleet_size.p99_s,
                    "mean_batch": None if fleet_size is None else fleet_size.mean_batch,
                }
            )
        alone = times[min(times)]
        if any(row["times"] == origin and not row["robots"] for row in rows):
            short = model.shortfall(
                alone, hertz=hz, deadline_s=deadline_ms / 1e3, overhead_s=overhead_ms / 1e3
            )
            notes.append(
                f"{origin}: 0 robots, because {short.text}; `--hz {short.hertz:g} --deadline-ms"
                f" {1e3 * short.deadline_s:g}` works for one robot"
            )
    console = terminal.console()
    timed = sorted(set().union(*tables.values()))
    columns = ("times", *(f">{size}" for size in timed))
    costs = terminal.table(
        f"{Path(source).name}, {engine}, {count} threads: milliseconds of a batch", *columns
    )
    for origin, times in tables.items():
        costs.add_row(origin, *(f"{1e3 * times[n]:.1f}" if n in times else "" for n in timed))
    console.print(costs)
    title = f"robots at {hz:g} Hz with {share:.0%} of their requests answered within {deadline_ms:g} ms"
    table = terminal.table(title, "times", ">max batch", "requests", ">robots", ">p99, ms", ">mean batch")
    for row in rows:
        p99 = "" if row["p99_ms"] is None else f"{row['p99_ms']:.0f}"
        mean = "" if row["mean_batch"] is None else f"{row['mean_batch']:.1f}"
        table.add_row(row["times"], str(row["max_batch"]), row["requests"], str(row["robots"]), p99, mean)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    record = {
        "schema": "sinew.perf.fleet/1",
        "source": source,
        "engine": engine,
        "threads": count,
        "hz": hz,
        "deadline_ms": deadline_ms,
        "overhead_ms": overhead_ms,
        "share": share,
        "band": band,
        "batch_ms": {
            origin: {str(n): 1e3 * seconds for n, seconds in times.items()}
            for origin, times in tables.items()
        },
        "rows": rows,
        "notes": notes,
    }
    terminal.emit(record)
    return 0
