"""Measure prefixes and heads on the two CUDA streams of engine cuda: a robot that streams, and two robots.

:func:`stream` plays the loops of ``sinew.stream`` without a robot: one thread reads frames at the camera's rate, and
another one runs the head with the newest prefix. :func:`robots` compares the answers of two robots, whose prefix and
head may overlap, with the same requests one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.models import CAMERA, TARGETS, Sample, processing, random_model, samples, with_chunk
from benchmarks.gpu.rungs import cuda_engine, percentiles, plan_of, resized
from benchmarks.gpu.session import Row, Session, shrunk

CAMERA_HZ, HEAD_HZ = 30.0, 480.0
ROBOTS = 2


def streams(model: str, session: Session) -> None:
    """Emit a row for each way to run prefixes and heads.

    Raises:
        RuntimeError: The actions of two streams differ from the actions of one graph.
    """
    engine, inputs = _opened(model, session)
    wanted = [engine.run(*each) for each in inputs]
    contexts = [engine.read(arguments[0]) for arguments in inputs]
    found = [engine.solve(context, *rest) for context, (_, *rest) in zip(contexts, inputs, strict=True)]
    equal = all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
    session.emit({"what": "the bits of one graph", "equal": equal})
    if not equal:
        raise RuntimeError("the actions of two CUDA streams differ from the actions of one graph")
    seconds = 0.2 if session.tiny else min(5.0, session.left / 8)
    context, (_, *rest) = contexts[0], inputs[0]
    session.emit({"what": "prefix alone", **timed(lambda: engine.read(inputs[0][0]), seconds)})
    session.emit({"what": "head alone", **timed(lambda: engine.solve(context, *rest), seconds)})
    for head_hz in (HEAD_HZ, None):
        if session.left <= 0:
            raise TimeoutError("the time limit ended before the loops ran at the same time")
        session.emit(stream(engine, inputs, seconds, head_hz))
    for overlap in (False, True):
        if session.left <= 0:
            raise TimeoutError("the time limit ended before two robots sent requests")
        session.emit(robots(engine, inputs, wanted, seconds, overlap))


def _opened(model: str, session: Session) -> tuple[Any, list[tuple[Any, np.ndarray, int]]]:
    """Return engine cuda with random weights, and the arguments of two requests."""
    case = shrunk(TARGETS[model], session.tiny)
    base = with_chunk(random_model(model, session.device, tiny=session.tiny), case.chunk)
    recipe = processing(model, base.config)
    engine = cuda_engine(plan_of(base), recipe, session.device)

    def arguments(sample: Sample) -> tuple[Any, np.ndarray, int]:
        frames = engine.facts.takes_frames
        inputs = sample.inputs if frames else resized(sample.inputs, recipe.image)
        return inputs.batched(), sample.noise[None], sample.steps

    size = (24, 32) if session.tiny else CAMERA
    return engine, [arguments(each) for each in samples(case, base.config, ROBOTS, size)]


def timed(call: Callable[[], Any], seconds: float) -> Row:
    """Return the latency of calls one after the other."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return percentiles(times)


def paced(call: Callable[[], Any], end: float, hz: float | None) -> tuple[list[float], int]:
    """Call until ``end``, ``hz`` times a second or, with None, without a pause.

    Returns:
        The milliseconds of the calls, and the number of calls that ended after the next one was due.
    """
    times, late, due = [], 0, time.perf_counter()
    while (now := time.perf_counter()) < end:
        if hz is not None and now < due:
            time.sleep(due - now)
        start = time.perf_counter()
        call()
        done = time.perf_counter()
        times.append(1e3 * (done - start))
        if hz is not None:
            due += 1 / hz
            late += done > due
            due = max(due, done)  # a late call does not make the next ones early
    return times, late


def stream(
    engine: Any, inputs: list[tuple[Any, np.ndarray, int]], seconds: float, head_hz: float | None
) -> Row:
    """Run prefixes at the camera's rate on one thread, and heads with the newest prefix on another one."""
    newest = engine.read(inputs[0][0])
    reads = 0

    def read() -> None:
        nonlocal newest, reads
        reads += 1
        newest = engine.read(inputs[reads % len(inputs)][0])

    def head() -> None:
        prepared, noise, steps = inputs[0]
        engine.solve(engine.renew(newest, prepared.state), noise, steps)

    begun = time.perf_counter()
    (prefixes, late_prefixes), (heads, late_heads) = at_once(
        lambda: paced(read, begun + seconds, CAMERA_HZ), lambda: paced(head, begun + seconds, head_hz)
    )
    took = time.perf_counter() - begun
    wanted = "as many heads as possible" if head_hz is None else f"heads at {head_hz:g} Hz"
    return {
        "what": f"prefixes at {CAMERA_HZ:g} Hz, {wanted}",
        "prefix_hz": len(prefixes) / took,
        "head_hz": len(heads) / took,
        "late_prefixes": late_prefixes,
        "late_heads": late_heads,
        "prefix": percentiles(prefixes),
        **percentiles(heads),
    }


def robots(
    engine: Any,
    inputs: list[tuple[Any, np.ndarray, int]],
    wanted: list[np.ndarray],
    seconds: float,
    overlap: bool,
) -> Row:
    """Answer two robots that send the next request after each answer.

    Args:
        engine: The engine.
        inputs: The request of each robot.
        wanted: The actions of each robot.
        seconds: Seconds.
        overlap: True computes prefix and head on two CUDA streams, so that those of two robots may overlap. False
            replays one graph for each request, one after the other.
    """
    begun, wrong = time.perf_counter(), []

    def robot(number: int) -> list[float]:
        prepared, noise, steps = inputs[number]

        def ask() -> None:
            if overlap:
                chunk = engine.solve(engine.read(prepared), noise, steps)
            else:
                chunk = engine.run(prepared, noise, steps)
            if not np.array_equal(chunk, wanted[number]):
                wrong.append(number)

        return paced(ask, begun + seconds, None)[0]

    answers = [each for times in at_once(lambda: robot(0), lambda: robot(1)) for each in times]
    took = time.perf_counter() - begun
    return {
        "what": f"{ROBOTS} robots, {'two CUDA streams' if overlap else 'one graph after the other'}",
        "answers_hz": len(answers) / took,
        "differ": len(wrong),
        **percentiles(answers),
    }


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call on a thread of its own. Raise the first error after all have ended."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
