"""Ask engines before they are opened, and choose engine, device and precision of a bundle, with reasons.

Imports torch only to ask it for a GPU: a robot with graphs alone has none. Each engine's folder has a ``backend.py``
with its :class:`Backend`; :data:`ORDER` and the entry points ``sinew.engines`` of other packages find them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from sinew.core import PROMPT_TABLE, SinewError, dtype_word, machine, upcast_text
from sinew.core.extras import install
from sinew.core.hints import option
from sinew.core.registry import loaded
from sinew.engine import prepared as findings
from sinew.engine import proofs
from sinew.engine.capability import Capability, Refusal

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.engine.engine import Engine

AUTO = "auto"  # in place of a name: the first that fits
ASKED = "asked for"  # the reason of what the user named
REFERENCE = "the reference precision"  # that of what nobody named, on a CPU
GIB = 1 << 30
ROOM = GIB  # for activations and the program itself
HALVES = {"BF16": "bf16", "F16": "fp16"}  # GGUF's names of types
LOWBIT = frozenset({"int8", "int8-rows", "q8_0", "q4_0"})  # precisions that weights are stored in
# Of speed, where they run (docs/engines.md); the last one runs everywhere.
ORDER = ("cuda", "cpu", "onnx", "plan", "eager")
GROUP = "sinew.engines"  # entry points "module:attribute" of further backends, tried before the others


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that an engine is opened with.

    ``dtype``: fp32, bf16, fp16 or native. ``recipe``: True to follow the bundle's.
    ``graphs``: the folder of an export; None for a bundle with weights. ``storage``: the half precision in which
    weights stay while products are float32 (:meth:`Backend.half_storage`), else empty.
    ``adapters``: of the bundle, by the names that requests give.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    threads: int | None = None
    providers: tuple[str, ...] = ()
    graphs: Path | None = None
    recipe: bool = True
    storage: str = ""
    adapters: Mapping[str, Bundle] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Return the kind of device: "cpu", "cuda"."""
        return self.device.partition(":")[0]


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
        from sinew.bundle.schema import COMPONENTS

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
        if adapters and Capability.ADAPT not in backend.capabilities:
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


