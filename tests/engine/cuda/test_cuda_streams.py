"""Prefix and head of engine cuda on two CUDA streams, without a GPU: the order of their work, and the same bits.

The order is checked by vector clocks. Every PyTorch operation, and every access of the CPU to memory that is copied to
or from the GPU, belongs to a stream or to a thread of the CPU. Two accesses to the same memory, of which one writes,
must be ordered by the streams, events, waits and locks that the engine uses. The kernels' own workspaces are in
``fake_device.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sinew_perf.memory import WORKSPACE, stream_memory
from sinew_perf.program import PublishedProgram
from sinew_perf.request import TracedRequest
from torch.utils._python_dispatch import TorchDispatchMode

from sinew.core import CancelledError, SinewError
from sinew.engine.backend import choose
from sinew.engine.cuda import engine as engines
from sinew.engine.cuda import program as programs
from sinew.engine.cuda.engine import CudaEngine
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.program import tensors_of
from sinew.engine.cuda.staging import Staging
from sinew.engine.cuda.streams import FLOAT_SUMS, EngineStream
from sinew.engine.guidance import Ramp
from sinew.engine.watch import Watch
from sinew.policy import Policy, load
from sinew.processing import ModelInputs, stack
from sinew.stream import Loops, Session, StreamSettings
from sinew.stream.local import LocalLink
from sinew.stream.session import StateSample
from tests.covering import some
from tests.engine.cuda.cuda_cases import ASSETS, ONE_PER_MODEL, Case, Frozen, golden_case, shaken
from tests.engine.cuda.test_cuda_batches import robots

STEPS = 2
Clock = dict[str, int]


@pytest.fixture
def open_case(golden, smolvla_bundle, pi_bundle):
    def make(name: str) -> Case:
        bundle = pi_bundle if name.startswith("pi") else smolvla_bundle
        return shaken(golden_case(golden, bundle, name))

    return make


def batched(members) -> list[tuple[ModelInputs, np.ndarray]]:
    return [(inputs.batched(), noise[None]) for inputs, noise in members]


# ----------------------------------------------------------------------------- order


class Order(TorchDispatchMode):
    """Finds accesses to memory that nothing orders.

    Attributes:
        thread: The thread of the CPU that runs now. One real thread plays all of them in turns.
        races: A line for each pair of accesses that may happen at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread, self.stream = "main", ""
        self.clocks: dict[str, Clock] = {}
        # For each memory, its accesses: the stream or thread, its time, and whether it writes.
        self.accesses: dict[int, list[tuple[str, int, bool, int, int]]] = {}
        self.kept: list[Any] = []  # memory is never freed, so each address belongs to one tensor
        self.races: list[str] = []

    def clock(self, name: str) -> Clock:
        return self.clocks.setdefault(name, {})

    def join(self, name: str, other: Clock) -> None:
        own = self.clock(name)
        own |= {each: max(since, own.get(each, 0)) for each, since in other.items()}

    def access(self, who: str, read: list[torch.Tensor], written: list[torch.Tensor], what: str) -> None:
        own = self.clock(who)
        if who != self.thread:
            self.join(who, self.clock(self.thread))  # a stream begins after the call that submits the work
        own[who] = own.get(who, 0) + 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                self.kept.append(storage := tensor.untyped_storage())
                before, (start, end) = self.accesses.setdefault(storage._cdata, []), extent(tensor)
                for other, since, wrote, first, last in before:
                    if (writes or wrote) and first < end and start < last and own.get(other, 0) < since:
                        self.races.append(f"{what} of {who} and an access of {other}, {list(tensor.shape)}")
                before.append((who, own[who], writes, start, end))

    def ended(self, stream: str, call: str) -> None:
        """Check that a call of this thread has waited for all work of a stream."""
        if self.clock(self.thread).get(stream) != self.clock(stream)[stream]:
            self.races.append(f"{call} returned early")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        read = tensors_of((args, kwargs))
        written = tensors_of(args[0] if func is torch.ops.aten._foreach_copy_.default else out)
        if not func._schema.is_mutable:  # a result in the memory of an argument is a view
            own = {each.untyped_storage()._cdata for each in read}
            written = [each for each in written if each.untyped_storage()._cdata not in own]
        self.access(self.stream or self.thread, read, written, str(func))
        return out


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its memory, and the byte after its last one."""
    start, size = tensor.storage_offset(), tensor.element_size()
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size if tensor.numel() else start * size


class OrderedStream(EngineStream):
    """A stream of an engine that runs on a CPU, whose work counts as submitted to a GPU."""

    order: Order

    def __init__(self, device: torch.device, priority: int = 0, recorder: Any = None):
        super().__init__(device, priority, recorder)
        self.name = "head stream" if priority else "prefix stream"
        self.released: Clock = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        with super().current():
            before, self.order.stream = self.order.stream, self.name
            self.order.join(self.order.thread, self.released)
            try:
                yield
            finally:
                self.released = dict(self.order.clock(self.order.thread))
                self.order.stream = before

    def wait(self) -> None:
        self.order.join(self.order.thread, self.order.clock(self.name))

    def event(self) -> Any:
        return OrderedEvent(self.order, dict(self.order.clock(self.name)))

    def follow(self, event: Any) -> None:
        self.order.join(self.name, event.clock)


class OrderedEvent:
    def __init__(self, order: Order, clock: Clock):
        self.order, self.clock = order, clock

    def synchronize(self) -> None:
        self.order.join(self.order.thread, self.clock)


@pytest.fixture
def order(monkeypatch) -> Order:
    made = Order()
    monkeypatch.setattr(engines, "EngineStream", type("Stream", (OrderedStream,), {"order": made}))
    write, numpy = Staging.write, torch.Tensor.numpy

    def written(staging: Staging, name: str, array: np.ndarray, row: int | None = None) -> None:
        part = staging._host[staging.part(name, row)]
        made.access(made.thread, [], [part], f"a write of {name}")
        write(staging, name, array, row)

    def read(tensor: torch.Tensor, **options: Any) -> np.ndarray:
        made.access(made.thread, [tensor], [], "a read of the CPU")
        return numpy(tensor, **options)

    monkeypatch.setattr(Staging, "write", written)
    monkeypatch.setattr(torch.Tensor, "numpy", read)
    monkeypatch.setattr(programs, "threads_for", lambda sizes: 0)
    return made


def streamed(case: Case, order: Order, engine: CudaEngine, guided: bool = False) -> list[np.ndarray]:
    """Two threads read observations in turns, a third one solves the former context meanwhile, and a fourth one sends
    requests. Nothing orders them, except that a context is handed over.

    Returns:
        The actions of the heads, for each context with its own state and with another one, and those of the requests.
    """
    members = batched(robots(case, 4))
    guidance = Ramp(torch.full((1, *case.noise.shape), 0.5)) if guided else None
    # Recordings and buffers exist before, as after the first observation.
    past = engine.read(members[0][0])
    engine.solve(past, members[0][1], STEPS, guidance)
    engine.run(*members[0], STEPS)
    heads, requests = [], []
    with order:
        for number, (inputs, noise) in enumerate(members):
            order.thread = f"reader {number % 2}"
            context = engine.read(inputs)
            handed = dict(order.clock(order.thread))
            order.ended("prefix stream", "read")
            if number % 2:  # it waits for the prefix stream, and so would order two reads
                order.thread = "requests"
                requests.append(engine.run(*members[-1], STEPS))
            order.thread = "heads"
            heads.append(engine.solve(past, noise, STEPS, guidance))
            heads.append(engine.solve(engine.renew(past, inputs.state + 1.0), noise, STEPS, guidance))
            order.ended("head stream", "solve")
            order.join("heads", handed)
            past = context
    return [*heads, *requests]


@pytest.mark.parametrize("guided", [False, True], ids=["whole", "guided"])
@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi0-2cam"))
def test_every_access_to_memory_is_ordered(open_case, order, name, guided):
    """And the actions have the bits of an engine that does one thing after the other."""
    case = open_case(name)
    found = streamed(case, order, case.engine(Frozen()), guided)
    assert order.races == []
    assert {"head stream", "prefix stream", "heads", "reader 0", "reader 1", "requests"} <= set(order.clocks)
    alone, members = case.engine(), batched(robots(case, 4))
    guidance = Ramp(torch.full((1, *case.noise.shape), 0.5)) if guided else None
    wanted = []
    for past, (inputs, noise) in zip([members[0], *members], members, strict=False):
        context = alone.read(past[0])
        wanted.append(alone.solve(context, noise, STEPS, guidance))
        wanted.append(alone.solve(alone.renew(context, inputs.state + 1.0), noise, STEPS, guidance))
    wanted += [alone.run(*members[-1], STEPS)] * 2
    assert all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert np.array_equal(wanted[0], wanted[1]) != case.model.head_reads_state
    assert not np.array_equal(wanted[2], wanted[4])


def share_the_results(engine: CudaEngine) -> None:
    engine._apart_chunks = engine._chunks


def keep_the_context_in_the_recording(engine: CudaEngine) -> None:
    engines.copied = lambda context: context


def forget_the_event(engine: CudaEngine) -> None:
    engine.head_stream.follow = lambda event: None
    engine.prefix_stream.event = lambda: None


def forget_the_wait(engine: CudaEngine) -> None:
    engine.head_stream.wait = lambda: None


def forget_the_upload(engine: CudaEngine) -> None:
    programs.PrefixProgram.uploaded = property(lambda prefix: None, lambda prefix, event: None)


def share_the_head(engine: CudaEngine) -> None:
    """The requests' program writes the memory of the streams' head."""
    program, head = (kept[kept.keys()[-1]] for kept in (engine.programs, engine.heads))
    program.x = head.x


FAULTS = [
    share_the_results,
    keep_the_context_in_the_recording,
    forget_the_event,
    forget_the_wait,
    forget_the_upload,
    share_the_head,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_missing_order_is_found(open_case, order, monkeypatch, fault):
    case = open_case("pi0-2cam")
    monkeypatch.setattr(engines, "copied", engines.copied)  # restored after the fault
    monkeypatch.setattr(programs.PrefixProgram, "uploaded", None, raising=False)
    engine = case.engine(Frozen())
    members = batched(robots(case, 1))
    engine.solve(engine.read(members[0][0]), members[0][1], STEPS)
    engine.run(*members[0], STEPS)
    fault(engine)
    streamed(case, order, engine)
    assert any("an access of" in race for race in order.races)
    early = {forget_the_event: "read", forget_the_wait: "solve"}.get(fault)
    assert {race for race in order.races if "early" in race} == (
        {f"{early} returned early"} if early else set()
    )


# ----------------------------------------------------------------------------- memory


class Touched(TorchDispatchMode):
    """The memory that a program reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.all: set[int] = set()
        self.written: set[int] = set()
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, results = tensors_of((args, kwargs)), tensors_of(out)
        self.kept += [each.untyped_storage() for each in (*read, *results)]
        places, made = ({each.untyped_storage()._cdata for each in tensors} for tensors in (read, results))
        self.all |= places | made
        self.written |= made if func._schema.is_mutable else made - places
        return out


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_no_buffer_is_shared(open_case, name):
    """No program touches memory that another one of the three writes. All of them only read weights and tables."""
    case = open_case(name)
    engine = case.engine()
    inputs, noise = batched(robots(case, 1))[0]
    with torch.inference_mode():
        engine.solve(engine.read(inputs), noise, STEPS)
        engine.run(inputs, noise, STEPS)
        whole, prefix, head = (
            kept[kept.keys()[-1]] for kept in (engine.programs, engine.prefixes, engine.heads)
        )
        parts = {}
        for part, calls in {
            "prefix": (lambda: prefix.write(inputs), prefix.vision, prefix.recorded("read").replay),
            "head": (lambda: head.write(noise), head.solution, head.step),
            "whole": (lambda: whole.write(inputs, noise), whole.chunk),
        }.items():
            with Touched() as touched:
                for call in calls:
                    call()
            parts[part] = touched
    weights = {each.untyped_storage()._cdata for each in engine.model.parameters()}
    for one, touched in parts.items():
        assert touched.all & weights
        assert len(touched.written) > 10
        for other in parts.keys() - {one}:
            assert not touched.written & parts[other].all, (one, other)
    blocks = [
        block.untyped_storage()._cdata
        for each in (whole, prefix, head)
        for block in (each.staging._host, each.staging._device)
    ]
    assert len(set(blocks)) == 6
    assert engine._chunks.data_ptr() != engine._apart_chunks.data_ptr()


