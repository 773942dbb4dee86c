"""Make engines that may be faster for a bundle, verify them, and time all engines of the bundle (``sinew prepare``)."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew.checks.validate.record import compared, kept_record
from sinew.core import SinewError, machine, progress, scratch
from sinew.engine.measured import MARGIN

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.checks.validate.observations import Episodes
    from sinew.engine.backend import EngineChoice
    from sinew.engine.measured import Conditions
    from sinew.engine.prepared import EngineFinding
    from sinew.policy import Policy

ROUNDS = 5  # each engine is timed at least this many times, in turn, after a warm-up round
# Short chunks vary more, so they are timed in up to 25 rounds, until 2 seconds have passed.
MOST_ROUNDS, LONG_ENOUGH_S = 25, 2.0
SHORTEST_S = 0.05  # a chunk that takes less time is computed several times per measurement
# An export needs this multiple of the size of the float32 weights in memory. Quantising needs the same multiple on the
# disk.
ROOM = 2
RUNTIME_BYTES = 250_000_000  # memory of Python and torch, as `sinew perf fit` counts it


class _NotNowError(SinewError):
    """A prepared engine cannot be made now, for example because the disk is full. It may succeed later."""


@dataclass(frozen=True)
class Preparing:
    """The result of ``sinew prepare`` for a bundle.

    Attributes:
        text: The result as a sentence, with the times of all engines that were compared.
        finding: The result for one engine, with ``text`` as its reason. None if this run had nothing to measure.
        kept: The stored result of an earlier run, if this run had nothing to measure.
        need: Bytes of the policy that will serve.
    """

    text: str
    finding: EngineFinding | None = None
    kept: EngineFinding | None = None
    need: int = 0


def prepare(
    source: Path,
    device: str,
    dtype: str | None,
    observations: int,
    memory_gib: float | None,
    again: bool,
    need: Callable[[str, dict[str, Any], int | None, int], tuple[int, int]],
    episodes: Episodes,
    threads: int | None = None,
) -> Preparing:
    """Make and verify engines that may be faster, time every engine that can run a bundle, and store the result.

    Args:
        source: The bundle.
        device: Device, as for :func:`sinew.load`.
        dtype: Precision, as for :func:`sinew.load`.
        observations: Number of observations to compare with eager float32.
        memory_gib: Memory that a server has for the policy, in GiB.
        again: Repeat earlier measurements.
        need: Returns the bytes of a policy's weights and of its activations (:func:`sinew.memory.memory_need`).
        episodes: Plays a task to get observations for the comparison.
        threads: Number of threads. None measures with one.

    Returns:
        The result.

    Raises:
        SinewError: An engine cannot be made or timed now, for example because memory or disk space is missing.
    """
    from sinew.engine import measured, prepared
    from sinew.engine.backend import BACKENDS, candidates, choose, unmeasured
    from sinew.policy import open_bundle

    options: dict[str, Any] = {"device": device, "dtype": dtype, "providers": (), "ignore_recipe": False}
    done: EngineFinding | None = None  # the engine that was taken last, else the first result
    refusals: list[str] = []
    with scratch.ended_by_signals():
        opened = open_bundle(source)
        if again:
            for name in BACKENDS:
                prepared.forget(opened.path, name, threads)
        started = choose(opened, threads=threads, **options)
        if again:
            # If the file cannot be written, storing the new times fails below and names the reason.
            with contextlib.suppress(OSError):
                measured.store(_under(opened, started), chunks={})
        size = sum(need(str(opened.path), options, None, 1))
        for candidate in candidates(opened, started):
            choice = choose(opened, threads=threads, prepared=True, **options)
            if candidate.engine == choice.engine:
                continue
            with _alone(opened.path, candidate.engine):
                earlier = prepared.kept(opened.path, candidate.engine, threads)
                if earlier is not None and earlier.against == choice.engine:
                    if not earlier.taken:
                        refusals.append(
                            f"{earlier.why} (result of an earlier run; pass --again to repeat it)"
                        )
                        done = done or earlier
                        continue
                    verdict = BACKENDS[earlier.engine].should(opened, candidate.options, prepared=True)
                    # Another process made this engine while this process waited for the lock.
                    if not verdict.against:
                        done = earlier
                        continue
                _check_room(opened, candidate, size, memory_gib)
                finding = _prepare(opened, choice, candidate, observations, episodes)
                if not finding.taken:
                    _keep(finding, opened.path)
                    refusals.append(finding.why)
            if done is None or finding.taken:
                done = finding
        choice = choose(opened, threads=threads, prepared=True, **options)
        if unmeasured(opened, choice, reference=True):
            with _alone(opened.path, "times"):
                timed = _time(opened, started, choice, size, memory_gib)
            if timed is not None and (done is None or timed.taken):
                done = timed
            choice = choose(opened, threads=threads, prepared=True, **options)
    if done is None:
        text = f"engine {choice.engine} is the fastest that can run it: {choice.engine_reason}"
        kept = prepared.kept(opened.path, choice.engine, threads)
        return Preparing(text, kept=None if kept is None else replace(kept, why=text))
    # A later comparison may have changed the times or the choice since this result.
    taken = done.taken and done.engine == choice.engine
    if taken:
        parts = [choice.times, done.why, *refusals]
    else:
        parts = [*refusals, ": ".join(filter(None, (f"--engine auto keeps {choice.engine}", choice.times)))]
    text = "; ".join(filter(None, parts))
    seconds = measured.stored(_under(opened, choice)).chunks if done.seconds else {}
    finding = replace(done, taken=taken, why=text, seconds=seconds)
    return Preparing(text, finding, need=size)


def _time(
    bundle: Bundle,
    started: EngineChoice,
    choice: EngineChoice,
    size: int,
    memory_gib: float | None,
) -> EngineFinding | None:
    """Time every engine that needs no preparation, and store the times, unless another process has already done so.

    Args:
        bundle: The bundle.
        started: The engine that runs the bundle without any measurement.
        choice: The engine that runs the bundle now.
        size: Bytes of the policy that will serve.
        memory_gib: Memory that a server has for the policy, in GiB.

    Returns:
        The fastest engine, without a reason; None if only one engine can run the bundle.
    """
    from sinew.engine.backend import choose, ready, requested, unmeasured
    from sinew.engine.measured import stored
    from sinew.engine.prepared import EngineFinding

    others = [each for each in ready(bundle, choice) if each.engine != choice.engine]
    if not others:
        return None
    if unmeasured(bundle, choice, reference=True):
        _check_room_for_two(bundle, size, memory_gib)
        _store(bundle, choice, *_measure(bundle, choice, [(each, bundle.path) for each in others]))
    options = choice.options
    best = choose(bundle, None, options.device, requested(choice), threads=options.threads, prepared=True)
    seconds = stored(_under(bundle, choice)).chunks
    taken, threads = best.engine != started.engine, options.threads or 1
    return EngineFinding(best.engine, started.engine, taken, "", seconds, options.device, threads)


def _prepare(
    bundle: Bundle, choice: EngineChoice, candidate: EngineChoice, observations: int, episodes: Episodes
) -> EngineFinding:
    """Make, verify and time one engine. If it is faster, publish its files where the engine looks for them.

    Args:
        bundle: The bundle.
        choice: The engine that runs the bundle now.
        candidate: The engine to make.
        observations: Number of observations to compare with eager float32.
        episodes: Plays a task to get observations for the comparison.

    Returns:
        The result.
    """
    from sinew.engine.backend import ready
    from sinew.engine.prepared import EngineFinding

    name, against, device = candidate.engine, choice.engine, candidate.options.device
    threads = candidate.options.threads or 1
    refused = partial(EngineFinding, name, against, False, device=device, threads=threads)
    there = f"{bundle.path.parent}: expected to write the form of engine {name} there"
    try:
        # If the disk is full, nothing is stored, so that the next start tries again.
        with _kept_as(there), _form(bundle, candidate) as (form, publish):
            problem, proof = _prove(bundle, form, candidate, observations, episodes)
            if problem:
                return refused(f"engine {name} is not taken: {problem}")
            others = [
                (each, bundle.path) for each in ready(bundle, choice) if each.engine not in (name, against)
            ]
            seconds, note = _measure(bundle, choice, [(candidate, form), *others])
            _store(bundle, choice, seconds, note)
            if min(took for each, took in seconds.items() if each != name) < MARGIN * seconds[name]:
                why = f"engine {name} is not taken: it is not {MARGIN - 1:.0%} faster; {proof}"
                return refused(why, seconds)
            finding = EngineFinding(name, against, True, proof, seconds, device, threads)
            # Store the result before its files. A result without files has no effect, and files alone would be used.
            _keep(finding, bundle.path)
            publish()
            return finding
    except _NotNowError:
        raise
    except Exception as error:  # noqa: BLE001, whatever it is, it would come again, after minutes
        words = str(error) if isinstance(error, SinewError) else f"{type(error).__name__}: {error}"
        return refused(f"engine {name} is not taken: {words[:500]}")


@contextlib.contextmanager
def _form(bundle: Bundle, candidate: EngineChoice) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the file that an engine opens, and a function that moves this file to the place where the engine looks
    for it.

    The graphs of an export are written to a temporary folder. The folder is removed at the end of the ``with`` block,
    unless the function was called. Other engines open the bundle itself.
    """
    from sinew.bundle import EXPORTED
    from sinew.engine.backend import BACKENDS
    from sinew.engine.onnx.borrowed import shipped
    from sinew.engine.onnx.cache import graphs_folder, publish
    from sinew.engine.onnx.opening import write_folder

    if not BACKENDS[candidate.engine].runs_graphs or shipped(bundle.path) is not None:
        yield bundle.path, lambda: None
        return
    folder = graphs_folder(bundle)
    with contextlib.ExitStack() as stack:
        with _kept_as(f"{folder}: expected to write the exported graphs next to the bundle"):
            partial = stack.enter_context(scratch.beside(folder))
        write_folder(bundle, partial, folder)

        def put() -> None:
            (partial / EXPORTED).unlink()
            shutil.rmtree(folder, ignore_errors=True)  # the remains of an earlier export that was interrupted
            publish(partial, folder)

        yield partial, put


