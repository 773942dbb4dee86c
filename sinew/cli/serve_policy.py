"""Open what ``sinew serve`` runs: a policy or a recording, found before ports are taken, loaded after."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sinew import machine
from sinew.cli.options import RUNS, Cameras, Runs
from sinew.core import SinewError
from sinew.engine.backend import AUTO
from sinew.serve.supervise import Supervisor
from sinew.sources import resolve

if TYPE_CHECKING:
    from sinew.policy import Policy
    from sinew.serve.deploy import ServingLimits
    from sinew.serve.device_lock import DeviceLock
    from sinew.serve.policies import Deployment
    from sinew.serve.prepare import Preparation
    from sinew.serve.replay import Replay
    from sinew.serve.scheduler import Scheduler
    from sinew.serve.service import Service
    from sinew.serve.swap import Need, Swapper

logger = logging.getLogger(__name__)

# what decides how a bundle is run
CHOSEN = ("engine", "device", "dtype", "providers", "ignore_recipe", "prepared")
# Makes what loads, exchanges and unloads policies.
Change = Callable[["Service", Supervisor, "DeviceLock", "WeakSet[Scheduler]"], "Swapper"]
RUNTIME_BYTES = 250_000_000  # interpreter and torch, as sinew.perf.memory has it


def loader(
    bundle: Path | None,
    options: dict[str, Any],
    threads: int | None,
    adapters: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[], Policy]:
    """Find mistakes in flags and file before ports are taken and torch is imported; what is returned loads the policy.
    ``options``: of ``sinew.load``. adapters: name -> file."""
    from sinew.bundle.rename import rename_cameras
    from sinew.engine.choose import choose
    from sinew.policy import open_adapters, open_bundle

    if bundle is None:
        raise SinewError("expected a bundle, or --replay RECORDS")
    found = resolve(bundle)
    opened = open_bundle(found)
    rename_cameras(opened.manifest.spec, options["rename"])
    beside = open_adapters(opened, adapters)
    choose(opened, threads=threads, adapters=beside, **chosen(options))

    def load() -> Policy:
        import sinew

        logger.info("loading %s", found)
        return sinew.load(found, threads=threads, adapters=adapters, **options)

    return load


def chosen(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``sinew.load``'s options that :func:`sinew.engine.choose.choose` takes."""
    return {name: options[name] for name in CHOSEN if name in options}


def preparation(
    bundle: Path, options: dict[str, Any], threads: int | None, budget: int | None
) -> Preparation | None:
    """Return what ``sinew prepare`` could make faster of a policy that runs here; None for nothing, which the log says
    where it was found before. budget: bytes that it and its successor may take together."""
    from sinew.engine import prepared
    from sinew.engine.choose import candidates, choose
    from sinew.engine.onnx.borrowed import shipped
    from sinew.engine.onnx.cache import sweep
    from sinew.policy import open_bundle
    from sinew.serve.prepare import Preparation

    found = resolve(bundle)
    if found.is_dir() or options["engine"] not in (None, AUTO):
        return None
    opened = open_bundle(found)
    choice = choose(opened, threads=threads, **chosen(options))
    for candidate in candidates(opened, choice):
        kept = prepared.kept(opened.path, candidate.engine)
        if kept is not None and not kept.taken and kept.against == choice.engine:
            logger.info("%s (found before; `sinew prepare %s --again` tries once more)", kept.why, bundle)
            continue
        if shipped(opened.path) is None and not os.access(opened.path.parent, os.W_OK):
            words = "engine %s may be faster than %s, and is not prepared: %s cannot be written"
            logger.info(words, candidate.engine, choice.engine, opened.path.parent)
            continue
        # As this process was started: what lies in the current folder is imported by `python -m sinew` alone.
        alike = [] if sys.path[:1] and sys.path[0] in ("", str(Path.cwd())) else ["-P"]
        command = [sys.executable, *alike, "-m", "sinew", "prepare", str(found), "--background"]
        command += ["--device", choice.options.device]
        if options["dtype"] is not None:
            command += ["--dtype", str(options["dtype"])]
        if budget is not None:
            command += ["--memory-gib", f"{max(budget, 1) / 2**30:.6f}"]
        return Preparation(
            str(bundle), candidate.engine, choice.engine, command, opened.path, lambda: sweep(opened.path)
        )
    return None


