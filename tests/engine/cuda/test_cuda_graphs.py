"""Recording and replaying: static memory, keys, eviction, and what a capture would refuse. No GPU: a recorder that
runs the program again on the same memory, and a device that is not the host."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from sinew.cli import main
from sinew.engine.cuda import graphs
from sinew.engine.cuda import program as programs
from sinew.engine.cuda.frames import runs
from sinew.engine.cuda.graphs import Calls, Kept
from sinew.engine.cuda.program import Program
from sinew.engine.cuda.staging import ALIGNMENT
from sinew.layers import vit
from sinew.layers.linear import rounded
from sinew.layers.vit import position_rows
from sinew.policy import load
from tests.cases import golden_cases
from tests.covering import pairs, some
from tests.engine.cuda.cuda_cases import ASSETS, BOUND, Case, Frozen, asset_case, golden_case, shaken
from tests.engines import run_one
from tests.golden import Golden
from tests.models.stages import CASES, observation

ONE_PER_MODEL = ["smolvla-2cam", "pi0-2cam", "pi05-2cam"]


@pytest.fixture
def open_case(golden, smolvla_bundle, pi_bundle):
    def make(name: str) -> Case:
        return golden_case(golden, pi_bundle if name.startswith("pi") else smolvla_bundle, name)

    return make


def rotated(case: Case, seed: int):
    """Another observation of the same key: other frames, tokens, state and noise, a shorter prompt."""
    rng = np.random.default_rng(seed)
    inputs = case.inputs()
    length = int(rng.integers(2, 16))
    return replace(
        inputs,
        frames=tuple(rng.integers(0, 256, frame.shape, dtype=np.uint8) for frame in inputs.frames),
        tokens=rng.integers(1, 60, length),
        token_mask=np.ones(length, bool),
        state=rng.standard_normal(inputs.state.shape).astype(np.float32),
    ), rng.standard_normal(case.noise.shape).astype(np.float32)


# ----------------------------------------------------------------------------- replays


@pytest.mark.parametrize(
    ("name", "apart"), pairs(ONE_PER_MODEL, (False, True), ("pi05-2cam", False), ("smolvla-2cam", True))
)
def test_replays_read_what_was_written_last(open_case, name, apart):
    """Rotating inputs through one recording: each result is that of an engine which never saw the others."""
    case = shaken(open_case(name))
    recorder = Frozen()
    engine = case.engine(recorder)
    fresh = case.engine()
    for seed in range(4):
        inputs, noise = rotated(case, seed)
        got, _ = run_one(engine, inputs, noise, 2, apart=apart)
        wanted, _ = run_one(fresh, inputs, noise, 2)
        assert np.array_equal(got, wanted)
        case.noise = noise
        assert case.gap(fresh, inputs, 2) <= BOUND
    parts = ["vision", "read", "step"] if apart else ["chunk"]
    assert [entry for entry in recorder.log if entry.startswith("record")] == [f"record {p}" for p in parts]
    assert recorder.log.count(f"replay {parts[-1]}") == 4 * (2 if apart else 1)
    assert len(engine.programs) == 1


def test_a_key_is_views_sizes_bucket_and_steps(open_case):
    case = open_case("pi0-2cam")
    engine = case.engine(Frozen(), prompt_buckets=(16, 32), max_graphs=3)
    inputs = case.inputs()

    def run(inputs, steps=2):
        assert case.gap(engine, inputs, steps) <= BOUND
        return engine.programs.keys()[-1]

    short = replace(inputs, tokens=np.arange(1, 6), token_mask=np.ones(5, bool))
    first = run(short)
    assert run(replace(inputs, tokens=np.arange(1, 9), token_mask=np.ones(8, bool))) == first
    longer = run(replace(inputs, tokens=np.arange(1, 21), token_mask=np.ones(20, bool)))
    assert (first.tokens, longer.tokens) == (16, 32)
    alone = run(replace(short, frames=short.frames[:1], camera_mask=np.ones(1, bool)))
    assert (alone.views, len(alone.sizes)) == (1, 1)
    assert engine.programs.keys() == (first, longer, alone)
    assert run(short) == first  # used: the longer prompt is the oldest now
    pixels = run(replace(case.prepared(short), tokens=short.tokens, token_mask=short.token_mask))
    assert (pixels.views, pixels.sizes) == (2, ())
    assert engine.programs.keys() == (alone, first, pixels)
    assert run(short, steps=3).steps == 3
    assert engine.programs.keys()[:2] == (first, pixels)


@pytest.mark.parametrize("apart", [False, True])
def test_stages_are_shown_by_name_to_who_listens(open_case, monkeypatch, apart: bool) -> None:
    """As ranges of NVTX in any case, of the profiler while it listens; none is left open where a stage raises."""
    stages = ["vision", "prefix", "step", "step"] if apart else ["chunk"]
    wanted = ["copies", *stages, "copies"]
    case = open_case("smolvla-2cam")
    inputs, noise = rotated(case, 1)
    engine = case.engine(Frozen())
    run_one(engine, inputs, noise, 2, apart=apart)
    pushed, depth = [], []
    monkeypatch.setattr(graphs, "NVTX", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (pushed.append(name), depth.append(name)))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", depth.pop)
    recorder = torch.profiler.record_function
    monkeypatch.setattr(torch.profiler, "record_function", None)  # nobody listens: none is made
    run_one(engine, inputs, noise, 2, apart=apart)
    assert (pushed, depth) == (wanted, [])
    monkeypatch.setattr(torch.profiler, "record_function", recorder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run_one(engine, inputs, noise, 2, apart=apart)
    ranges = sorted(
        (
            event
            for event in profile.events()
            if event.name in {"chunk", *wanted} and event.is_user_annotation
        ),
        key=lambda event: event.time_range.start,
    )
    assert [event.name for event in ranges] == wanted
    with pytest.raises(KeyError), graphs.StageRange("fails"):
        raise KeyError
    assert (pushed[-1], depth) == ("fails", [])


def test_keys_that_alternate_keep_their_own_memory(open_case):
    """Vision, prefix and steps of two keys in turns: what one left for its next stage, the other leaves alone."""
    case = shaken(open_case("pi05-2cam"))
    engine, fresh = case.engine(Frozen()), case.engine()
    two, noise = rotated(case, 1)
    one = replace(two, frames=two.frames[:1], camera_mask=np.ones(1, bool))
    programs = []
    with torch.inference_mode():
        for inputs in (two, one):
            run_one(engine, inputs, noise, 2)
            program = engine.programs[engine.programs.keys()[-1]]
            program.write(inputs.batched(), noise[None])
            programs.append(program)
        for stage in ("vision", "read"):
            for program in programs:
                program.recorded(stage).replay()
        for program in programs:
            program.recorded("step")  # a recording runs the step
            program.x.copy_(program.noise)
        for step in range(2):
            for program in reversed(programs):
                program.time_embedding.copy_(program.time_embeddings[step])
                program.recorded("step").replay()
                output = program.recorded("step").result
                program.x.copy_(program.steps[step].advance(program.x, output, program.noise, []))
    for program, inputs in zip(programs, (two, one), strict=True):
        assert np.array_equal(program.x[0].numpy(), run_one(fresh, inputs, noise, 2)[0])


def test_a_recording_that_keeps_an_input_is_caught(open_case, monkeypatch):
    """The proof can fail: a program that reads the host's arrays instead of its static memory."""
    case = shaken(open_case("pi0-2cam"))
    engine, fresh = case.engine(Frozen()), case.engine()
    first, noise = rotated(case, 1)
    run_one(engine, first, noise, 2)
    (key,) = engine.programs.keys()
    program = engine.programs[key]
    monkeypatch.setattr(program.staging, "upload", lambda *_: None)  # what was written does not arrive
    second, noise = rotated(case, 2)
    assert not np.array_equal(run_one(engine, second, noise, 2)[0], run_one(fresh, second, noise, 2)[0])


