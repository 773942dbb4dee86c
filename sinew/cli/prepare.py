"""``sinew prepare``: the faster form of a bundle is made, proved and measured before anything takes it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from sinew import __version__, machine, progress, scratch
from sinew.cli import terminal
from sinew.cli.options import Flag
from sinew.cli.serve_policy import CHOSEN, RUNTIME_BYTES, memory_need
from sinew.core import SinewError

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.engine.choose import EngineChoice
    from sinew.engine.prepared import EngineFinding
    from sinew.policy import Policy

SCHEMA = "sinew.prepare/1"
MARGIN = 1.05  # times as fast, at least: an exchange that gains less is not worth it
LAST = 19  # of priorities
ROUNDS = 5  # in turn, behind one that warms up
SHORTEST_S = 0.05  # of a measurement; shorter chunks are computed several times
ROOM = (
    2  # times the weights in float32: in memory while they are exported, on the disk while they are quantised
)
Count = Annotated[int, Parameter(validator=validators.Number(gte=1))]


class _NotNowError(SinewError):
    """Says what keeps a form from being made at present, which is no finding about the form."""


def prepare(
    bundle: Path,
    /,
    *,
    device: str = "auto",
    dtype: str | None = None,
    observations: Count = 4,
    memory_gib: Annotated[float | None, Parameter(validator=validators.Number(gt=0))] = None,
    again: Flag = False,
    background: Flag = False,
) -> int:
    """Make the faster form of a bundle, prove it against eager fp32, measure it; `--engine auto` takes it if it wins.

    `sinew serve` does this by itself, beside its clients, unless it is told `--no-prepare`. Times are processor seconds
    of a chunk with one thread, or of the clock on a GPU, in turn with the engine that runs the bundle now. What was
    found is kept until versions of Sinew or its libraries, or the hardware, change (docs/engines.md).

    Args:
        bundle: a bundle with weights, a checkpoint or training run, or a name of the hub.
        device: as of `sinew serve`.
        dtype: as of `sinew serve`.
        observations: to compare.
        memory_gib: that a server has for the policy; one that does not fit twice, while they are exchanged, is not
            prepared.
        again: also where something was found before.
        background: at the lowest priority, to the end of standard input at most; progress as JSON.
    """
    from sinew.engine import prepared
    from sinew.engine.backend import BACKENDS
    from sinew.engine.choose import candidates, choose
    from sinew.policy import open_bundle
    from sinew.sources import resolve

    with scratch.ended_by_signals():
        if background:
            _step_back()
        source = resolve(bundle)
        opened = open_bundle(source)
        options: dict[str, Any] = dict.fromkeys(CHOSEN) | {"device": device, "dtype": dtype}
        options |= {"providers": (), "ignore_recipe": False}
        choice = choose(opened, **options)
        found = candidates(opened, choice)
        if not found:
            kept = prepared.kept(opened.path, choice.engine)
            return _tell(
                None, f"engine {choice.engine} is the fastest that can run it: {choice.engine_reason}", kept
            )
        candidate = found[0]
        with _alone(opened.path, candidate.engine):
            need = memory_need(str(source), options, None, 1).total
            known = None if again else prepared.kept(opened.path, candidate.engine)
            if known is not None and known.against == choice.engine:
                if not known.taken:
                    return _tell(known, f"{known.why} (found before; --again tries once more)")
                if not BACKENDS[known.engine].slow_start(opened, True):  # another process made it meanwhile
                    return _tell(known, known.why, need=need)
            _check_room(opened, candidate, need, memory_gib)
            finding = _prepare(opened, choice, candidate, observations)
            if not finding.taken:
                _keep(finding, opened.path)
    return _tell(finding, finding.why, need=need)


def _prepare(
    bundle: Bundle, choice: EngineChoice, candidate: EngineChoice, observations: int
) -> EngineFinding:
    """Return what was found. The form is where it will be looked for, if it is taken, and nowhere else."""
    from sinew.engine.prepared import EngineFinding

    name, against, device = candidate.engine, choice.engine, candidate.options.device
    try:
        with _form(bundle, candidate) as (form, publish):
            problem, proof = _prove(bundle, form, candidate, observations)
            if problem:
                return EngineFinding(
                    name, against, False, f"engine {name} is not taken: {problem}", device=device
                )
            seconds = _measure(bundle, form, choice, candidate)
            times = ", ".join(f"{each} {1e3 * took:.3g}" for each, took in seconds.items())
            unit = "processor ms" if candidate.options.kind == "cpu" else "ms"
            words = f"{unit} of a chunk, measured on this machine: {times}"
            if seconds[against] < MARGIN * seconds[name]:
                why = f"engine {name} is not taken: it is not {MARGIN - 1:.0%} faster ({words}); {proof}"
                return EngineFinding(name, against, False, why, seconds, device)
            finding = EngineFinding(name, against, True, f"{words}; {proof}", seconds, device)
            _keep(
                finding, bundle.path
            )  # first: without its form it counts for nothing, and a form counts by itself
            publish()
            return finding
    except _NotNowError:
        raise
    except OSError as error:  # a full disk: the next start tries again
        words = f"{bundle.path.parent}: expected to write the form of engine {name} there"
        raise _NotNowError(f"{words}, got {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001, whatever it is, it would come again, after minutes
        words = str(error) if isinstance(error, SinewError) else f"{type(error).__name__}: {error}"
        return EngineFinding(
            name, against, False, f"engine {name} is not taken: {words[:500]}", device=device
        )


@contextlib.contextmanager
def _form(bundle: Bundle, candidate: EngineChoice) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield what the engine opens, and what publishes it: the graphs of an export lie in a folder that is removed
    unless that is called; other engines open the bundle."""
    from sinew.cli.export import write_folder
    from sinew.engine.backend import BACKENDS
    from sinew.engine.onnx.borrowed import shipped
    from sinew.engine.onnx.cache import cache_folder, publish
    from sinew.engine.onnx.opening import usable_bits, variant
    from sinew.sources import EXPORTED

    if not BACKENDS[candidate.engine].runs_graphs or shipped(bundle.path) is not None:
        yield bundle.path, lambda: None
        return
    folder = cache_folder(bundle.path, variant(usable_bits(bundle)))
    with contextlib.ExitStack() as held:
        with _kept_as(f"{folder}: expected to write the exported graphs beside the bundle"):
            partial = held.enter_context(scratch.beside(folder))
        write_folder(bundle, partial, folder)

        def put() -> None:
            (partial / EXPORTED).unlink()
            shutil.rmtree(folder, ignore_errors=True)  # an interrupted export of another day
            publish(partial, folder)

        yield partial, put