def replayer(
    records: Path, bundle: Path | None, cameras: Cameras, runs: Runs, latency: bool
) -> Callable[[], Replay]:
    """Read the recording; imports no torch."""
    from sinew.bundle.rename import rename_cameras
    from sinew.policy import open_bundle
    from sinew.serve.replay import Replay

    if runs != RUNS:
        raise SinewError(
            "--replay: engine, provider, device and dtype compute, and a replay computes nothing"
        )
    if bundle is None and cameras.rename:
        raise SinewError("--rename: expected the bundle beside --replay, which knows its cameras")
    manifest = None
    if bundle is not None:
        manifest = open_bundle(bundle).manifest
        manifest = replaced(manifest, spec=rename_cameras(manifest.spec, cameras.keywords()["rename"]))
    made = Replay(records, manifest, latency=latency, **cameras.allowed)
    return lambda: made


def changer(
    bundle: Path,
    options: dict[str, Any],
    threads: int | None,
    bounds: ServingLimits,
    memory_gib: float | None,
) -> Change:
    """Return what lets a server load, exchange and unload policies, run with the same flags."""

    def make(
        service: Service, supervisor: Supervisor, device_lock: DeviceLock, begun: WeakSet[Scheduler]
    ) -> Swapper:
        from sinew.serve.batching import LARGEST
        from sinew.serve.deploy import deploy
        from sinew.serve.swap import Swapper

        def open_source(source: str) -> Deployment:
            return deploy(loader(Path(source), options, threads)(), bounds, supervisor, device_lock, begun)

        batch = LARGEST if bounds.max_batch == "auto" else bounds.max_batch
        budget, why = memory_budget(memory_gib, options)
        return Swapper(
            service,
            open_source,
            lambda source: memory_need(source, options, threads, batch),
            str(bundle),
            budget,
            why,
        )

    return make


def memory_budget(gib: float | None, options: dict[str, Any]) -> tuple[int | None, str]:
    """Return the bytes that policies may take together and where the number comes from; None: no limit is known.

    Without ``gib`` it is what the machine or the cgroup has, less the runtime's own; a GPU's is left to its allocator.
    """
    if gib is not None:
        return int(gib * 2**30), f"--memory-gib {gib:g}"
    if str(options["device"]).startswith("cuda") or (options["device"] == "auto" and machine.may_have_cuda()):
        return None, "a GPU"
    return machine.memory()[0] - RUNTIME_BYTES, "this machine's memory"


def memory_need(source: str, options: dict[str, Any], threads: int | None, batch: int) -> Need:
    """Return what a policy takes with the engine that will run it (:mod:`sinew.perf.memory`), in batches of ``batch``.

    Without torch, which that model traces with, it is the size of the files. Loads no weights.
    """
    from sinew.engine.choose import choose
    from sinew.policy import open_bundle
    from sinew.serve.swap import Need

    found = resolve(source)
    choice = choose(open_bundle(found), threads=threads, **chosen(options))
    try:
        from sinew.perf.memory import fits
    except ModuleNotFoundError:
        files = found.rglob("*") if found.is_dir() else [found]
        return Need(sum(file.stat().st_size for file in files if file.is_file()))
    engine: Any = choice.engine if choice.engine in ("eager", "cpu") else "plan"
    dtype = None if engine == "cpu" or choice.options.dtype == "native" else choice.options.dtype
    device: Any = "cuda" if choice.engine == "cuda" else "cpu"
    report = fits(found, 1 << 62, dtypes=dtype, engine=engine, device=device, runtime=0, search=False).report
    return Need(report.weights_nbytes, batch * report.peak.nbytes + report.kept + report.workspace)


def parse_adapters(given: Sequence[str]) -> dict[str, str]:
    """Return name -> file of ``NAME=FILE``. Raises :class:`SinewError` for what is none, or names one twice."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise SinewError(f"--adapter {text}: expected NAME=FILE")
        if name in found:
            raise SinewError(f"--adapter {text}: {name} is another adapter's name")
        found[name] = file
    return found


def parse_policies(given: Sequence[str]) -> dict[str, str]:
    """Return name -> source of ``NAME=SOURCE``. Raises :class:`SinewError` for what is none, or names one twice."""
    from sinew.serve.policies import DEFAULT, check_name

    found: dict[str, str] = {}
    for text in given:
        name, equals, source = text.partition("=")
        if not (equals and source):
            raise SinewError(f"--policy {text}: expected NAME=SOURCE")
        check_name(name)
        if name in found or name == DEFAULT:
            raise SinewError(f"--policy {text}: {name} is another policy's name")
        found[name] = source
    return found