def test_preparing_records_before_the_first_observation(open_case):
    case = open_case("pi05-2cam")
    recorder = Frozen()
    engine = case.engine(recorder)
    inputs = case.inputs()
    wanted, _ = run_one(case.engine(), inputs, case.noise, 3)
    fresh = case.engine()
    run_one(fresh, inputs, case.noise, 3)
    engine.prepare(fresh.programs.keys()[0])
    assert recorder.log == ["record chunk"]
    assert np.array_equal(run_one(engine, inputs, case.noise, 3)[0], wanted)
    assert recorder.log == ["record chunk", "replay chunk"]


# ----------------------------------------------------------------------------- parts


def test_what_was_not_used_for_longest_goes():
    made = []
    kept = Kept(2, lambda key: made.append(key) or key.upper())
    assert [kept[key] for key in "abab"] == list("ABAB")
    assert made == ["a", "b"]
    assert kept["c"] == "C"
    assert kept.keys() == ("b", "c")
    assert "a" not in kept
    assert kept["b"] == "B"
    assert kept["a"] == "A"
    assert (kept.keys(), made, len(kept)) == (("b", "a"), ["a", "b", "c", "a"], 2)


def test_what_fails_to_be_made_is_not_kept():
    def make(key):
        raise ValueError(key)

    kept = Kept(2, make)
    with pytest.raises(ValueError, match="a"):
        kept["a"]
    assert len(kept) == 0