@pytest.mark.parametrize("name", some(ONE_PER_MODEL, "pi05-2cam"))
def test_perf_counts_the_buffers_of_a_stream(open_case, smolvla_bundle, pi_bundle, name):
    """A stream that reads the next prefix while its head uses the last one: bytes of each buffer, against `sinew perf
    fit --stream`."""
    case = open_case(name)
    engine, members = case.engine(Frozen()), robots(case, 2)
    # Pixels, which `sinew perf` counts, instead of frames, whose sizes the camera decides.
    inputs, newer = (case.prepared(each).batched() for each, _ in members)
    noise = members[0][1][None]
    in_use = engine.read(inputs)
    engine.solve(in_use, noise, STEPS)
    following = engine.read(newer)
    prefix, head = (kept[kept.keys()[-1]] for kept in (engine.prefixes, engine.heads))

    contexts = [
        tensors_of(each) for each in (in_use.parts[0].tensors, following.parts[0].tensors, head.context)
    ]
    recorded = tensors_of(prefix.recorded("read").result)
    places = [{each.untyped_storage()._cdata for each in group} for group in (*contexts, recorded)]
    assert len(set.union(*places)) == sum(len(each) for each in places)  # four, in memory of their own
    request = TracedRequest(cameras=prefix.key.views, prompt_tokens=prefix.key.tokens, steps=STEPS)
    bundle = (pi_bundle if name.startswith("pi") else smolvla_bundle)(name)
    counted = stream_memory(PublishedProgram.load(bundle, request, dtypes="fp32", engine="plan"))
    # The masks of the engine's plan differ by some bytes.
    copies = sum(each.nbytes for group in contexts for each in group)
    assert counted.contexts == pytest.approx(copies, rel=0.01)

    fields = [*prefix.staging.device.values(), *head.staging.device.values()]
    buffers = [head.x, head.time_embedding]
    assert head.actions is head.x  # the engine of this test leaves the conversion to robot units to the CPU
    actions = head.x.nbytes
    assert counted.inputs == sum(each.nbytes for each in (*fields, *buffers)) + actions
    workspace = Kernels(torch.device("meta")).workspace
    assert counted.workspace - WORKSPACE["cuda"] == workspace.parts.nbytes + workspace.arrivals.nbytes


