"""Time the engines of a bundle, and make and verify those that may be faster before anything takes them
(``sinew prepare``)."""

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

ROUNDS = 5  # in turn, behind one that warms up
MOST_ROUNDS, LONG_ENOUGH_S = 25, 2.0  # rounds of short chunks, whose times vary more: until so many seconds
SHORTEST_S = 0.05  # shortest measurement; shorter chunks are computed several times
# Times the weights in float32: in memory while they are exported, on the disk while they are quantised
ROOM = 2
RUNTIME_BYTES = 250_000_000  # interpreter and torch, as `sinew perf fit` counts it


class _NotNowError(SinewError):
    """Says what keeps a form from being made at present, which is no finding about the form."""


@dataclass(frozen=True)
class Preparing:
    """The result of preparing a bundle.

    Attributes:
        text: The result in words.
        finding: The measurement of this run; None if nothing was measured.
        kept: The stored finding of an earlier run, if nothing was measured.
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
    """Make and verify what may be faster, time every engine that can run a bundle, and store what was found.

    Args:
        source: The bundle.
        device: Device, as for :func:`sinew.load`.
        dtype: Precision, as for :func:`sinew.load`.
        observations: Number of observations to compare with eager float32.
        memory_gib: Memory that a server has for the policy, in GiB.
        again: Repeat what was found or measured before.
        need: Returns the bytes of a policy's weights and of what it computes (:func:`sinew.memory.memory_need`).
        episodes: Plays a task for observations to compare.
        threads: Number of threads. None measures with one.

    Returns:
        What came of it.

    Raises:
        SinewError: Something keeps an engine from being made or timed now.
    """
    from sinew.engine import prepared
    from sinew.engine.backend import BACKENDS, candidates, choose, unmeasured
    from sinew.policy import open_bundle

    options: dict[str, Any] = {"device": device, "dtype": dtype, "providers": (), "ignore_recipe": False}
    done: Preparing | None = None
    with scratch.ended_by_signals():
        opened = open_bundle(source)
        if again:
            for name in BACKENDS:
                prepared.forget(opened.path, name, threads)
        started = choose(opened, threads=threads, **options)
        size = sum(need(str(opened.path), options, None, 1))
        for candidate in candidates(opened, started):
            choice = choose(opened, threads=threads, prepared=True, **options)
            if candidate.engine == choice.engine:
                continue
            with _alone(opened.path, candidate.engine):
                known = prepared.kept(opened.path, candidate.engine, threads)
                if known is not None and known.against == choice.engine:
                    if not known.taken:
                        text = f"{known.why} (found before; --again tries once more)"
                        done = done or Preparing(text, known)
                        continue
                    verdict = BACKENDS[known.engine].should(opened, candidate.options, prepared=True)
                    if not verdict.against:  # another process made it meanwhile
                        done = Preparing(known.why, known, need=size)
                        continue
                _check_room(opened, candidate, size, memory_gib)
                finding = _prepare(opened, choice, candidate, observations, episodes)
                if not finding.taken:
                    _keep(finding, opened.path)
            if done is None or done.finding is None or finding.taken:
                done = Preparing(finding.why, finding, need=size)
        choice = choose(opened, threads=threads, prepared=True, **options)
        measured_already = done is not None and done.finding is not None and bool(done.finding.seconds)
        if unmeasured(opened, choice, reference=True) or (again and not measured_already):
            with _alone(opened.path, "times"):
                timed = _time(opened, started, choice, size, memory_gib, again)
            if timed is not None and (done is None or timed.taken):
                done = Preparing(timed.why, timed, need=size)
            elif timed is not None and done is not None:  # nothing that was made is faster: say what is
                done = replace(done, text=f"{done.text}; {timed.why}")
    if done is None:
        text = f"engine {choice.engine} is the fastest that can run it: {choice.engine_reason}"
        return Preparing(text, kept=prepared.kept(opened.path, choice.engine, threads))
    return done


def _time(
    bundle: Bundle,
    started: EngineChoice,
    choice: EngineChoice,
    size: int,
    memory_gib: float | None,
    again: bool,
) -> EngineFinding | None:
    """Time every engine that needs nothing to be made, and store it, unless another process has done so meanwhile. None
    where there is one engine alone. started: what runs the bundle without it. size: bytes of the policy that serves."""
    from sinew.engine.backend import choose, ready, requested, unmeasured
    from sinew.engine.measured import stored
    from sinew.engine.prepared import EngineFinding

    others = [each for each in ready(bundle, choice) if each.engine != choice.engine]
    if not others:
        return None
    if again or unmeasured(bundle, choice, reference=True):
        _check_room_for_two(bundle, size, memory_gib)
        _store(bundle, choice, *_measure(bundle, choice, [(each, bundle.path) for each in others]))
    options = choice.options
    best = choose(bundle, None, options.device, requested(choice), threads=options.threads, prepared=True)
    times = stored(_under(bundle, choice))
    words = times.text(best.engine, {*times.chunks})
    return EngineFinding(
        best.engine, started.engine, best.engine != started.engine, f"engine {best.engine} is the fastest: {words}",
        times.chunks, options.device, options.threads or 1,
    )  # fmt: skip


def _prepare(
    bundle: Bundle, choice: EngineChoice, candidate: EngineChoice, observations: int, episodes: Episodes
) -> EngineFinding:
    """Return the finding. If the form is taken, it is at the place where it is looked for, and nowhere else."""
    from sinew.engine.backend import ready
    from sinew.engine.measured import stored
    from sinew.engine.prepared import EngineFinding

    name, against, device = candidate.engine, choice.engine, candidate.options.device
    threads = candidate.options.threads or 1
    refused = partial(EngineFinding, name, against, False, device=device, threads=threads)
    there = f"{bundle.path.parent}: expected to write the form of engine {name} there"
    try:
        # A full disk: the next start tries again
        with _kept_as(there), _form(bundle, candidate) as (form, publish):
            problem, proof = _prove(bundle, form, candidate, observations, episodes)
            if problem:
                return refused(f"engine {name} is not taken: {problem}")
            others = [
                (each, bundle.path) for each in ready(bundle, choice) if each.engine not in (name, against)
            ]
            seconds, note = _measure(bundle, choice, [(candidate, form), *others])
            _store(bundle, choice, seconds, note)
            words = stored(_under(bundle, choice)).text(name, {*seconds})
            if min(took for each, took in seconds.items() if each != name) < MARGIN * seconds[name]:
                why = f"engine {name} is not taken: it is not {MARGIN - 1:.0%} faster ({words}); {proof}"
                return refused(why, seconds)
            finding = EngineFinding(name, against, True, f"{words}; {proof}", seconds, device, threads)
            # First: without its form it counts for nothing, and a form counts by itself
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
    """Yield the file that the engine opens, and a function that publishes it.

    The graphs of an export are in a folder that is removed unless the function is called. Other engines open the
    bundle.
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
    with contextlib.ExitStack() as held:
        with _kept_as(f"{folder}: expected to write the exported graphs beside the bundle"):
            partial = held.enter_context(scratch.beside(folder))
        write_folder(bundle, partial, folder)

        def put() -> None:
            (partial / EXPORTED).unlink()
            shutil.rmtree(folder, ignore_errors=True)  # an interrupted export of another day
            publish(partial, folder)

        yield partial, put


