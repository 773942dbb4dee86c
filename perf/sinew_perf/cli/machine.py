"""``sinew perf fit``, ``calibrate``, ``predict`` and ``sync``: memory of a policy on a board, and measurements of
this machine.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators
from rich.console import Console
from sinew.cli import terminal
from sinew.cli.options import Count, CountIfAny, Flag, PositiveIfAny
from sinew.core import SinewError

from sinew_perf.cli.options import Asked
from sinew_perf.request import AS_THE_POLICY

if TYPE_CHECKING:
    from sinew_perf.machine.fit import Calibration
    from sinew_perf.memory import Fit


def fit(
    source: str,
    /,
    *,
    hardware: str = "",
    memory_gib: PositiveIfAny = None,
    system_gib: Annotated[float | None, Parameter(validator=validators.Number(gte=0))] = None,
    request: Asked = AS_THE_POLICY,
    dtype: str | None = None,
    engine: Literal["eager", "plan", "cpu", "cuda"] = "plan",
    device: Literal["cpu", "cuda"] | None = None,
    stream: Flag = False,
    alone: Flag = False,
    embodiments: Count = 1,
    search: bool = True,
    data: Path | None = None,
) -> int:
    """Check whether a policy fits the memory of a board, and with which limits. The exit status is 1 if it does not
    fit.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset at its published size.
        hardware: Name of a machine from `sinew perf machines`, which has the memory. Default: orin-nano.
        memory_gib: Memory of the board in GiB, instead of the machine's.
        system_gib: Memory of the operating system and other programs in GiB, instead of the machine's value.
        dtype: WEIGHTS[/ACTIVATIONS[/CACHE]], for example int4 or bf16//int8. Default: as stored.
        engine: Engine whose memory is counted: plan (with its rewrites), eager, cpu (low-bit weights as
            stored, token table in the file), or cuda (the plan, with the whole table on the device, and low-bit
            weights by the engine's rule).
        device: Device whose runtime and libraries are added: cuda or cpu. Default: cuda, and cpu for engine
            cpu.
        stream: Also count a stream (`sinew run --stream`): in engine cuda, prefix and head have memory of
            their own, in addition to the program for whole chunks.
        alone: Assume that nothing else runs on the machine: no desktop, and the simulator elsewhere. The
            system then needs less.
        embodiments: Number of robots whose projections the head of a GR00T holds. Upstream's files have 32, a
            bundle has one.
        search: Also search the largest chunk, number of cameras and context that fit. This takes 15 seconds.
        data: File with further machines.
    """
    from sinew_perf.hardware import load_hardware
    from sinew_perf.memory import DEVICES, fits

    board = load_hardware(hardware or "orin-nano", data)
    memory_gib = board.memory_gib if memory_gib is None else memory_gib
    usual = board.alone_gib if alone else board.system_gib
    if system_gib is None and usual is None:
        raise SinewError(
            f"--alone: the memory of {board.name} without other programs is unknown; pass --system-gib"
        )
    taken = (usual or 0.0) if system_gib is None else system_gib
    result = fits(
        source,
        round(memory_gib * 2**30),
        round(taken * 2**30),
        request,
        dtypes=dtype,
        engine=engine,
        device=device or DEVICES.get(engine, "cuda"),
        embodiments=embodiments,
        search=search,
        balance=board.balance,
        stream=stream,
    )
    console = terminal.console()
    print_fit(result, board.title, console)
    fits_alone = None
    if board.alone_gib is not None:
        left = result.headroom + round((taken - board.alone_gib) * 2**30)
        fits_alone = left >= 0
        if fits_alone and not result.fits:
            text = f"fits with {_mib(left)} MiB to spare if no other program runs on the machine (--alone)"
            console.print(text)
    record = asdict(result) | {"fits": result.fits, "headroom": result.headroom, "total": result.report.total}
    record["fits_alone"] = fits_alone
    terminal.emit(record)
    return 0 if result.fits else 1


def print_fit(result: Fit, board: str, console: Console) -> None:
    report = result.report
    shapes = report.shapes
    title = (
        f"{report.name} on {board}: {shapes.views} views, {shapes.tokens} prompt tokens, chunk {report.chunk}"
    )
    table = terminal.table(title, "memory", "format", ">MiB")
    for row in report.weights:
        part = "" if row.resident == row.nbytes else f", rows read of {_mib(row.nbytes)} MiB"
        table.add_row(f"weights, {row.component}{part}", row.dtype, _mib(row.resident))
    table.add_section()
    peak = report.peak
    table.add_row("keys and values of the prefix", "", _mib(peak.cache))
    table.add_row(f"other activations (peak, in {peak.stage})", "", _mib(report.activations))
    if report.kept:
        table.add_row("freed blocks that the C library keeps", "", _mib(report.kept))
    table.add_row("workspace of libraries and kernels", "", _mib(report.workspace))
    table.add_row("chunks that wait to be executed", "", _mib(report.actions))
    table.add_row("runtime", "", _mib(report.runtime), end_section=report.stream is None)
    if report.stream is not None:
        table.add_section()
        table.add_row("stream: inputs and actions", "", _mib(report.stream.inputs))
        table.add_row("stream: contexts", "", _mib(report.stream.contexts))
        table.add_row("stream: intermediate results", "", _mib(report.stream.intermediate))
        table.add_row("stream: second workspace", "", _mib(report.stream.workspace), end_section=True)
    table.add_row("total", "", _mib(report.total), style="bold")
    table.add_row("at the end of loading", "", _mib(report.loading))
    if report.mapped:
        table.add_row(
            "of the total, pages of the file, which the system can reclaim", "", _mib(report.of_the_file)
        )
    table.add_row("available", "", _mib(result.available))
    console.print(table)
    verdict = f"fits with {_mib(result.headroom)} MiB to spare"
    if not result.fits:
        verdict = f"does not fit: {_mib(-result.headroom)} MiB too much"
    largest = ", ".join(f"{axis} {value}" for axis, value in result.largest.items() if value)
    if not largest and result.largest:
        largest = f"none, even with one of {', '.join(result.largest)}"
    console.print(verdict + (f"; largest values, one at a time: {largest}" if largest else ""))


def calibrate(
    source: str,
    /,
    *,
    threads: CountIfAny = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    engine: Literal["eager", "plan", "onnx"] = "eager",
    runs: Count = 3,
    directory: Path | None = None,
) -> int:
    """Measure this machine and the stages of a policy, for later predictions and for `sinew bench`.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset with random weights.
        threads: Compute threads. Default: those that `sinew bench` uses for a bundle, or one per core for a
            preset.
        dtype: Compute type.
        engine: Engine whose stages are measured. Engines other than eager need a bundle.
        runs: Number of runs of each stage. The median counts.
        directory: Folder to store the calibration in. Default: $XDG_CONFIG_HOME/sinew/calibration.
    """
    from sinew_perf.machine.calibrate import calibrate as measure

    found, path = measure(
        source,
        directory=directory,
        threads=threads,
        dtype=dtype,
        engine=engine,
        runs=runs,
        report=terminal.say,
    )
    print_calibration(found, terminal.console())
    terminal.emit(asdict(found) | {"path": str(path)})
    return 0


def predict(
    source: str,
    /,
    *,
    threads: CountIfAny = None,
    request: Asked = AS_THE_POLICY,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    engine: Literal["eager", "plan", "onnx"] = "eager",
    directory: Path | None = None,
) -> int:
    """Predict the time of an engine on this machine, with an error band. Run `sinew perf calibrate` first.

    Args:
        source: Policy, as for `sinew infer`, or a family's preset at its published size.
        threads: Compute threads of the calibration to use. Default: those of the engine's newest calibration.
        dtype: Compute type of the calibration to use.
        engine: Engine of the calibration to use.
        directory: Folder of the stored calibration. Default: $XDG_CONFIG_HOME/sinew/calibration.
    """
    from sinew_perf.machine import fit as calibration
    from sinew_perf.program import PublishedProgram

    count = calibration.threads_of(threads, engine, directory)
    fitted = calibration.calibrated(source, count, engine, directory)
    program = PublishedProgram.load(source, request, dtypes=dtype, engine=calibration.program_of(engine))
    title = f"{program.name}, {dtype}, {engine}, {count} threads, band {fitted.band:.0%}: milliseconds"
    table = terminal.table(title, "stage", ">predicted", ">low", ">high", ">roofline")
    stages = {}
    for ideal, real in zip(program.components("fused"), program.components("unfused"), strict=True):
        prediction = fitted.predict(real)
        row = {"predicted": prediction.seconds, "low": prediction.low, "high": prediction.high}
        row["roofline"] = calibration.roofline_seconds(ideal, fitted.speeds)
        stages[real.name] = {name: None if s is None else 1e3 * s for name, s in row.items()}
        table.add_row(real.name, *("-" if ms is None else f"{ms:.1f}" for ms in stages[real.name].values()))
    terminal.console().print(table)
    if fitted.band >= 1:
        terminal.console().print(f"[yellow]{too_wide(fitted)}[/]")
    record = {"source": source, "engine": engine, "threads": count, "band": fitted.band, "stages_ms": stages}
    terminal.emit(record)
    return 0


def sync(
    *,
    products: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1 << 16))] = 1378,
    device: Literal["cpu", "cuda"] = "cpu",
    threads: CountIfAny = None,
) -> int:
    """Measure the gap between two kernels on this machine, for `sinew perf run --sync-us`.

    Args:
        products: Number of products in a chain. `sinew perf run` prints the number of a policy. 1378 is the
            count in Running VLAs at Real-time Speed (arXiv 2510.26742).
        device: Device to measure.
        threads: Compute threads of a CPU.
    """
    from sinew_perf.machine.sync import BASELINE, SHAPE, measure

    settings = measure(products, device, threads)
    title = f"{products} sums of {SHAPE[0]} x {SHAPE[1]} numbers on this machine's {device}"
    table = terminal.table(title, "setting", ">ms", ">us each beyond one call")
    for setting in settings:
        table.add_row(setting.name, f"{setting.ms:.2f}", f"{setting.us_each:.3f}")
    terminal.console().print(table)
    chosen = min((each for each in settings if each.name != BASELINE), key=lambda each: each.us_each)
    terminal.console().print(f"sinew perf run SOURCE --sync-us {chosen.us_each:.3f}  # {chosen.name}")
    record = {"products": products, "device": device, "settings": [asdict(each) for each in settings]}
    terminal.emit({"schema": "sinew.perf.sync/1", **record})
    return 0


def print_calibration(fitted: Calibration, console: Console) -> None:
    from sinew_perf.machine.calibrate import disturbed, errors_by_stage

    speeds = fitted.speeds
    peaks = ", ".join(f"{dtype} {value / 1e9:.1f} GFLOP/s" for dtype, value in speeds.peak_flops.items())
    errors = ", ".join(f"{stage} {error:.0%}" for stage, error in errors_by_stage(fitted).items())
    factors = ", ".join(f"{name} {value:.2f}" for name, value in fitted.factors.items())
    for line in (
        f"{speeds.processor}, {speeds.threads} threads, load average {speeds.load}",
        f"{peaks}; {speeds.bandwidth / 1e9:.1f} GB/s; {speeds.overhead * 1e6:.2f} us per operator",
        f"factors of these: {factors}",
        f"largest error of {len(fitted.samples)} samples: {errors}; band of predictions {fitted.band:.0%}",
    ):
        console.print(line)
    if fitted.band >= 1:
        console.print(f"[yellow]{too_wide(fitted)}[/]")
    if busy := disturbed(fitted):
        console.print(f"[yellow]{busy}[/]")


def too_wide(fitted: Calibration) -> str:
    """Return the message for a calibration whose error band is so wide that it gives no upper bound of a time."""
    return (
        f"an error band of {fitted.band:.0%} gives no upper bound; calibrate again when the machine is idle"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"