def _prove(
    bundle: Bundle, form: Path, candidate: EngineChoice, observations: int, episodes: Episodes
) -> tuple[str, str]:
    """Compare an engine with the reference (eager float32) to verify it, and store the record of the comparison.

    Args:
        bundle: The bundle.
        form: The file that the engine opens.
        candidate: The engine.
        observations: Number of observations.
        episodes: Plays a task to get observations.

    Returns:
        A sentence about the difference, "" if the engine passes; and a sentence about the comparison.
    """
    from sinew.engine import proofs
    from sinew.policy import Policy

    policy, engine = _open(form, candidate), candidate.engine
    reference = Policy(bundle, "cpu", "fp32", "eager", threads=1, ignore_recipe=True)
    try:
        parity = compared(policy, reference, observations, episodes)
        device = str(policy.device)
    finally:
        policy.close()
        reference.close()
    worst = max(parity["stages"], key=lambda stage: stage["error"] / stage["bound"])
    summary = (
        f"{worst['name']} {worst['error']:.1e} of at most {worst['bound']:.0e} from eager fp32"
        f" over {parity['observations']} observations"
    )
    record = kept_record(
        bundle.path, parity, f"sinew prepare {bundle.path}", skipped="not played: sinew validate plays it"
    )
    # A stored record with a played success gate is better, so it stays.
    if not parity["passed"] or proofs.lacking(bundle.path, engine, device):
        with _kept_as(f"{proofs.folder()}: expected to store the proof there"):
            proofs.keep(bundle.path, engine, device, record)
    if parity["passed"]:
        return "", f"proved: {summary}"
    unequal = [f"indices of {name}" for name, same in parity["indices"].items() if not same]
    return f"it differs: {', '.join([summary, *parity['faults'], *unequal])}", ""