def _prove(
    bundle: Bundle, form: Path, candidate: EngineChoice, observations: int, episodes: Episodes
) -> tuple[str, str]:
    """Return the error of the form, "" if there is none, and its verification in words. Stores the record."""
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
    said = (
        f"{worst['name']} {worst['error']:.1e} of at most {worst['bound']:.0e} from eager fp32"
        f" over {parity['observations']} observations"
    )
    found = kept_record(
        bundle.path, parity, f"sinew prepare {bundle.path}", skipped="not played: sinew validate plays it"
    )
    # An earlier proof whose success gate was played is kept.
    if not parity["passed"] or proofs.lacking(bundle.path, engine, device):
        with _kept_as(f"{proofs.folder()}: expected to keep the proof there"):
            proofs.keep(bundle.path, engine, device, found)
    if parity["passed"]:
        return "", f"proved: {said}"
    unequal = [f"indices of {name}" for name, same in parity["indices"].items() if not same]
    return f"it differs: {', '.join([said, *parity['faults'], *unequal])}", ""


def _measure(
    bundle: Bundle, choice: EngineChoice, others: Sequence[tuple[EngineChoice, Path]]
) -> tuple[dict[str, float], str]:
    """Return the seconds of a chunk by engine, and what makes them less exact, "" if nothing does.

    Each of ``others``, with the file that it opens, is timed in turn with ``choice``, so that two policies are in
    memory at a time. Its time is a ratio to that of ``choice``, because a machine's speed changes between two pairs.
    On a CPU times are the processor's if one thread computes, because a busy machine changes them least.
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

    with _kept_as("expected to keep what was measured"):
        measured.store(_under(bundle, choice), chunks=seconds, unit=_unit(choice), note=note)


def fastest(
    policies: Mapping[str, Policy], clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Return the seconds of a chunk of each, the shortest of :data:`ROUNDS` in turn, or of more if chunks are short."""
    observation = next(iter(policies.values())).dummy_observation()
    repeats: dict[str, int] = {}
    best = dict.fromkeys(policies, math.inf)
    total = 0.0
    for index in range(MOST_ROUNDS + 1):
        for name, policy in policies.items():
            if not index:
                policy.infer(observation)  # the very first allocates
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
    with _kept_as("expected to keep what was found"):
        finding.keep(bundle)