def test_calls_run_each_time():
    calls = []
    recorded = Calls().record(lambda: calls.append(1) or len(calls))
    assert calls == []
    for wanted in (1, 2):
        recorded.replay()
        assert recorded.result == wanted


@pytest.mark.parametrize("threads", [0, 2])
def test_each_frame_is_sent_when_it_is_there(open_case, monkeypatch, threads: int):
    """By itself, after what is small and after it was written; every byte once, and the answer stays the same."""
    case = shaken(open_case("pi0-2cam"))
    engine, fresh = case.engine(), case.engine()
    run_one(engine, *rotated(case, 1), 2)
    (key,) = engine.programs.keys()
    staging, log = engine.programs[key].staging, []
    write, upload = staging.write, staging.upload
    monkeypatch.setattr(programs, "threads_for", lambda sizes: threads)
    monkeypatch.setattr(staging, "write", lambda name, array, row=None: (
        write(name, array, row), log.append((name, row)) if row is not None else None
    ))  # fmt: skip
    monkeypatch.setattr(staging, "upload", lambda part: (log.append(part), upload(part)))
    inputs, noise = rotated(case, 2)
    got, _ = run_one(engine, inputs, noise, 2)
    assert np.array_equal(got, run_one(fresh, inputs, noise, 2)[0])
    views = [("frames.0", view) for view in range(2)]
    sent = [entry for entry in log if isinstance(entry, slice)]
    assert log[0] == sent[0] or threads  # what is small does not wait for a frame
    assert sent[0].stop == staging.part("frames.0").start
    assert sorted(sent[1:], key=lambda part: part.start) == [staging.part(*view) for view in views]
    assert sum(part.stop - part.start for part in sent) >= staging.nbytes - ALIGNMENT
    for view in views:
        assert log.index(view) < log.index(staging.part(*view))
    if not threads:
        assert log[1:] == [views[0], staging.part(*views[0]), views[1], staging.part(*views[1])]


