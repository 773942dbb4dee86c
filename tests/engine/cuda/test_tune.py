"""Tuning in Triton's interpreter: the times mean nothing; what is timed, compared, kept and put back does.
The command and the variants of a graph: test_tune_verb.py."""

# ruff: noqa: F811 - fixtures are imported, and are parameters of the same name

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass

import numpy as np
import pytest
import torch

from benchmarks.gpu.ladder import calibrated
from benchmarks.gpu.models import Case, processing, random_model, samples
from benchmarks.gpu.rungs import Engine, cuda_engine, plan_of
from benchmarks.gpu.session import Session as GpuSession
from sinew.engine.cuda.device import describe
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.kernels import choices, tuning
from sinew.engine.cuda.kernels.tiles import candidates
from sinew.engine.cuda.tune import timing, trials, tuner
from sinew.engine.cuda.tune.ahead import CollectedTrials, compile_all
from sinew.engine.cuda.tune.trials import Trials, TuningProblem
from tests.engine.cuda.kernel_checks import needs_triton
from tests.engine.cuda.tune_cases import CPU, cache, even, gpu, one_tile, tiny, two_tiles  # noqa: F401

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.kernels]
PROBLEM = TuningProblem("norm_linear", (50, 64, 32), torch.bfloat16)


# ----------------------------------------------------------------------------- the engine's problems


def test_graphs_that_are_compared_are_about_as_long() -> None:
    assert [len(timing.repeated([print] * count)) for count in (1, 3, 19, 20, 64)] == [20, 21, 38, 20, 64]


def test_wall_clock_is_a_median_of_calls() -> None:
    calls: list[int] = []
    assert timing.wall_ms(lambda: calls.append(1), seconds=0.0) >= 0
    assert len(calls) == 2 * timing.WARM_UPS  # whatever the time, so that there is a number
    calls.clear()
    timing.wall_ms(lambda: calls.append(1), seconds=60.0, most=7)
    assert len(calls) == timing.WARM_UPS + 7


@needs_triton
@pytest.mark.parametrize("name", [pytest.param("pi0.5", marks=pytest.mark.slow), "smolvla"])
def test_tuning_times_what_the_engine_asks_for(name: str, two_tiles) -> None:
    engine, sample = tiny(name)
    rows, tried = [], []
    before, programs, wanted = engine.ops, engine.programs, Engine(engine).run(sample, 1)[0]
    session = Trials(CPU, even, lambda: 16 - len(rows), rows.append, tried.append)
    tuner.tune(engine, lambda: Engine(engine).run(sample, 1), session)
    assert session.summary()["tuned"] == len(rows) >= 15
    assert session.summary()["failed"] == 0
    assert session.summary()["left out for lack of time"] > 0
    order = [row["kernel"] for row in rows]
    chunk = next(row for row in rows if row["kernel"] == "qkv_rope")["dims"][0]
    assert chunk == 6  # the head, before anything that runs once per observation
    assert order.index("preprocess") > order.index("qkv_rope")
    assert "act" not in vars(engine.model)
    kernels = set(order)
    assert kernels >= {"preprocess", "row_norm", "activate", "qkv_rope", "packed_attention", "splitk_linear"}
    for row in rows:
        texts = [
            text for text in tried if text.startswith(f"{row['kernel']} {'x'.join(map(str, row['dims']))},")
        ]
        assert len(texts) >= row["tiles"] >= 1
    assert engine.ops is before
    assert engine.programs is programs
    for module in engine.model.modules():
        assert not isinstance(getattr(module, "ops", None), tuner.TunedOps)
        assert not isinstance(getattr(module, "rows", None), tuner.TunedRows)
    tiles = json.loads(tuning.cache_file(CPU).read_text())
    kept = json.loads(choices.cache_file(CPU).read_text())
    assert len(tiles) == len(rows)
    assert {entry["way"] for entry in kept.values()} == {"triton"}  # equal times: the first
    for problem, entry in kept.items():  # attention has no third way
        library = set() if problem.startswith("packed_attention") else {"library"}
        assert entry["ms"].keys() == {"triton", "torch"} | library, (problem, entry["failed"])
    assert np.array_equal(Engine(engine).run(sample, 1)[0], wanted)


