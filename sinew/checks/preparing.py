"""The faster form of a bundle: made, proved and measured before anything takes it (``sinew prepare``)."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew.checks.validate.record import compared, kept_record
from sinew.core import SinewError, machine, progress, scratch

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.checks.validate.observations import Episodes
    from sinew.engine.backend import EngineChoice
    from sinew.engine.prepared import EngineFinding
    from sinew.policy import Policy

MARGIN = 1.05  # times as fast, at least: an exchange that gains less is not worth it
ROUNDS = 5  # in turn, behind one that warms up
SHORTEST_S = 0.05  # of a measurement; shorter chunks are computed several times
# Times the weights in float32: in memory while they are exported, on the disk while they are quantised
ROOM = 2
RUNTIME_BYTES = 250_000_000  # interpreter and torch, as `sinew perf fit` counts it


class _NotNowError(SinewError):
    """Says what keeps a form from being made at present, which is no finding about the form."""


@dataclass(frozen=True)
class Preparing:
    """What came of it. finding: None where nothing was looked at, and ``kept`` is what was found before. need: bytes of
    the policy that serves."""

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
) -> Preparing:
    """Make the faster form of a bundle, prove it against eager fp32, measure it, and keep what was found.

    device, dtype: as of :func:`sinew.load`. observations: to compare. memory_gib: that a server has for the policy.
    again: also where something was found before. need: the bytes of a policy's weights and of what it computes
    (:func:`sinew.memory.memory_need`). episodes: plays a task for observations to compare. Raises :class:`SinewError`
    for what keeps it from being made now.
    """
    from sinew.engine import prepared
    from sinew.engine.backend import BACKENDS, candidates, choose
    from sinew.policy import open_bundle

    options: dict[str, Any] = {"device": device, "dtype": dtype, "providers": (), "ignore_recipe": False}
    with scratch.ended_by_signals():
        opened = open_bundle(source)
        choice = choose(opened, **options)
        found = candidates(opened, choice)
        if not found:
            text = f"engine {choice.engine} is the fastest that can run it: {choice.engine_reason}"
            return Preparing(text, kept=prepared.kept(opened.path, choice.engine))
        candidate = found[0]
        with _alone(opened.path, candidate.engine):
            size = sum(need(str(opened.path), options, None, 1))
            known = None if again else prepared.kept(opened.path, candidate.engine)
            if known is not None and known.against == choice.engine:
                if not known.taken:
                    return Preparing(f"{known.why} (found before; --again tries once more)", known)
                verdict = BACKENDS[known.engine].should(opened, candidate.options, prepared=True)
                if not verdict.against:  # another process made it meanwhile
                    return Preparing(known.why, known, need=size)
            _check_room(opened, candidate, size, memory_gib)
            finding = _prepare(opened, choice, candidate, observations, episodes)
            if not finding.taken:
                _keep(finding, opened.path)
    return Preparing(finding.why, finding, need=size)


def _prepare(
    bundle: Bundle, choice: EngineChoice, candidate: EngineChoice, observations: int, episodes: Episodes
) -> EngineFinding:
    """Return what was found. The form is where it will be looked for, if it is taken, and nowhere else."""
    from sinew.engine.prepared import EngineFinding

    name, against, device = candidate.engine, choice.engine, candidate.options.device
    refused = partial(EngineFinding, name, against, False, device=device)
    there = f"{bundle.path.parent}: expected to write the form of engine {name} there"
    try:
        # A full disk: the next start tries again
        with _kept_as(there), _form(bundle, candidate) as (form, publish):
            problem, proof = _prove(bundle, form, candidate, observations, episodes)
            if problem:
                return refused(f"engine {name} is not taken: {problem}")
            note = machine.busy()
            seconds = _measure(bundle, form, choice, candidate)
            times = ", ".join(f"{each} {1e3 * took:.3g}" for each, took in seconds.items())
            unit = "processor ms" if candidate.options.kind == "cpu" else "ms"
            words = f"{unit} of a chunk, measured on this machine: {times}"
            if note:
                words += f" ({note}; `sinew prepare {bundle.path.name} --again` measures again when idle)"
            if seconds[against] < MARGIN * seconds[name]:
                why = f"engine {name} is not taken: it is not {MARGIN - 1:.0%} faster ({words}); {proof}"
                return refused(why, seconds)
            finding = EngineFinding(name, against, True, f"{words}; {proof}", seconds, device)
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
    """Yield what the engine opens, and what publishes it: the graphs of an export lie in a folder that is removed
    unless that is called; other engines open the bundle."""
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
    """Return what is wrong with the form, "" if nothing is, and its proof in words; keeps the record."""
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
        bundle.path, parity, f"sinew prepare {bundle.path}", "not played: sinew validate plays it"
    )
    if not parity["passed"] or proofs.lacking(bundle.path, engine, device):  # one that played the gate stays
        with _kept_as(f"{proofs.folder()}: expected to keep the proof there"):
            proofs.keep(bundle.path, engine, device, found)
    if parity["passed"]:
        return "", f"proved: {said}"
    unequal = [f"indices of {name}" for name, same in parity["indices"].items() if not same]
    return f"it differs: {', '.join([said, *parity['faults'], *unequal])}", ""


def _measure(bundle: Bundle, form: Path, choice: EngineChoice, candidate: EngineChoice) -> dict[str, float]:
    """Return the seconds of a chunk by engine: the shortest of rounds in turn. On a CPU they are the processor's, all
    with one thread, because a busy machine changes them least."""
    from sinew.policy import Policy

    options, engine = choice.options, candidate.engine
    with progress.task(f"measuring engines {choice.engine} and {engine} in turn"):
        policies = {
            choice.engine: Policy(bundle, options.device, options.dtype, choice.engine, threads=1),
            engine: _open(form, candidate),
        }
        try:
            return fastest(policies, time.process_time if options.kind == "cpu" else time.perf_counter)
        finally:
            for policy in policies.values():
                policy.close()


def fastest(
    policies: Mapping[str, Policy], clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Return the seconds of a chunk of each, the shortest of :data:`ROUNDS` in turn."""
    observation = next(iter(policies.values())).dummy_observation()
    repeats: dict[str, int] = {}
    best = dict.fromkeys(policies, math.inf)
    for index in range(ROUNDS + 1):
        for name, policy in policies.items():
            if not index:
                policy.infer(observation)  # the very first allocates
            count, begun = repeats.get(name, 1), clock()
            for _ in range(count):
                policy.infer(observation)
            took = (clock() - begun) / count
            if index:
                best[name] = min(best[name], took)
            else:
                repeats[name] = max(1, math.ceil(SHORTEST_S / max(took, 1e-6)))
    return best


def _keep(finding: EngineFinding, bundle: Path) -> None:
    with _kept_as("expected to keep what was found"):
        finding.keep(bundle)


def _open(form: Path, candidate: EngineChoice) -> Policy:
    from sinew.policy import Policy, open_bundle

    options = candidate.options
    dtype = None if options.graphs or options.kind == "cpu" else options.dtype
    return Policy(open_bundle(form), options.device, dtype, candidate.engine, threads=1)


def _check_room(bundle: Bundle, candidate: EngineChoice, need: int, memory_gib: float | None) -> None:
    """Raise :class:`SinewError` where memory or disk are short. need: bytes of the policy that serves."""
    wide = sum(4 * math.prod(info.shape) for info in bundle.infos.values())
    if memory_gib is not None and 2 * need > memory_gib * 2**30:
        raise SinewError(
            f"memory: expected {_gib(2 * need)}, for both forms stand while they are exchanged, got"
            f" {_gib(memory_gib * 2**30)} (--memory-gib)"
        )
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