def test_neighbours_of_one_size_are_one_launch():
    assert [tuple(run) for run in runs([(4, 6), (4, 6), (8, 8), (4, 6)])] == [
        (0, 2, (4, 6)),
        (2, 1, (8, 8)),
        (3, 1, (4, 6)),
    ]
    assert runs([(4, 6)] * 2)[0].shape == (2, 4, 6, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_is_what_the_dtype_holds(dtype):
    rng = np.random.default_rng(0)
    for value in (2048**0.5, 960**0.5, 64**0.5, 1.0, 0.99999, *rng.uniform(1e-3, 1e3, 200)):
        assert rounded(value, dtype) == torch.tensor(value, dtype=dtype).item()


# ----------------------------------------------------------------------------- what a capture would refuse


def audit(case: Case, pixels: bool, spoil=lambda model: None, **options) -> list[str]:
    """What a recording of the case's program would meet, of all stages, each of which computes something."""
    engine = case.engine(**options)
    spoil(engine.model)
    steps = case.policy.spec.solver.fixed_steps or (
        2 if case.noise.ndim == 2 else case.policy.spec.solver_steps
    )
    stages = engine.audit(case.inputs(pixels=pixels).batched(), steps)
    assert [stage.stage for stage in stages] == ["vision", "prefix", "head"]
    assert sum(stage.operators for stage in stages) > 100
    assert stages[2].operators > 0
    return [what for stage in stages for what in stage.breaks]


@pytest.mark.parametrize("options", [{}, {"kernels": False}], ids=["references", "plain"])
@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_nothing_is_read_from_the_host_inside_a_program(open_case, name, options):
    assert audit(open_case(name), pixels=False, **options) == []  # of pixels: below, of every family


TOWERS = (
    "pi05-mem",
    "groot-n17",
    "openvla-oft",
    "bitvla",
    "vla-jepa",
    "omnivla-edge",
    "act-2cam",
    "xvla-ee6d",
)


@pytest.mark.kernels
@pytest.mark.parametrize("case", some(CASES, *TOWERS))  # one of those that see with the same layers
def test_no_family_reads_from_the_host_inside_a_program(case_bundle, case):
    """The first run on a GPU found positions of a tower that were looked up on the host at every call."""
    policy = load(case_bundle(case), "cpu", "fp32", "eager", allow_missing_cameras=True)
    seen = observation(case, Golden(golden_cases() / case))
    assert audit(Case(policy, seen, policy.processor.noise(seen)[0]), pixels=True) == []


def test_the_audit_finds_a_constant_that_is_copied(monkeypatch):
    case = asset_case("blocks")
    scale = case.model.config.language.hidden_size**0.5

    def with_a_constant(value, dtype):
        return torch.tensor(value, dtype=dtype, device="meta") if value == scale else rounded(value, dtype)

    assert audit(case, pixels=True) == []

    def spoil(model):
        monkeypatch.setattr("sinew.families.smolvla.model.rounded", with_a_constant)

    (found,) = audit(case, True, spoil)
    assert re.fullmatch(
        r"copies a constant from the host \(torch.tensor, families/smolvla/model.py:\d+\)", found
    )


def test_the_audit_finds_a_value_that_is_waited_for(monkeypatch, capsys):
    """By the line that a user types: status 1, the stage and the line of the program that asks."""
    line = ["validate", str(ASSETS / "act.gguf"), "--engine", "cuda", "--audit"]
    assert main(line) == 0
    assert "one graph records all of it" in capsys.readouterr().out
    finish = Program.finish

    def branching(program):
        if program.x.sum() > 0:
            finish(program)

    monkeypatch.setattr(Program, "finish", branching)
    assert main([*line, "--json"]) == 1
    vision, prefix, head = json.loads(capsys.readouterr().out)["stages"]
    assert vision["breaks"] == prefix["breaks"] == []
    assert head["breaks"][0].startswith("waits for a value of the device (aten._local_scalar_dense.default, ")
    assert head["nbytes"] > 0
    for given, said in (
        (
            [*line[:3], "eager", "--audit"],
            "expected engine cuda, which records its program, got engine eager",
        ),
        ([*line, "--out", "report"], "--out: expected none with --audit"),
    ):
        assert main(given) == 1
        assert said in capsys.readouterr().err


def test_the_audit_finds_rows_that_are_looked_up_again(open_case, monkeypatch):
    case = open_case("smolvla-2cam")
    case.model.config.vision.__dict__["image_size"] = 256  # a table of a larger grid than the frames'
    vision = case.model.vision
    rows = vision.position_embedding.weight
    vision.position_embedding.weight = torch.nn.Parameter(rows.repeat(4, 1), requires_grad=False)
    assert audit(case, pixels=True) == []
    from_the_host = position_rows

    class Forgetful(dict):
        def __contains__(self, key):
            return False

    def spoil(model):
        model.vision.grids = Forgetful()
        monkeypatch.setattr(vit, "position_rows", lambda *grid: from_the_host(*grid[:3]).to("meta"))

    assert audit(case, True, spoil)