def _measure(
    bundle: Bundle, choice: EngineChoice, others: Sequence[tuple[EngineChoice, Path]]
) -> tuple[dict[str, float], str]:
    """Measure the seconds that each engine needs for a chunk.

    Each engine is timed in turn with ``choice``, so that only two policies are in memory at once. Its time is computed
    from the ratio to ``choice``, because a machine's speed may change between two pairs. If one thread computes on a
    CPU, processor time is measured, because other programs affect it least.

    Args:
        bundle: The bundle.
        choice: The engine that runs the bundle now.
        others: The other engines, each with the file that it opens.

    Returns:
        Engine -> seconds of a chunk; and a sentence if a busy machine makes the times less exact, else "".
    """
    if note := machine.busy():
        note += f"; `sinew prepare {bundle.path.name} --again` measures again when idle"
    clock = time.process_time if _unit(choice) == "processor ms" else time.perf_counter
    pairs: dict[str, tuple[float, float]] = {}
    for other, form in others:
        with (
            progress.task(f"measuring engines {choice.engine} and {other.engine} in turn"),
            contextlib.ExitStack() as opened,
        ):
            policies = {}
            for name, file, each in ((choice.engine, bundle.path, choice), (other.engine, form, other)):
                policies[name] = policy = _open(file, each)
                opened.callback(policy.close)
            seconds = fastest(policies, clock)
            pairs[other.engine] = seconds[choice.engine], seconds[other.engine]
    own = min((seconds for seconds, _ in pairs.values()), default=0.0)
    return {choice.engine: own} | {name: own * took / beside for name, (beside, took) in pairs.items()}, note


def _unit(choice: EngineChoice) -> str:
    return "processor ms" if choice.options.kind == "cpu" and (choice.options.threads or 1) == 1 else "ms"


def _under(bundle: Bundle, choice: EngineChoice) -> Conditions:
    from sinew.engine.backend import measured_under

    return measured_under(bundle, choice)


def _store(bundle: Bundle, choice: EngineChoice, seconds: Mapping[str, float], note: str) -> None:
    from sinew.engine import measured

    with _kept_as("expected to store the measured times"):
        measured.add(_under(bundle, choice), choice.engine, seconds, unit=_unit(choice), note=note)


