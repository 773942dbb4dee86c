"""Memory that fits, against what torch allocates; factors that a fit finds, against a machine that is known."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sinew import load
from sinew.cli import main, terminal
from sinew.core import SinewError, Timing, machine
from sinew.engine.eager.engine import EagerEngine
from sinew.engine.example import Shapes
from sinew.models import build_on_meta
from sinew.models.base import Model
from sinew.processing import ModelInputs
from tests.cases import tiny_bundle
from tests.covering import some
from tests.engines import run_one
from torch.profiler import ProfilerActivity, profile

from sinew_perf.cli import machine as perf_machine
from sinew_perf.machine import fit as calibration
from sinew_perf.machine import measure
from sinew_perf.machine.calibrate import calibrate, random_weights
from sinew_perf.machine.fit import FACTORS, Calibration, Sample
from sinew_perf.machine.measure import MeasuredSizes, Speeds, StageTime
from sinew_perf.machine.measure_engine import measure_engine, seconds_by_stage
from sinew_perf.memory import fits, largest_fitting, memory_report, peaks
from sinew_perf.program import PublishedProgram, of_model
from sinew_perf.request import LIMITS, TracedRequest
from sinew_perf.trace import STAGES, trace

# ------------------------------------------------- memory


def middle_model() -> Model:
    """SmolVLA at its full width with few layers, on the CPU: what is alive at once does not grow with depth."""
    full = PublishedProgram.load("smolvla").model.config
    config = replace(
        full,
        vision=replace(full.vision, num_layers=1),
        language=replace(full.language, num_layers=2),
        expert=replace(full.expert, num_layers=2),
        vocab_size=512,
    )
    return random_weights(build_on_meta("smolvla", config))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", some([16, 600], 600), ids=["peak in vision", "peak in the prefix"])
def test_peak_of_activations_is_what_torch_allocates(tokens: int) -> None:
    """Tolerance 2 %: what kernels allocate inside themselves is not in the trace."""
    model, views, side = middle_model(), 2 if tokens < 100 else 1, 512 if tokens < 100 else 256
    state = np.zeros(model.state_size, np.float32)
    pixels = np.zeros((views, 3, side, side), np.float32)
    ids = np.zeros(tokens, np.int64)
    inputs = ModelInputs(pixels, np.ones(views, bool), ids, np.ones(tokens, bool), state)
    noise = np.zeros(model.noise_shape, np.float32)
    engine = EagerEngine(model, torch.device("cpu"))
    run_one(engine, inputs, noise, 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_one(engine, inputs, noise, 1)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    allocated = int(np.cumsum(changes).max())

    program = of_model(model, Shapes(views, side, side, tokens, 1))
    found = max(peak.nbytes for peak in memory_report(program).peaks)
    outside = (
        pixels.nbytes + ids.nbytes + state.nbytes + noise.nbytes
    )  # numpy's memory, not torch's allocator
    assert found == pytest.approx(allocated + outside, rel=0.02)
    assert peaks(trace(model, program.shapes)) == peaks(program.trace)  # for real and on meta


def test_weights_by_component() -> None:
    report = memory_report(PublishedProgram.load("smolvla"))
    rows = {(row.component, row.dtype): row.nbytes for row in report.weights}
    assert rows["language embeddings", "bf16"] == 2 * 49280 * 960
    assert rows["action_in_proj", "fp32"] == 4 * (32 * 720 + 720)
    # 450,046,176 parameters upstream, of which the language head is never read
    assert sum(row.parameters for row in report.weights) == 450_046_176 - 49280 * 960
    table = next(row for row in report.weights if row.component == "language embeddings")
    assert table.resident == 48 * 2 * 4096  # the pages of a prompt's rows
    assert report.resident == report.weights_nbytes - table.nbytes + table.resident
    beside = report.peak.nbytes + report.kept + report.workspace + report.runtime + report.actions
    assert report.total == report.resident + beside
    whole = memory_report(PublishedProgram.load("smolvla"), whole_tables=True)
    assert whole.total == report.weights_nbytes + beside
    with pytest.raises(SinewError, match="device: engine cuda needs cuda, got 'cpu'"):
        fits("smolvla", 2**33, engine="cuda")
    half = memory_report(PublishedProgram.load("smolvla", dtypes="int8"))
    assert report.weights_nbytes / 2 < half.weights_nbytes < 0.65 * report.weights_nbytes


@pytest.mark.slow
def test_memory_that_is_kept_goes_by_the_largest_block() -> None:
    """Measured with `benchmarks.low_bit`: the third inference peaks 42 to 96 MiB above the first."""
    program = PublishedProgram.load("smolvla", TracedRequest(cameras=2), engine="plan", dtypes="fp32")
    assert memory_report(program).kept == 2 * (4 * 2 * 1024 * 3072)  # of a vision layer's hidden activations
    assert memory_report(program, "cuda").kept == 0
    assert memory_report(PublishedProgram.load("pi0", dtypes="fp32")).kept == 64 << 20  # at most
    assert memory_report(PublishedProgram.load(tiny_bundle())).kept < 1 << 20


def test_a_small_cache_is_smaller() -> None:
    wide, narrow = (memory_report(PublishedProgram.load("pi0", dtypes=d)) for d in ("bf16", "bf16//int8"))
    assert wide.cache == 2 * narrow.cache
    assert wide.peak.nbytes - narrow.peak.nbytes == pytest.approx(narrow.cache, rel=0.1)


def test_pi0_on_an_eight_gigabyte_board() -> None:
    """8 GiB of which the system takes 2.5: not as published, but with four-bit weights."""
    board = {
        "memory": 8 << 30,
        "system": 5 << 29,
        "request": TracedRequest(cameras=2),
        "device": "cuda",
        "search": False,
    }
    wide, narrow = fits("pi0", **board), fits("pi0", **board, dtypes="int4//int8")
    assert not wide.fits
    assert wide.headroom < 0
    assert narrow.fits
    assert narrow.headroom == (8 << 30) - (5 << 29) - narrow.report.total
    assert wide.largest == narrow.largest == {}


@pytest.mark.slow
def test_the_largest_request_is_the_last_that_fits() -> None:
    board = {"memory": 320_000_000, "system": 10_000_000}
    found = fits(tiny_bundle(), **board)
    assert found.fits
    for axis, argument in (("chunk", "chunk"), ("cameras", "cameras"), ("context", "prompt_tokens")):
        most = found.largest[axis]
        assert most > 1
        assert fits(tiny_bundle(), **board, request=TracedRequest(**{argument: most}), search=False).fits
        if most < LIMITS[argument]:
            assert not fits(
                tiny_bundle(), **board, request=TracedRequest(**{argument: most + 1}), search=False
            ).fits
    assert found.largest["chunk"] < LIMITS["chunk"]
    assert fits(tiny_bundle(), 200_000_000).largest == {"chunk": 0, "cameras": 0, "context": 0}


def test_the_search_ends_at_the_longest_chunk_of_any_model() -> None:
    found = fits(tiny_bundle(), 64 << 30)
    assert found.fits
    assert found.largest["chunk"] == LIMITS["chunk"]


def test_the_largest_that_fits() -> None:
    calls: list[int] = []

    def excess(n: int) -> int:
        calls.append(n)
        return max(1000 * n, n * n) - 3_000_017

    assert largest_fitting(excess, 1 << 20, start=50) == 1732
    assert len(calls) < 15
    assert largest_fitting(lambda n: n - 5, 4) == 4
    assert largest_fitting(lambda n: n, 100) == 0
    assert largest_fitting(lambda n: -1 if n < 777 else 1, 1 << 20) == 776


def test_bad_boards_are_named() -> None:
    with pytest.raises(SinewError, match="system memory: expected 0 to 10 bytes, got 10"):
        fits("pi0", 10, 10)
    with pytest.raises(SinewError, match="device: expected one of cpu, cuda, got 'tpu'"):
        fits("smolvla", 10, 0, device="tpu")


# ------------------------------------------------- calibration

SPEEDS = Speeds("test", "cpu", 1, {"fp32": 100e9}, 20e9, 3e-6, 0.0)
TRUTH = {"linear": 0.85, "attention": 0.4, "memory": 1.5, "packing": 2.5, "overhead": 1.8}


@lru_cache
def measured_samples(noise: float = 0.0) -> list[Sample]:
    """Stages of SmolVLA at several requests, with the times of a machine of the factors ``TRUTH``."""
    program = PublishedProgram.load("smolvla", dtypes="fp32")
    rng = np.random.default_rng(0)
    samples = []
    for request in (
        MeasuredSizes(1, 8, 12),
        MeasuredSizes(2, 16, 50),
        MeasuredSizes(1, 48, 200),
        MeasuredSizes(3, 48, 400),
    ):
        for component in program.at(request.request).components("unfused"):
            work = calibration.work(component)
            seconds = calibration.seconds_of(work, SPEEDS, TRUTH) * (1 + noise * rng.uniform(-1, 1))
            samples.append(Sample(StageTime("smolvla", component.name, request, seconds, 0.0, 1, 0.0), work))
    return samples


@pytest.mark.slow
def test_a_fit_finds_the_machines_factors() -> None:
    fitted = calibration.fit(measured_samples(), SPEEDS)
    assert fitted.factors == pytest.approx(TRUTH, rel=0.15)  # the prior pulls where two factors can share
    assert max(map(abs, fitted.errors)) < 0.01
    assert fitted.band < 0.1


@pytest.mark.slow
def test_a_fit_predicts_what_it_has_not_seen() -> None:
    """Times that scatter by 5 %: another request of the policy lies in the band, another policy within 15 %."""
    fitted = calibration.fit(measured_samples(noise=0.05), SPEEDS)
    assert 0.01 < fitted.band < 0.2
    for source, bound in (("smolvla", fitted.band), ("pi0", 0.15)):
        for component in PublishedProgram.load(source, TracedRequest(2, 30, 75), dtypes="fp32").components(
            "unfused"
        ):
            truth = component.repeats * calibration.seconds_of(calibration.work(component), SPEEDS, TRUTH)
            predicted = fitted.predict(component)
            assert predicted.seconds == pytest.approx(truth, rel=bound)
            assert predicted.seconds / predicted.low - 1 == pytest.approx(fitted.band)
            assert predicted.seconds / predicted.high - 1 == pytest.approx(-fitted.band)
            assert calibration.roofline_seconds(component, SPEEDS) < truth


@pytest.mark.slow
@pytest.mark.parametrize("band", [0.0, 0.13, 0.99, 1.0, 1.96])
def test_a_band_holds_every_time_that_it_was_made_from(band: float) -> None:
    """Errors are predicted / measured - 1; a band of 196 % says that a time is a third of the prediction or more."""
    component = PublishedProgram.load("smolvla", TracedRequest(1, 8, 5), dtypes="fp32").components("unfused")[
        0
    ]
    found = replace(calibration.fit(measured_samples(), SPEEDS), band=band).predict(component)
    assert 0 < found.low <= found.seconds
    assert (found.high is None) == (band >= 1)
    for error in (-min(band, 0.999999), band):  # at the ends
        measured = found.seconds / (1 + error)
        assert found.low <= measured * (1 + 1e-9)
        assert found.high is None or measured <= found.high * (1 + 1e-9)


@pytest.mark.slow
def test_a_band_that_bounds_nothing_is_said(
    quick: Path, capsys: pytest.CaptureFixture, calibrated: Any, tmp_path: Path
) -> None:
    calibration.save(replace(calibrated[0], band=1.96))
    out = tmp_path / "out.json"
    terminal.take_json(["--json", str(out)])
    assert perf_machine.predict("smolvla", threads=1, request=TracedRequest(steps=4)) == 0
    report = capsys.readouterr().out.splitlines()
    assert "gives no upper bound; calibrate again" in " ".join("\n".join(report).split())
    assert all(
        row["high"] is None and row["low"] > 0 for row in json.loads(out.read_text())["stages_ms"].values()
    )


@pytest.mark.slow
def test_a_bundle_is_calibrated_with_the_threads_that_bench_runs(
    quick: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not with those of the cores, where its engine settles on fewer."""
    monkeypatch.setattr("sinew.core.machine.recommended_threads", lambda: (2, "as a test says"))
    monkeypatch.setattr("sinew.engine.eager.engine.tune_threads", settles_on_one)
    threads = torch.get_num_threads()
    try:
        terminal.take_json(["--json"])
        assert perf_machine.calibrate(str(tiny_bundle()), runs=1, engine="plan") == 0
        made = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert made["speeds"]["threads"] == 1
        assert main(["bench", str(tiny_bundle()), "--runs", "2", "--engine", "plan", "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    assert "band" in json.loads(capsys.readouterr().out.splitlines()[-1])["roofline"]


def settles_on_one(infer: object, set_threads: Callable[[int], None], many: int) -> tuple[int, str]:
    set_threads(1)
    return 1, "as a test says"


def test_few_samples_make_no_calibration() -> None:
    with pytest.raises(SinewError, match="samples: expected more than 5, the number of factors, got 5"):
        calibration.fit(measured_samples()[:5], SPEEDS)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Small products and copies, and an empty folder for what is found."""
    monkeypatch.setattr(measure, "GEMM_SIZE", 512)
    monkeypatch.setattr(measure, "COPY_BYTES", 32 << 20)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "sinew" / "calibration"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Calibration, Path]:
    """A calibration of the golden bundle, and its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "GEMM_SIZE", 512)
        patch.setattr(measure, "COPY_BYTES", 32 << 20)
        folder = tmp_path_factory.mktemp("calibrated")
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        found, path = calibrate(tiny_bundle(), threads=1, runs=1)
    assert path.parent == folder / "sinew" / "calibration"
    return found, path


def stored(calibrated: tuple[Calibration, Path], quick: Path) -> tuple[Calibration, Path]:
    """The same, in the folder of this test."""
    quick.mkdir(parents=True)
    return calibrated[0], Path(shutil.copy(calibrated[1], quick))


def test_calibrating_a_bundle_stores_what_it_found(calibrated: tuple[Calibration, Path], quick: Path) -> None:
    found, path = stored(calibrated, quick)
    assert calibration.load(found.speeds.processor, 1) == found
    assert calibration.load(found.speeds.processor, 2) is None
    assert set(found.factors) == set(FACTORS)
    assert {sample.time.stage for sample in found.samples} == set(STAGES)
    assert 1e9 < found.speeds.peak_flops["fp32"] < 1e14
    assert 1e8 < found.speeds.bandwidth < 1e13
    assert 1e-8 < found.speeds.overhead < 1e-3
    path.write_text('{"schema": "sinew.calibration/0"}')
    with pytest.raises(SinewError, match="expected a calibration of schema"):
        calibration.load(found.speeds.processor, 1)
    path.write_text('{"schema": "sinew.calibration/2", "band": 1}')
    with pytest.raises(SinewError, match="speeds"):
        calibration.load(found.speeds.processor, 1)
    path.write_text("{")
    with pytest.raises(SinewError, match="not JSON"):
        calibration.load(found.speeds.processor, 1)


def test_bench_prints_what_a_calibration_makes_of_it(
    calibrated: tuple[Calibration, Path],
    quick: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    threads = torch.get_num_threads()

    def bench() -> tuple[dict, str]:
        asked = [
            "bench",
            str(tiny_bundle()),
            "--runs",
            "2",
            "--threads",
            "1",
            "--json",
            str(quick.parents[1] / "out.json"),
        ]
        assert main(asked) == 0
        return json.loads((quick.parents[1] / "out.json").read_text()), capsys.readouterr().out

    try:
        before, report = bench()
        command = f"sinew perf calibrate {tiny_bundle()} --threads 1"
        assert before["roofline"] == {"reason": f"not calibrated for 1 threads; run `{command}`"}
        assert "roofline: not calibrated" in report
        stored(calibrated, quick)
        after, report = bench()
    finally:
        torch.set_num_threads(threads)
    assert list(after["roofline"]["stages_ms"]) == ["vision", "prefix", "head"]
    for row in after["roofline"]["stages_ms"].values():
        assert 0 < row["roofline"] < row["predicted"]
        assert row["high"] is None or row["predicted"] <= row["high"]
        assert 0 < row["low"] < row["predicted"]
    assert "achieved" in report


def test_the_config_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert calibration.path_of("AMD EPYC 9B14", 2) == (
        tmp_path / "sinew" / "calibration" / "amd-epyc-9b14-2-threads.json"
    )


@pytest.mark.parametrize("engine", ["plan", pytest.param("onnx", marks=pytest.mark.slow)])
def test_other_engines_have_calibrations_of_their_own(
    engine: str, quick: Path, capsys: pytest.CaptureFixture
) -> None:
    bundle = str(shutil.copy(tiny_bundle(), quick.parents[1] / "tiny.gguf"))  # graphs are exported beside it
    threads_and_engine = ["--threads", "1", "--engine", engine, "--json"]
    assert main(["perf", "calibrate", bundle, "--runs", "2", *threads_and_engine]) == 0
    record = json.loads(capsys.readouterr().out)
    assert Path(record["path"]).name.endswith(f"-1-threads-{engine}.json")
    found = calibration.load(machine.cpu_model(), 1, engine=engine)
    assert found is not None
    assert calibration.load(machine.cpu_model(), 1) is None
    cameras = len(load(bundle).spec.cameras)
    views = {
        stage: {s.time.request.views for s in found.samples if s.time.stage == stage} for stage in STAGES
    }
    assert views == {"vision": set(range(1, cameras + 1)), "prefix": {cameras}, "head": {cameras}}
    assert all(sample.time.seconds > 0 for sample in found.samples)
    assert main(["perf", "predict", bundle, *threads_and_engine]) == 0
    stages = json.loads(capsys.readouterr().out)["stages_ms"]
    # a band of 100 %, as of measurements beside busy programs, bounds nothing from above
    assert all(0 < row["low"] <= row["predicted"] for row in stages.values())
    assert all((row["high"] is None) == (found.band >= 1) for row in stages.values())
    assert all(row["high"] is None or row["predicted"] <= row["high"] for row in stages.values())
    threads = torch.get_num_threads()
    try:
        assert main(["bench", bundle, "--runs", "2", "--threads", "1", "--engine", engine, "--json"]) == 0
    finally:
        torch.set_num_threads(threads)
    roofline = json.loads(capsys.readouterr().out)["roofline"]
    assert roofline["band"] == pytest.approx(found.band)
    assert all(row["predicted"] > 0 for row in roofline["stages_ms"].values())


def test_what_an_engine_cannot_be_asked_is_named(quick: Path) -> None:
    with pytest.raises(SinewError, match="source: expected a bundle for engine onnx, got the preset smolvla"):
        calibrate("smolvla", engine="onnx", threads=1)
    policy = load(tiny_bundle(), threads=1)
    chunk, cameras = policy.spec.chunk_size, len(policy.spec.cameras)
    with pytest.raises(SinewError, match=f"chunk: expected {chunk}, got 7"):
        measure_engine(policy, [MeasuredSizes(1, 4, 7)])
    with pytest.raises(SinewError, match=f"views: expected 1 to {cameras}, got 9"):
        measure_engine(policy, [MeasuredSizes(9, 4, chunk)])
    with pytest.raises(SinewError, match="cannot time each stage"):
        seconds_by_stage([Timing(total_ms=3.0)])


# ------------------------------------------------- the command line


@pytest.mark.slow
def test_fit_prints_a_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    board = ["--memory-gib", "0.3", "--system-gib", "0.01", "--device", "cpu"]
    out = tmp_path / "out.json"
    assert main(["perf", "fit", str(tiny_bundle()), *board, "--no-search", "--json", str(out)]) == 0
    report = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["fits"]
    assert document["total"] == document["memory"] - document["system"] - document["headroom"]
    for word in ("weights, vision", "keys and values of the prefix", "fits with"):
        assert word in report
    assert " on Jetson Orin Nano 8 GB:" in " ".join(report.split())  # nobody named the machine
    assert perf_machine.fit("pi0", memory_gib=4, search=False) == 1
    assert "does not fit" in capsys.readouterr().out
    own = tmp_path / "boards.toml"
    own.write_text("[mine]\npeak = { fp32 = 1e12 }\nbandwidth = 1e11\nmemory_gib = 4\n")
    assert (
        main(["perf", "fit", str(tiny_bundle()), "--data", str(own), "--hardware", "mine", "--no-search"])
        == 0
    )


def test_calibrate_then_predict(
    calibrated: tuple[Calibration, Path], quick: Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SinewError, match="not calibrated for 1 threads"):
        perf_machine.predict("smolvla", threads=1)
    before, path = stored(calibrated, quick)
    kept = path.stat().st_mtime_ns
    told = ["--json", str(quick.parents[1] / "out.json")]
    assert main(["perf", "calibrate", str(tiny_bundle()), "--threads", "1", "--runs", "1", *told]) == 0
    report = capsys.readouterr().out
    assert json.loads((quick.parents[1] / "out.json").read_text())["path"] == str(path)
    assert path.stat().st_mtime_ns > kept
    after = calibration.load(before.speeds.processor, 1)
    assert after is not None
    assert len(after.samples) == len(before.samples)  # a policy's new samples replace its old ones
    for word in ("GFLOP/s", "GB/s", "us per operator", "band of predictions"):
        assert word in report
    # Without --threads those of what was calibrated are meant, however many cores there are.
    assert calibration.threads_of(None) == 1
    assert calibration.threads_of(None, "plan") == machine.recommended_threads()[0]
    assert main(["perf", "predict", "smolvla", "--steps", "4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["threads"] == 1
    for stage in STAGES:
        row = document["stages_ms"][stage]
        assert 0 < row["low"] <= row["predicted"]
        assert row["high"] is None or row["predicted"] <= row["high"]
        assert 0 < row["roofline"] < row["predicted"]