def _open(form: Path, candidate: EngineChoice) -> Policy:
    from sinew.policy import Policy, open_bundle

    options = candidate.options
    return Policy(
        open_bundle(form), options.device, options.dtype, candidate.engine, threads=options.threads or 1
    )


def _check_room(bundle: Bundle, candidate: EngineChoice, need: int, memory_gib: float | None) -> None:
    """Raise :class:`SinewError` where memory or disk are short. need: bytes of the policy that serves."""
    wide = _wide(bundle)
    _check_room_for_two(bundle, need, memory_gib)
    wanted, free = ROOM * wide + RUNTIME_BYTES + need, machine.memory()[1]
    if wanted > free:
        raise SinewError(f"memory: expected {_gib(wanted)} that are free, got {_gib(free)}")
    if candidate.options.kind == "cuda":
        import torch

        there = torch.cuda.mem_get_info(torch.device(candidate.options.device))[0]
        if ROOM * wide > there:
            where = candidate.options.device
            raise SinewError(f"memory of {where}: expected {_gib(ROOM * wide)} free, got {_gib(there)}")
        return
    try:
        left = shutil.disk_usage(bundle.path.parent).free
    except OSError:
        return
    if ROOM * wide > left:
        raise SinewError(
            f"disk: expected {_gib(ROOM * wide)} that are free in {bundle.path.parent}, got {_gib(left)}"
        )


def _check_room_for_two(bundle: Bundle, need: int, memory_gib: float | None) -> None:
    """Raise :class:`SinewError` where two policies do not fit the memory. need: bytes of the one that serves."""
    if memory_gib is not None and 2 * need > memory_gib * 2**30:
        raise SinewError(
            f"memory: expected {_gib(2 * need)}, for both forms stand while they are exchanged, got"
            f" {_gib(memory_gib * 2**30)} (--memory-gib)"
        )
    wanted, free = need + _wide(bundle) + RUNTIME_BYTES, machine.memory()[1]
    if wanted > free:
        raise SinewError(f"memory: expected {_gib(wanted)} that are free, got {_gib(free)}")


def _wide(bundle: Bundle) -> int:
    """Return the bytes of a bundle's weights in float32."""
    return sum(4 * math.prod(info.shape) for info in bundle.infos.values())


@contextlib.contextmanager
def _alone(bundle: Path, engine: str) -> Iterator[None]:
    """Wait until no other process prepares the same."""
    from sinew.engine import prepared

    path, held = prepared.lock_of(bundle, engine), None
    try:
        while True:
            with _kept_as(f"{path.parent}: expected to keep there what is found"):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
            held = scratch.hold(path, wait=False)
            if held is None:
                with progress.task(f"waiting for another process that prepares {bundle.name}"):
                    held = scratch.hold(path)
            if scratch.there(path, held):
                break
            if held is not None:
                os.close(held)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        if held is not None:
            os.close(held)


@contextlib.contextmanager
def _kept_as(words: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _NotNowError(f"{words}, got {error.strerror or error}") from None


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