@needs_triton
def test_a_tile_that_computes_something_else_is_never_chosen(
    two_tiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = tuner.Forced.launch, {}

    def launch(self, kernel, dims, like, prepare, other, out):
        result = right(self, kernel, dims, like, prepare, other, out)
        default = candidates(kernel, dims, like.dtype, tuning.NO_GPU)[0]
        wrong[kernel, dims] = default
        if self.tile == default:
            for part in result if isinstance(result, tuple) else (result,):
                part.mul_(2)
        return result

    monkeypatch.setattr(tuner.Forced, "launch", launch)
    engine, sample = tiny("pi0")
    rows: list[dict] = []
    tuner.tune(
        engine, lambda: Engine(engine).run(sample, 1), Trials(CPU, even, lambda: 6 - len(rows), rows.append)
    )
    seen = [row for row in rows if (row["kernel"], tuple(row["dims"])) in wrong]
    assert len(seen) >= 3
    for row in seen:
        assert row["tile"] != asdict(wrong[row["kernel"], tuple(row["dims"])])
        assert "Tile(" in row["reason"]  # left out; where it was the only one, no tile does
        found = re.search(r"ArithmeticError: relative L2 of (\S+) against the reference", row["reason"])
        assert float(found[1]) == pytest.approx(1.0, abs=0.03)  # doubled


@needs_triton
def test_a_default_tile_that_does_not_run_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program goes on with the reference's answer, and the other tiles are still tried."""
    right, raised = tuner.Forced.launch, []

    def launch(self, kernel, dims, like, prepare, other, out):
        default = candidates(kernel, dims, like.dtype, tuning.NO_GPU)[0]

        def refused(tile):
            if kernel == "splitk_linear" and tile in (None, default):
                raised.append((dims, tile))
                raise ValueError("out of shared memory")
            return prepare(tile)

        return right(self, kernel, dims, like, refused, other, out)

    monkeypatch.setattr(tuner.Forced, "launch", launch)
    monkeypatch.setattr(
        trials.Trials, "begin", lambda self, problem, has_others=False, begin=trials.Trials.begin: (
            problem.kernel == "splitk_linear" and begin(self, problem, has_others)
        )
    )  # fmt: skip
    engine, sample = tiny("pi0")
    rows: list[dict] = []
    tuner.tune(
        engine, lambda: Engine(engine).run(sample, 1), Trials(CPU, even, lambda: 2 - len(rows), rows.append)
    )
    assert [row["way"] for row in rows] == ["triton", "triton"]
    assert all("left out: Tile(" in row["reason"] for row in rows)
    own = [dims for dims, tile in raised if tile is None]
    assert len(own) == len(set(own)) > 2  # of each problem once, though layers repeat them


@needs_triton
def test_layers_in_fp8_are_tuned_with_the_others(two_tiles) -> None:
    model = random_model("pi0", CPU, tiny=True)
    recipe, plan = processing("pi0", model.config), plan_of(model)
    inputs = samples(Case("pi0", 1, 6, 5), model.config, 2, (24, 32))
    scales = calibrated(plan, recipe, inputs, GpuSession(CPU, 10.0, print, tiny=True))
    engine = cuda_engine(plan, recipe, CPU, graph=False, fp8=("language",), scales=scales)
    held = {name for name, module in engine.model.named_modules() if type(module).__name__ == "Fp8Linear"}
    assert held
    assert held <= scales.keys()
    rows: list[dict] = []
    session = Trials(CPU, even, lambda: 100.0, rows.append)
    tuner.tune(engine, lambda: Engine(engine).run(inputs[0], 1), session)
    assert [row for row in rows if row["reason"].startswith("not tuned")] == []
    narrow = [row for row in rows if row["kernel"] == "fp8_product"]
    assert len(narrow) >= 4  # qkv, o, gate and up, down
    assert {row["way"] for row in narrow} == {"triton"}
    assert len({tuple(row["dims"]) for row in narrow}) == len(narrow)
    assert any(row["kernel"] == "fp8_quantize" for row in rows)


def test_time_that_is_over_leaves_problems_out() -> None:
    session = Trials(CPU, even, lambda: 0.0, print)
    assert not session.begin(PROBLEM)
    assert not session.begin(PROBLEM)
    assert session.summary() == {"tuned": 0, "known": 0, "failed": 0, "left out for lack of time": 1}


# ----------------------------------------------------------------------------- what is kept of one


def answer(value: float):
    return lambda *_: torch.full((3,), value)


def trial(device: torch.device, kernel, others: dict, times: dict[float, float]) -> dict:
    """The row of PROBLEM; an answer's value says which way it came, and ``times`` how long that takes."""
    rows: list[dict] = []
    session = Trials(device, lambda calls: times[round(float(calls[0]()[0]), 4)], lambda: 1.0, rows.append)
    assert session.begin(PROBLEM, bool(others))
    session.time(PROBLEM, kernel, answer(1.0), others, 2)
    return rows[0]


def test_the_fastest_way_is_kept_and_not_timed_again(gpu: torch.device) -> None:
    row = trial(
        gpu, answer(1.0), {"library": answer(1.001), "torch": answer(1.002)}, {1.0: 3, 1.001: 1, 1.002: 2}
    )
    assert (row["way"], row["us"]) == ("library", 1000)
    assert choices.choose(*PROBLEM, gpu, "triton")[0] == "library"
    again = Trials(gpu, even, lambda: 1.0, print)
    assert not again.begin(PROBLEM, True)
    assert again.summary()["known"] == 1
    assert Trials(gpu, even, lambda: 1.0, print, again=True).begin(PROBLEM, True)
    assert "tiles of 1 problems tuned" in describe(gpu)


def test_another_way_that_is_wrong_is_out(gpu: torch.device) -> None:
    row = trial(gpu, answer(1.0), {"library": answer(1.5), "torch": answer(float("nan"))}, {1.0: 3})
    assert row["way"] == "triton"
    assert "library does not run" in row["reason"]
    assert "torch does not run" in row["reason"]


@pytest.mark.parametrize("failure", ["raises", "wrong"])
def test_where_no_tile_does_torch_runs(gpu: torch.device, failure: str, monkeypatch) -> None:
    """The kept choice is what an engine then follows."""

    def kernel(tile, i):
        if failure == "raises":
            raise ValueError("does not fit")
        return torch.full((3,), 2.0)

    row = trial(gpu, kernel, {"torch": answer(1.0)}, {1.0: 2})
    assert (row["way"], row["tile"]) == ("torch", None)
    way, reason = choices.choose(*PROBLEM, gpu, "triton")
    assert way == "torch"
    assert reason.startswith("no tile does: ")
    assert "does not fit" in reason or "relative L2 of 1 against the reference" in reason
    assert not Trials(gpu, even, lambda: 1.0, print).begin(PROBLEM, True)

    class Like:
        dtype, device = PROBLEM.dtype, gpu

    kernels = Kernels(CPU)
    got = kernels.launch(PROBLEM.kernel, PROBLEM.dims, Like(), lambda tile: 1 / 0, lambda ops: ops, None)
    assert got is kernels.others["torch"]


def test_where_nothing_does_the_row_says_so(gpu: torch.device) -> None:
    row = trial(gpu, answer(2.0), {"torch": answer(3.0)}, {})
    assert row["reason"].startswith("not tuned: RuntimeError: ")
    assert trial(gpu, answer(2.0), {}, {})["reason"].startswith("not tuned: NoTile: ")
    assert choices.choose(*PROBLEM, gpu, "triton") == ("triton", choices.UNMEASURED)


def test_answers_are_compared_part_by_part() -> None:
    a = torch.ones(4)
    trials.agree((a, (a, None)), (a, (a * 1.001, None)))
    with pytest.raises(ArithmeticError, match="relative L2 of 1 "):
        trials.agree((a, (2 * a, None)), (a, (a, None)))
    with pytest.raises(ValueError, match="argument"):
        trials.agree((a, None), (a, a))


@needs_triton
@pytest.mark.slow
def test_what_reads_a_stream_is_tuned_in_the_form_it_will_be_asked_in(
    one_tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of a library leaves no squares behind, so the next norm is not spared."""
    real = choices.choose

    def library_wins(kernel: str, *rest):
        return ("library", "this test") if kernel == "splitk_linear" else real(kernel, *rest)

    library_wins.cache_clear = real.cache_clear

    def forms(choose) -> set[bool]:
        """Whether squares were given to the gated products."""
        monkeypatch.setattr(choices, "choose", choose)
        engine, sample = tiny("pi0")
        rows: list[dict] = []
        session = Trials(CPU, even, lambda: 1, rows.append, again=True)
        tuner.tune(engine, lambda: Engine(engine).run(sample, 1), session)
        return {row["dims"][-1] == 0 for row in rows if row["kernel"] == "gated_mlp"}

    assert forms(real) == {True}
    assert forms(library_wins) == {False}


# ----------------------------------------------------------------------------- ahead


def test_gathering_goes_on_where_something_does_not_run() -> None:
    def raises(*_):
        raise RuntimeError("no such product")

    asked = []
    gathering = CollectedTrials(CPU)
    assert gathering.begin(PROBLEM, has_others=True)
    gathering.time(PROBLEM, raises, lambda: None, {"a": raises, "b": asked.append})
    assert asked == [0]
    assert not gathering.begin(PROBLEM, has_others=True)


@dataclass
class Slow:
    """In place of what is to be compiled."""

    seconds: float
    fails: bool = False

    def compile(self, capability: int) -> None:
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("spills")


def test_compiling_ahead_ends_in_time() -> None:
    told = []
    few = {str(i): Slow(0.0, fails=i == 3) for i in range(9)}
    assert compile_all(few, 90, 30.0, lambda *state: told.append(state)) == 8
    assert told[-1] == (9, 9)
    done = compile_all({str(i): Slow(0.2) for i in range(400)}, 90, 0.5)
    assert 0 < done < 400