# ----------------------------------------------------------------------------- the engine


def test_a_batch_is_read_and_solved_as_it_runs(open_case):
    """Seven robots, as programs of four, two and one."""
    case = open_case("pi0-2cam")
    inputs, noise = zip(*robots(case, 7), strict=True)
    whole, noises = stack(inputs, case.policy.manifest.processing.prompt), np.stack(noise)
    engine = case.engine(Frozen())
    context = engine.read(whole)
    assert [part.key.batch for part in context.parts] == [4, 2, 1]
    wanted = engine.run(whole, noises, STEPS)
    assert np.array_equal(engine.solve(context, noises, STEPS), wanted)
    ramp = Ramp(torch.linspace(0, 1, noises.size).reshape(noises.shape))
    assert np.array_equal(engine.solve(context, noises, STEPS, ramp), engine.run(whole, noises, STEPS, ramp))
    state = whole.state[::-1].copy()
    renewed = engine.renew(context, state)
    assert np.array_equal(
        engine.solve(renewed, noises, STEPS), engine.run(replace(whole, state=state), noises, STEPS)
    )
    assert np.array_equal(engine.solve(context, noises, STEPS), wanted)


def test_a_newer_state_copies_the_state_alone(open_case, monkeypatch):
    """A fast loop solves one context many times."""
    case = open_case("pi0-2cam")
    engine, ((inputs, noise), (other, _)) = case.engine(Frozen()), batched(robots(case, 2))
    context = engine.read(inputs)
    engine.solve(context, noise, STEPS)
    copies, copy_all = [], programs.copy_all

    def counted(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        copies.append(len(source))
        copy_all(to, source)

    monkeypatch.setattr(programs, "copy_all", counted)
    engine.solve(context, noise, STEPS)
    engine.solve(engine.renew(context, inputs.state), noise, STEPS)
    assert copies == [0, 1]
    newer = engine.read(other)
    engine.solve(newer, noise, STEPS)
    every = len(tensors_of(context.parts[0].tensors))
    assert copies == [0, 1, every, every]  # out of the recording of the prefix, and into the head's memory
    assert every > 4


def test_the_watch_times_prefix_and_steps_on_their_streams(open_case):
    case = open_case("pi05-2cam")
    engine, ((inputs, noise),) = case.engine(Frozen()), batched(robots(case, 1))
    for apart in (False, True):
        watch = Watch(apart=apart)
        chunk = engine.solve(engine.read(inputs, watch), noise, STEPS, watch=watch)
        timing = watch.timing()
        assert np.array_equal(chunk, engine.run(inputs, noise, STEPS))
        assert timing.prefix_ms > 0
        assert (timing.vision_ms > 0) == apart
        assert len(timing.step_ms) == (STEPS if apart else 1)
    cancel = threading.Event()
    cancel.set()
    context = engine.read(inputs)
    with pytest.raises(CancelledError):
        engine.read(inputs, Watch(cancel))
    with pytest.raises(CancelledError):
        engine.solve(context, noise, STEPS, watch=Watch(cancel))


def test_another_solution_between_two_steps_changes_neither(open_case):
    """As a stream's short head run between two steps of a guided one."""
    case = open_case("pi05-2cam")
    engine, members = case.engine(Frozen()), batched(robots(case, 2))
    ramp = Ramp(torch.linspace(0, 1, case.noise.size).reshape(1, *case.noise.shape))
    contexts = [engine.read(inputs) for inputs, _ in members]
    wanted = [
        engine.solve(context, noise, STEPS, guide)
        for context, (_, noise), guide in zip(contexts, members, (ramp, None), strict=True)
    ]
    nested: list[np.ndarray] = []
    watch = Watch(between=lambda: nested.append(engine.solve(contexts[1], members[1][1], STEPS)))
    assert np.array_equal(engine.solve(contexts[0], members[0][1], STEPS, ramp, watch), wanted[0])
    assert len(nested) == STEPS
    assert all(np.array_equal(each, wanted[1]) for each in nested)


@pytest.mark.parametrize("failing", ["head", "prefix"])
def test_an_error_of_one_stream_leaves_the_other(open_case, monkeypatch, failing):
    """The other stream computes while the failing call still runs, and both go on after it."""
    case = open_case("pi0-2cam")
    engine, members = case.engine(Frozen()), batched(robots(case, 3))
    contexts = [engine.read(inputs) for inputs, _ in members]
    wanted = [
        engine.solve(context, noise, STEPS) for context, (_, noise) in zip(contexts, members, strict=True)
    ]

    def head() -> np.ndarray:
        return engine.solve(contexts[0], members[0][1], STEPS)

    def prefix() -> Any:
        return engine.read(members[2][0])

    fails, goes_on = (head, prefix) if failing == "head" else (prefix, head)
    kept, name = (engine.heads, "solution") if failing == "head" else (engine.prefixes, "read")
    recorded = kept[kept.keys()[-1]].recorded(name)
    inside, go_on, waits = threading.Event(), threading.Event(), []

    def broken() -> None:
        inside.set()
        assert go_on.wait(60)
        raise RuntimeError("an illegal memory access")

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(recorded, "replay", broken)
        patch.setattr(engine.head_stream, "wait", lambda: waits.append(threading.get_ident()))
        running = pool.submit(lambda: (threading.get_ident(), fails()))
        assert inside.wait(60)
        try:
            goes_on()
            mine = len(waits)
        finally:
            go_on.set()
        with pytest.raises(RuntimeError, match="illegal"):
            running.result(60)
        assert len(waits) - mine == (failing == "head")  # the failing call waits for its own work
    for context, (inputs, noise), chunk in zip(contexts, members, wanted, strict=True):
        assert np.array_equal(engine.solve(context, noise, STEPS), chunk)
        assert np.array_equal(engine.solve(engine.read(inputs), noise, STEPS), chunk)


def test_two_threads_keep_the_setting_of_sums(monkeypatch):
    """The one that leaves first does not restore it while the other one still records."""
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction
    flags.allow_bf16_reduced_precision_reduction = True
    try:
        with FLOAT_SUMS:
            with FLOAT_SUMS:
                pass
            assert flags.allow_bf16_reduced_precision_reduction is False
        assert flags.allow_bf16_reduced_precision_reduction is True
    finally:
        flags.allow_bf16_reduced_precision_reduction = before


# ----------------------------------------------------------------------------- streams of robots


def pictures(policy: Policy, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        each.name: rng.integers(0, 256, (each.height, each.width, 3), np.uint8)
        for each in policy.spec.cameras
    }


def session(policy: Policy) -> Session:
    rate = float(policy.spec.control_hz or 0)
    return Session(policy, StreamSettings(rate, seed=7), "draw", clock=lambda: 0.0)


def test_a_head_keeps_the_old_prefix_until_the_new_one_is_whole(monkeypatch):
    """A robot's fast loop runs the head again and again while its slow loop computes a prefix."""
    policy = load(ASSETS / "pen.gguf", device="cpu", engine="cuda", threads=1)
    engine, stream = policy.engine, session(policy)
    stream.push_sample(StateSample(np.zeros(policy.spec.state.dim, np.float32), 0.0, 0))
    stream.push_frame(pictures(policy, 0), 0.0)
    assert stream.read()
    old = stream.run()
    assert old is not None
    stream.push_frame(pictures(policy, 1), 0.0)
    recorded = engine.prefixes[engine.prefixes.keys()[-1]].recorded("read")
    replay, inside, go_on = recorded.replay, threading.Event(), threading.Event()

    def slow() -> None:
        inside.set()
        assert go_on.wait(60)
        replay()

    monkeypatch.setattr(recorded, "replay", slow)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.read)
        try:
            assert inside.wait(60)
            for _ in range(3):
                stream._used = ()  # as if a newer sample had arrived
                again = stream.run()
                assert again is not None
                assert np.array_equal(again.rows, old.rows)
        finally:
            go_on.set()
        assert reading.result(60)
    new = stream.run()
    assert new is not None
    assert not np.array_equal(new.rows, old.rows)