def _prove(bundle: Bundle, form: Path, candidate: EngineChoice, observations: int) -> tuple[str, str]:
    """Return what is wrong with the form, "" if nothing is, and its proof in words; keeps the record."""
    from sinew.cli.validate import compared
    from sinew.engine import proofs
    from sinew.engine.fingerprint import fingerprint
    from sinew.policy import Policy

    policy, engine = _open(form, candidate), candidate.engine
    reference = Policy(bundle, "cpu", "fp32", "eager", threads=1, ignore_recipe=True)
    try:
        parity = compared(policy, reference, observations)
        device = str(policy.device)
    finally:
        policy.close()
        reference.close()
    worst = max(parity["stages"], key=lambda stage: stage["error"] / stage["bound"])
    said = (
        f"{worst['name']} {worst['error']:.1e} of at most {worst['bound']:.0e} from eager fp32"
        f" over {parity['observations']} observations"
    )
    found = {
        "schema": "sinew.validate/1",
        "bundle": str(bundle.path),
        "fingerprint": fingerprint(bundle.path),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017 - Python 3.10
        "sinew": __version__,
        "hardware": f"{machine.cpu_model()}, {platform.system()}",
        "command": f"sinew prepare {bundle.path}",
        "parity": parity,
        "gate": {"passed": True, "skipped": "not played: sinew validate plays it"},
        "passed": parity["passed"],
    }
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


def _step_back() -> None:
    """Let every other process go first, be the first that the system ends where memory is short, and end with whoever
    holds the other end of standard input."""
    os.nice(LAST)
    # Linux alone has these. In a session of its own a process is weighed as the session is, whatever its own priority.
    for name, value in (("autogroup", LAST), ("oom_score_adj", 1000)):
        with contextlib.suppress(OSError):
            Path("/proc/self", name).write_text(str(value))
    logging.getLogger().addHandler(logging.NullHandler())
    progress.listen(_report)

    def follow() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=follow, daemon=True, name="sinew-parent").start()


@contextlib.contextmanager
def _report(text: str, _total: int | None) -> Iterator[Callable[[str], None]]:
    print(json.dumps({"progress": text}), flush=True)
    yield lambda _: None


def _tell(finding: EngineFinding | None, text: str, kept: EngineFinding | None = None, need: int = 0) -> int:
    from dataclasses import asdict

    terminal.console(markup=False).print(text, soft_wrap=True)
    shown = finding or kept
    record = {} if shown is None else {**asdict(shown), "seconds": dict(shown.seconds)}
    terminal.emit({"schema": SCHEMA, "text": text, "prepared": finding is not None, "need": need, **record})
    sys.stdout.flush()
    return 0


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
