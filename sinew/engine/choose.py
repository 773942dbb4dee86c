"""Choose the engine, device and precision of a bundle, with reasons. Imports torch only to ask it for a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sinew.bundle import Bundle
from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError, dtype_word, machine, upcast_text
from sinew.engine import prepared as findings
from sinew.engine.backend import ASKED, AUTO, BACKENDS, Backend, EngineOptions, installed, recipe


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine, device and precision that will run a bundle, with reasons.

    ``ignored``: the part of the bundle's recipe that was given up, on request.
    """

    engine: str
    engine_reason: str
    device_reason: str
    dtype_reason: str
    options: EngineOptions
    ignored: str = ""
    recipe: Mapping[str, str] = field(default_factory=dict)  # in force

    @property
    def precision_text(self) -> str:
        """Return the precision of each component before anything is loaded, for reports."""
        wide = upcast_text(self.options.storage) if self.options.storage else self.options.dtype
        if self.ignored:
            return f"{wide} (the bundle's recipe is IGNORED: {self.ignored})"
        if not self.recipe:
            return wide
        return ", ".join(f"{part} {self.recipe.get(part, wide)}" for part in COMPONENTS)


def choose(
    bundle: Bundle,
    engine: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    *,
    threads: int | None = None,
    providers: Sequence[str] = (),
    ignore_recipe: bool = False,
    adapters: Mapping[str, Bundle] = MappingProxyType({}),
    prepared: bool = False,
    stream: str | None = None,
) -> EngineChoice:
    """Return the fastest engine that is installed, fits the device, follows the bundle's recipe and is proved for it.

    engine and device: "auto" or None leave it open. adapters: of the bundle, which the engine has to compute. prepared:
    take what ``sinew prepare`` found to be faster also where it can do less (:meth:`Backend.slow_start`). stream: the
    guidance of the stream that it is to run (:meth:`Backend.unstreamed`); None: none. Raises :class:`SinewError` for
    what was asked for and cannot be: nothing else is taken in its place.
    """
    if bundle.manifest.base is not None:
        raise SinewError(
            f"{bundle.path}: an adapter of {bundle.manifest.base.name!r} alone; `sinew serve BASE --adapter"
            f" NAME={bundle.path}` serves it, and sinew.load(base, adapters=...)"
        )
    graphs = exported_graphs(bundle)
    if engine not in (None, AUTO, *BACKENDS):
        raise SinewError(f"engine: expected one of {', '.join((AUTO, *BACKENDS))}, got {engine!r}")
    named = None if engine in (None, AUTO) else engine
    word = None if dtype is None else dtype_word(dtype)
    if named is None and (graphs is not None or providers):
        named = next(name for name, backend in BACKENDS.items() if backend.runs_graphs)
    asked = None if named is None else BACKENDS[named]
    where, device_reason = choose_device(device, asked)
    options = EngineOptions(
        where, "fp32", threads, tuple(providers), graphs, recipe=not ignore_recipe, adapters=adapters
    )
    if asked is not None:
        options, dtype_reason = asked.with_precision(bundle, options, word)
        if problem := asked.refused(bundle, options):
            raise SinewError(problem)
        if stream is not None and (problem := asked.unstreamed(bundle, options, stream)):
            raise SinewError(f"stream: {problem}")
        reason = ASKED
        if engine in (None, AUTO):
            reason = "the folder holds graphs and no weights" if graphs else "providers are ONNX Runtime's"
        return _choice(asked, bundle, options, reason, device_reason, dtype_reason)

    passed_over: list[tuple[str, str]] = []
    for name, backend in BACKENDS.items():
        if adapters and not backend.adapts:
            continue
        options, dtype_reason = backend.with_precision(bundle, options, word)
        problem = (
            backend.refused(bundle, options)
            or backend.unproved(bundle, options)
            or backend.slow_start(bundle, prepared)
            or ("" if stream is None else backend.unstreamed(bundle, options, stream))
        )
        follows = bool(recipe(bundle)) and options.recipe
        if not problem and follows:
            wins, found = backend.rival(bundle, options)
            if wins:
                problem = found
            elif found:
                passed_over.append(("a rival", found))
        if not problem:
            reason = f"the fastest that is proved for {bundle.manifest.architecture} on {where}"
            if follows:
                widened = sorted({*recipe(bundle).values()} - backend.follows)
                reason = (
                    f"nothing here computes on weights stored as {', '.join(widened)}, which it widens"
                    if widened
                    else "it follows the bundle's recipe"
                )
            elif backend.plays_shipped(bundle):
                reason = "its graphs of this policy come with Sinew, and torch, which the others need, is not installed"
                passed_over.clear()
            elif (finding := findings.kept(bundle.path, name)) is not None and finding.taken:
                reason += f"; {finding.why}"
            if adapters:
                reason += f", of those that compute adapters ({', '.join(adapters)})"
            if _worth_saying(passed_over):
                reason += f"; {'; '.join(_worth_saying(passed_over))}"
            return _choice(backend, bundle, options, reason, device_reason, dtype_reason)
        passed_over.append((name, problem))
    raise SinewError(f"{bundle.path}: no engine can run this bundle on {where}: {_each_once(passed_over)}")