def test_two_robots_get_the_windows_that_they_get_alone():
    """From the threads of both loops, beside requests."""
    policy = load(ASSETS / "pen.gguf", device="cpu", engine="cuda", threads=1)
    state = np.zeros(policy.spec.state.dim, np.float32)
    seen, wanted = [pictures(policy, seed) for seed in range(2)], []
    for frames in seen:
        alone = session(policy)
        alone.push_sample(StateSample(state, 0.0, 0))
        alone.push_frame(frames, 0.0)
        assert alone.read()
        wanted.append(alone.run().rows)
    asked = {"images": seen[0], "state": state, "prompt": "draw", "seed": 3}
    chunk = policy.infer(asked).actions
    loops = Loops()
    links = [LocalLink(session(policy), loops) for _ in seen]
    try:
        for link, frames in zip(links, seen, strict=True):
            assert link.send(state, 0.0, 0, frames, 0.0)
        for _ in range(3):
            assert np.array_equal(policy.infer(asked).actions, chunk)
        for link, rows in zip(links, wanted, strict=True):
            end, windows = time.monotonic() + 60, link.windows()
            while not windows and time.monotonic() < end:
                time.sleep(0.01)
                windows = link.windows()
            assert np.array_equal(windows[0].rows, rows)
            assert link.errors == 0
    finally:
        for link in links:
            link.close()


def test_a_head_of_tokens_says_that_it_cannot_stream(case_bundle):
    why = "stream: expected a head with solver steps on engine cuda, got one that generates tokens"
    policy = load(case_bundle("pi0fast-2cam"), "cpu", "fp32", "cuda", allow_missing_cameras=True)
    with pytest.raises(SinewError, match=why):
        Session(policy, StreamSettings(30.0))
    with pytest.raises(SinewError, match=why):
        choose(policy.bundle, "cuda", "cpu", stream="none")
    assert choose(policy.bundle, device="cpu", stream="none").engine != "cuda"