def fastest(
    policies: Mapping[str, Policy], clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Measure the seconds that each policy needs for a chunk. The policies are timed in turn, in :data:`ROUNDS` rounds,
    or in more rounds if chunks are short. The shortest time of a policy counts.

    Args:
        policies: Name -> policy.
        clock: Returns the time in seconds.
    """
    observation = next(iter(policies.values())).dummy_observation()
    repeats: dict[str, int] = {}
    best = dict.fromkeys(policies, math.inf)
    total = 0.0
    for index in range(MOST_ROUNDS + 1):
        for name, policy in policies.items():
            if not index:
                policy.infer(observation)  # the first inference also allocates memory, so it is not timed
            count, begun = repeats.get(name, 1), clock()
            for _ in range(count):
                policy.infer(observation)
            took = (clock() - begun) / count
            if index:
                best[name] = min(best[name], took)
                total += took * count
            else:
                repeats[name] = max(1, math.ceil(SHORTEST_S / max(took, 1e-6)))
        if index >= ROUNDS and total > LONG_ENOUGH_S:
            break
    return best


def _keep(finding: EngineFinding, bundle: Path) -> None:
    with _kept_as("expected to store the result"):
        finding.keep(bundle)


def _open(form: Path, candidate: EngineChoice) -> Policy:
    from sinew.policy import Policy, open_bundle

    options = candidate.options
    return Policy(
        open_bundle(form), options.device, options.dtype, candidate.engine, threads=options.threads or 1
    )


def _check_room(bundle: Bundle, candidate: EngineChoice, need: int, memory_gib: float | None) -> None:
    """Raise :class:`SinewError` if memory or disk space is missing to make an engine.

    Args:
        bundle: The bundle.
        candidate: The engine to make.
        need: Bytes of the policy that will serve.
        memory_gib: Memory that a server has for the policy, in GiB.
    """
    wide = _wide(bundle)
    _check_room_for_two(bundle, need, memory_gib)
    required, free = ROOM * wide + RUNTIME_BYTES + need, machine.memory()[1]
    if required > free:
        raise SinewError(
            f"memory: expected {_gib(required)} of free memory, got {_gib(free)}; close programs and run it again"
        )
    if candidate.options.kind == "cuda":
        import torch

        there = torch.cuda.mem_get_info(torch.device(candidate.options.device))[0]
        if ROOM * wide > there:
            where = candidate.options.device
            raise SinewError(
                f"memory of {where}: expected {_gib(ROOM * wide)} free, got {_gib(there)}; end other programs"
                f" on {where}"
            )
        return
    try:
        unused = shutil.disk_usage(bundle.path.parent).free
    except OSError:
        return
    if ROOM * wide > unused:
        raise SinewError(
            f"disk: expected {_gib(ROOM * wide)} free in {bundle.path.parent}, got {_gib(unused)}; free some space"
        )


def _check_room_for_two(bundle: Bundle, need: int, memory_gib: float | None) -> None:
    """Raise :class:`SinewError` if two policies do not fit into memory.

    Args:
        bundle: The bundle.
        need: Bytes of the policy that will serve.
        memory_gib: Memory that a server has for the policy, in GiB.
    """
    if memory_gib is not None and 2 * need > memory_gib * 2**30:
        raise SinewError(
            f"memory: expected {_gib(2 * need)}, because the old and the new policy are both loaded during a hot-swap,"
            f" got {_gib(memory_gib * 2**30)}; increase --memory-gib"
        )
    required, free = need + _wide(bundle) + RUNTIME_BYTES, machine.memory()[1]
    if required > free:
        raise SinewError(
            f"memory: expected {_gib(required)} of free memory, got {_gib(free)}; close programs and run it again"
        )


def _wide(bundle: Bundle) -> int:
    """Return the size in bytes that a bundle's weights would have in float32."""
    return sum(4 * math.prod(info.shape) for info in bundle.infos.values())


@contextlib.contextmanager
def _alone(bundle: Path, engine: str) -> Iterator[None]:
    """Inside the ``with`` block, hold a lock, so that only one process at a time prepares this engine of the bundle."""
    from sinew.engine import prepared

    path, lock = prepared.lock_of(bundle, engine), None
    try:
        while True:
            with _kept_as(f"{path.parent}: expected to store the result there"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            lock = scratch.hold(path, wait=False)
            if lock is None:
                with progress.task(f"waiting for another process that prepares {bundle.name}"):
                    lock = scratch.hold(path)
            if scratch.there(path, lock):
                break
            if lock is not None:
                os.close(lock)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def _kept_as(words: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _NotNowError(
            f"{words}, got {error.strerror or error}; correct this and run the command again"
        ) from None


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