def chosen_by(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``sinew.load``'s options that :func:`choose` takes, but for threads and adapters."""
    names = ("engine", "device", "dtype", "providers", "ignore_recipe", "prepared")
    return {name: options[name] for name in names if name in options}


def candidates(bundle: Bundle, choice: EngineChoice) -> list[EngineChoice]:
    """Return what ``sinew prepare`` could make of a bundle that ``choice`` runs, in the order of speed: engines that
    run it with the same recipe on the same device, and only have to be made, proved and measured first."""
    found: list[EngineChoice] = []
    if choice.options.graphs or choice.ignored:
        return found
    kinds = recipe(bundle).values()
    for name, backend in BACKENDS.items():
        if name == choice.engine or not backend.follows.issuperset(kinds):
            continue
        word = None if choice.dtype_reason.partition(";")[0] != ASKED else choice.options.dtype
        options, why = backend.with_precision(bundle, choice.options, word)
        if backend.refused(bundle, options) or not backend.preparable(bundle, choice.options.kind):
            continue
        made = _choice(backend, bundle, options, "prepared", choice.device_reason, why)
        if made.recipe == choice.recipe:  # else what computes now widens what this one would round
            found.append(made)
    return found


def choose_device(device: str | None, backend: Backend | None = None) -> tuple[str, str]:
    """Return the device and why: what the engine is for where one was named, else a GPU where PyTorch has one."""
    if device not in (None, AUTO):
        return device, ASKED
    if backend is not None and (own := backend.device()):
        return own
    if not machine.may_have_cuda():
        return "cpu", "no NVIDIA driver here"
    if not installed("torch"):
        return "cpu", "an NVIDIA driver is here, but no torch"
    import torch

    if torch.cuda.is_available():
        return "cuda", f"torch finds {torch.cuda.get_device_name(0)}"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return "cpu", f"torch {torch.__version__} ({built}) finds no CUDA device"


def exported_graphs(bundle: Bundle) -> Path | None:
    """Return the folder of graphs that this bundle is the head of; None for a bundle with weights."""
    folder = bundle.path.parent
    return folder if not bundle.infos and (folder / "graphs.json").is_file() else None


def _choice(
    backend: Backend,
    bundle: Bundle,
    options: EngineOptions,
    reason: str,
    device_reason: str,
    dtype_reason: str,
) -> EngineChoice:
    ignored = "" if options.recipe else backend.not_computed(bundle)
    in_force = {} if ignored else {p: kind for p, kind in recipe(bundle).items() if kind in backend.follows}
    return EngineChoice(backend.name, reason, device_reason, dtype_reason, options, ignored, in_force)


def _each_once(passed_over: Sequence[tuple[str, str]]) -> str:
    """Return the problems, one that several engines have with all their names: "engine cpu or plan needs torch"."""
    owners: dict[tuple[bool, str], list[str]] = {}
    for name, problem in passed_over:
        own = f"engine {name} "
        owners.setdefault((problem.startswith(own), problem.removeprefix(own)), []).append(name)
    return "; ".join(
        f"engine {' or '.join(names)} {problem}" if named else problem
        for (named, problem), names in owners.items()
    )


def _worth_saying(passed_over: Sequence[tuple[str, str]]) -> list[str]:
    """Leave out what is for a device or for weights that are not here."""
    found = [problem for name, problem in passed_over if "references" not in problem or "valid" in problem]
    return [problem for problem in found if "is for weights" not in problem]