class Backend:
    """One engine: how it is opened, and whether it can and should be.

    opens: "module:function" of (bundle, options). follows: precisions of a recipe that it computes, besides fp32.
    stores_half: it multiplies weights that stay in half precision in float32. copies_none: weights stay in the file's
    map also where memory would do for copies. runs_graphs: it needs the graphs of an export, and nothing else.
    reference: it is what the others are compared with. capabilities: what it can do with some bundle on some device;
    what it lacks with one, its open engine states (:attr:`sinew.engine.engine.Facts.refusals`). guides: the values of
    an observation's ``rtc`` that it follows. counted_as: the program of ``sinew perf`` that counts what it takes of
    memory.
    """

    name: str
    opens: str
    packages: tuple[str, ...] = ("torch",)
    follows: frozenset[str] = frozenset()
    stores_half = True
    copies_none = False
    runs_graphs = False
    reference = False
    capabilities: frozenset[Capability] = frozenset()
    guides: tuple[str, ...] = ()
    counted_as: Literal["eager", "plan", "cpu"] = "plan"

    @property
    def needs_torch(self) -> bool:
        return "torch" in self.packages

    def lacking(self, capability: Capability) -> Refusal | None:
        """Return that this engine lacks a capability with every bundle, and which engines have it; None if it does
        not."""
        if capability in self.capabilities:
            return None
        able = either(engines_that(capability)) or "of another package"
        return Refusal(f"engine {able}, {capability.clause}", f"engine {self.name}")

    def why_not(self, bundle: Bundle, options: EngineOptions) -> str:
        """Return why this engine cannot run the bundle on the device, "" if it can; reads no weights."""
        if missing := [package for package in self.packages if not installed(package)]:
            return f"engine {self.name} needs {missing[0]}: {install(missing[0])}"
        return self.unfit(bundle, options)

    def unfit(self, bundle: Bundle, options: EngineOptions) -> str:
        """Return why this engine, were it installed, could not run the bundle on the device."""
        if options.graphs is not None and not self.runs_graphs:
            return f"engine {self.name}: {options.graphs} holds graphs and no weights; engine onnx runs them"
        if options.providers and not self.runs_graphs:
            return f"provider {', '.join(options.providers)}: expected engine onnx, got {self.name}"
        return ""

    def refused(self, bundle: Bundle, options: EngineOptions) -> str:
        """Return why this engine must not run the bundle, whoever asks for it; "" if it may."""
        if options.adapters and Capability.ADAPT not in self.capabilities:
            others, named = either(engines_that(Capability.ADAPT)), ", ".join(options.adapters)
            return f"engine {self.name} computes no adapters ({named}); engine {others} does"
        if problem := self.why_not(bundle, options):
            return problem
        if not options.recipe or not (lacking := self.not_computed(bundle)):
            return ""
        able = [
            name
            for name, each in BACKENDS.items()
            if not (each.not_computed(bundle) or each.unfit(bundle, EngineOptions()))
        ]
        who = f"engine {either(able)} does" if able else "no engine here does"
        return (
            f"{bundle.path}: its recipe has {lacking}, which engine {self.name} does not compute; {who}"
            f" ({option('ignore_recipe')} runs it unquantised and says so in every report)"
        )

    def not_computed(self, bundle: Bundle) -> str:
        """Return the parts of the bundle's recipe that this engine does not compute.

        Every engine computes with weights that are stored in few bits: it may widen them, which rounds nothing.
        """
        return ", ".join(
            f"{part} {kind}"
            for part, kind in recipe(bundle).items()
            if kind not in self.follows and not (kind in LOWBIT and bundle.lowbit)
        )

    def unproved(self, bundle: Bundle, options: EngineOptions) -> str:
        """Return why nothing shows that this engine computes what the reference computes, "" if something does: the
        project's tests, of this architecture in the precisions in force, or `sinew validate` on this machine."""
        # What it does not follow is widened.
        kinds = self.follows.intersection(recipe(bundle).values()) or {options.dtype}
        if options.kind == "cpu" and kinds <= proofs.proved(bundle.manifest.architecture, self.name):
            return ""
        return proofs.lacking(bundle.path, self.name, options.device)

    def streams(self, bundle: Bundle, options: EngineOptions) -> Refusal | None:
        """Return why the two verbs of this engine may not run at the same time, as those of a stream do, None if they
        may."""
        if options.kind != "cpu":
            return Refusal("a CPU", f"{options.device}, whose stream they share")
        return self.lacking(Capability.STREAM)

    def unstreamed(self, bundle: Bundle, options: EngineOptions, guidance: str) -> str:
        """Return why this engine cannot run a stream of the bundle whose whole chunks are continued by ``guidance``
        (none, or one of :attr:`guides`), "" if it can."""
        if problem := self.streams(bundle, options):
            return str(problem)
        if guidance not in ("none", *self.guides):
            return f"expected a guidance of {', '.join(('none', *self.guides))} on engine {self.name}, got {guidance}"
        return ""

    def device(self) -> tuple[str, str] | None:
        """Return where it runs if nobody says, with the reason; None for whatever there is."""
        return None

    def dtype(self, kind: str) -> tuple[str, str]:
        """Return the precision of weights that nobody has chosen, on a kind of device, and why."""
        return ("fp32", REFERENCE) if kind == "cpu" else ("native", "as stored in the bundle")

    def with_precision(
        self, bundle: Bundle, options: EngineOptions, word: str | None
    ) -> tuple[EngineOptions, str]:
        """Return the options with the precision of the weights on their device, and why it is that. word: the one that
        was asked for (fp32, bf16, fp16, native)."""
        dtype, reason = self.dtype(options.kind) if word is None else (word, ASKED)
        storage, why = self.half_storage(bundle, dtype, options.kind)
        return replace(options, dtype=dtype, storage=storage), f"{reason}; {why}" if storage else reason

    def half_storage(self, bundle: Bundle, dtype: str, kind: str) -> tuple[str, str]:
        """Return the half precision ("bf16", "fp16") in which weights stay although products are float32, and why.

        Two empty strings where nothing is upcast: on GPUs, on a CPU that multiplies the weights' own precision, and
        where fp32 was chosen and a copy of all weights fits the memory that is available now (engine cpu makes none
        anyhow).
        """
        if kind != "cpu" or not self.stores_half or not bundle.infos:
            return "", ""
        kinds, nbytes = set(), 0
        for name, info in bundle.infos.items():
            # The prompt's table is never copied.
            if info.type.name in HALVES and not name.endswith(f"{PROMPT_TABLE}.weight"):
                kinds.add(HALVES[info.type.name])
                nbytes += info.nbytes
        words = sorted(kinds) if dtype in ("fp32", "native") else [dtype]
        stored = "+".join(words)
        if not words:
            return "", ""
        if dtype == "fp32" and self.copies_none:
            reason = f"engine {self.name} copies no weights"
        elif dtype == "fp32":
            copies, available = 2 * nbytes, machine.memory()[1]
            if copies + ROOM <= available:
                return "", ""
            reason = (
                f"{copies / GIB:.1f} GiB of fp32 copies do not fit the {available / GIB:.1f} GiB available"
            )
        else:
            words = [word for word in words if not machine.half_units(word)]
            if not words:
                return "", ""
            reason = f"this CPU has no {' or '.join(words)} products"
        return (
            stored,
            f"{reason}: weights stay {stored} and become fp32 block by block as they are multiplied",
        )

    def slow_start(self, bundle: Bundle, prepared: bool = False) -> str:
        """Return why a user who did not ask for this engine would be kept waiting or lose something, "" if not.
        prepared: he takes what ``sinew prepare`` found to be faster, also where it can do less than the others."""
        return ""

    def preparable(self, bundle: Bundle, kind: str) -> bool:
        """Return True where ``sinew prepare`` could make what keeps this engine from starting at once on a kind of
        device."""
        return False

    def plays_shipped(self, bundle: Bundle) -> bool:
        """Return True where what this engine needs of the bundle came with this package, and others lack theirs."""
        return False

    def rival(self, bundle: Bundle, options: EngineOptions) -> tuple[bool, str]:
        """Return whether a slower engine by :data:`ORDER` is faster for this bundle on this machine, and what to say
        of it; obeys the bundle's recipe as this one does."""
        return False, ""

    def open(self, bundle: Bundle, options: EngineOptions) -> Engine:
        """Return the engine with options that :func:`choose` has found to fit it."""
        from sinew.engine.cpu.kernels.frame_kernels import take_kept_resize

        take_kept_resize()
        lacking = {capability: self.lacking(capability) for capability in Capability}
        lacking[Capability.STREAM] = self.streams(bundle, options)
        module, _, function = self.opens.partition(":")
        engine: Engine = getattr(import_module(module), function)(bundle, options)
        never = {capability: refusal for capability, refusal in lacking.items() if refusal is not None}
        for each in (engine, *engine.adapters.values()):
            each.facts = replace(each.facts, refusals={**each.facts.refusals, **never})
        return engine


