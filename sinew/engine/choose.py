"""Choose the engine, device and precision of a bundle, with reasons. Imports torch only to ask it for a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sinew.bundle import Bundle
from sinew.bundle.schema import COMPONENTS
from sinew.core import PROMPT_TABLE, SinewError, dtype_word, machine, upcast_text
from sinew.core.hints import option
from sinew.engine import prepared as findings
from sinew.engine.backend import AUTO, BACKENDS, Backend, EngineOptions, followers, installed, recipe

ASKED = "asked for"
GIB = 1 << 30
WORDS = {"BF16": "bf16", "F16": "fp16"}  # GGUF's names of types
ROOM = GIB  # for activations and the program itself


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
    if engine not in (None, AUTO, *BACKENDS):
        raise SinewError(f"engine: expected one of {', '.join((AUTO, *BACKENDS))}, got {engine!r}")
    named = None if engine in (None, AUTO) else engine
    word = None if dtype is None else dtype_word(dtype)
    graphs = exported_graphs(bundle)
    if named is None and (graphs is not None or providers):
        named = next(name for name, backend in BACKENDS.items() if backend.runs_graphs)
    asked = None if named is None else BACKENDS[named]
    where, device_reason = choose_device(device, asked)
    options = EngineOptions(where, "fp32", threads, tuple(providers), graphs, recipe=not ignore_recipe)
    options = replace(options, adapters=adapters)

    def with_precision(backend: Backend) -> tuple[EngineOptions, str]:
        chosen, storage, why = choose_precision(bundle, word, where, backend)
        return replace(options, dtype=chosen, storage=storage), why

    if asked is not None:
        options, dtype_reason = with_precision(asked)
        if problem := _refused(asked, bundle, options, ignore_recipe):
            raise SinewError(problem)
        if stream is not None and (problem := asked.unstreamed(bundle, options, stream)):
            raise SinewError(f"stream: {problem}")
        reason = ASKED
        if engine in (None, AUTO):
            reason = "the folder holds graphs and no weights" if graphs else "providers are ONNX Runtime's"
        return _choice(asked, bundle, reason, device_reason, dtype_reason, options, ignore_recipe)

    passed_over: list[tuple[str, str]] = []
    for name, backend in BACKENDS.items():
        if adapters and not backend.adapts:
            continue
        options, dtype_reason = with_precision(backend)
        problem = (
            _refused(backend, bundle, options, ignore_recipe)
            or backend.unproved(bundle, options)
            or backend.slow_start(bundle, prepared)
            or ("" if stream is None else backend.unstreamed(bundle, options, stream))
        )
        follows = bool(recipe(bundle)) and not ignore_recipe
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
            return _choice(backend, bundle, reason, device_reason, dtype_reason, options, ignore_recipe)
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
        dtype, storage, why = choose_precision(bundle, word, choice.options.device, backend)
        options = replace(choice.options, dtype=dtype, storage=storage)
        if _refused(backend, bundle, options, False) or not backend.preparable(bundle, choice.options.kind):
            continue
        made = _choice(backend, bundle, "prepared", choice.device_reason, why, options, False)
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


def choose_precision(
    bundle: Bundle, dtype: str | None, device: str, backend: Backend
) -> tuple[str, str, str]:
    """Return the precision of the weights (fp32, bf16, fp16, native), the half precision in which they are stored while
    products are float32 ("" if they are not), and why."""
    own = backend.dtype(device.partition(":")[0])
    chosen, reason = own if dtype is None else (dtype_word(dtype), ASKED)
    storage, why = half_storage(bundle, chosen, device, backend)
    return chosen, storage, f"{reason}; {why}" if storage else reason


def exported_graphs(bundle: Bundle) -> Path | None:
    """Return the folder of graphs that this bundle is the head of; None for a bundle with weights."""
    folder = bundle.path.parent
    return folder if not bundle.infos and (folder / "graphs.json").is_file() else None


def _refused(backend: Backend, bundle: Bundle, options: EngineOptions, ignore_recipe: bool) -> str:
    """Why an engine must not run this bundle, whoever asks for it."""
    if options.adapters and not backend.adapts:
        others = " or ".join(name for name, each in BACKENDS.items() if each.adapts)
        named = ", ".join(options.adapters)
        return f"engine {backend.name} computes no adapters ({named}); engine {others} does"
    if problem := backend.why_not(bundle, options):
        return problem
    if ignore_recipe or not (lacking := backend.not_computed(bundle)):
        return ""
    able = followers(bundle)
    who = f"engine {' or '.join(able)} does" if able else "no engine here does"
    return (
        f"{bundle.path}: its recipe has {lacking}, which engine {backend.name} does not compute; {who}"
        f" ({option('ignore_recipe')} runs it unquantised and says so in every report)"
    )


def _choice(
    backend: Backend,
    bundle: Bundle,
    reason: str,
    device_reason: str,
    dtype_reason: str,
    options: EngineOptions,
    ignore_recipe: bool,
) -> EngineChoice:
    ignored = backend.not_computed(bundle) if ignore_recipe else ""
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


def half_storage(bundle: Bundle, dtype: str, device: str, backend: Backend) -> tuple[str, str]:
    """Return the half precision ("bf16", "fp16") in which weights stay although products are float32, and why.

    Two empty strings where nothing is upcast: on GPUs, on a CPU that multiplies the weights' own precision, and where
    fp32 was chosen and a copy of all weights fits the memory that is available now (engine cpu makes none anyhow).
    """
    stored = {
        name: info
        for name, info in bundle.infos.items()
        if info.type.name in WORDS and not name.endswith(f"{PROMPT_TABLE}.weight")  # which is never copied
    }
    words = (
        sorted({WORDS[info.type.name] for info in stored.values()})
        if dtype in ("fp32", "native")
        else [dtype]
    )
    if device.partition(":")[0] != "cpu" or not backend.stores_half or not bundle.infos or not words:
        return "", ""
    kind = "+".join(words)
    if dtype == "fp32" and backend.copies_none:
        reason = f"engine {backend.name} copies no weights"
    elif dtype == "fp32":
        copies, available = 2 * sum(info.nbytes for info in stored.values()), machine.memory()[1]
        if copies + ROOM <= available:
            return "", ""
        reason = f"{copies / GIB:.1f} GiB of fp32 copies do not fit the {available / GIB:.1f} GiB available"
    else:
        words = [word for word in words if not machine.half_units(word)]
        if not words:
            return "", ""
        reason = f"this CPU has no {' or '.join(words)} products"
    return kind, f"{reason}: weights stay {kind} and become fp32 block by block as they are multiplied"