class Backends(Mapping[str, Backend]):
    """Name -> backend, in the order in which they are tried; a module is imported when it is asked for."""

    def __getitem__(self, name: str) -> Backend:
        return _backend(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*_added(), *ORDER))

    def __contains__(self, name: object) -> bool:
        return name in ORDER or name in _added()

    def __len__(self) -> int:
        return len(_added()) + len(ORDER)


BACKENDS = Backends()


def engines_that(*capabilities: Capability, guides: Sequence[str] = ()) -> list[str]:
    """Return the names of the engines that have capabilities and follow values of ``rtc``, as error messages list
    them."""
    return [
        name
        for name, backend in BACKENDS.items()
        if backend.capabilities.issuperset(capabilities) and {*guides} <= {*backend.guides}
    ]


def either(names: Sequence[str]) -> str:
    """Return names as "a, b or c"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


@cache
def _added() -> dict[str, str]:
    return {point.name: point.value for point in entry_points(group=GROUP) if point.name not in ORDER}


@cache
def _backend(name: str) -> Backend:
    if name not in ORDER:
        return cast(Backend, loaded(GROUP, name, _added()[name], "Backend"))
    return cast(Backend, import_module(f"sinew.engine.{name}.backend").BACKEND)


def recipe(bundle: Bundle) -> dict[str, str]:
    """Return the components that the bundle wants below its dtype, with their precision."""
    found = bundle.manifest.quantization
    return {} if found is None else {part: kind for part, kind in found.recipe.items() if kind != "fp32"}


def other_precision() -> str:
    """Return what this CPU does in the precision that may be faster than the reference's."""
    unit = machine.half_units("bf16")
    why = f"may be faster here ({unit}): time it" if unit else "has slow linear layers on this CPU"
    return f"{option('dtype', 'bf16')} {why}"


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the parent of a dotted name; a module blocked in sys.modules
        return False


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
