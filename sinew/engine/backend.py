"""Describe each engine before it is opened, and choose the engine, device and precision for a bundle.

This module imports torch only to find a GPU, because a robot that runs exported ONNX graphs may not have torch. Each
engine's folder has a file ``backend.py`` with its description, a :class:`Backend`. The backends are listed in
:data:`ORDER` and in the entry points ``sinew.engines`` of other packages.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from sinew.core import PROMPT_TABLE, SinewError, dtype_word, machine, upcast_text
from sinew.core.extras import install
from sinew.core.hints import option
from sinew.core.registry import loaded
from sinew.engine import measured, proofs
from sinew.engine import prepared as findings
from sinew.engine.capability import Capability, Refusal
from sinew.engine.measured import MARGIN, Conditions, Times

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.engine.engine import Engine

AUTO = "auto"  # the user's value for "choose the first engine or device that fits"
ASKED = "asked for"  # the reason for an engine, device or precision that the user named
REFERENCE = "the reference precision"  # the reason for the default precision on a CPU
GIB = 1 << 30
ROOM = GIB  # memory in bytes that stays free for activations and for the program itself
HALVES = {"BF16": "bf16", "F16": "fp16"}  # GGUF's name of a half-precision type -> Sinew's name of this type
# The low-bit precisions of a quantisation recipe in which a bundle can store weights.
LOWBIT = frozenset({"int8", "int8-rows", "q8_0", "q4_0"})
# Sinew tries the engines in this order. The order also decides between engines that were not measured. The last engine
# runs on every machine.
ORDER = ("cuda", "cpu", "onnx", "plan", "eager")
# The reference engine (eager) is chosen only if it is this many times as fast as another engine. Engine plan
# multiplies the same matrices, so a smaller difference is noise.
REFERENCE_MARGIN = 1.15
GROUP = "sinew.engines"  # entry points "module:attribute" of further backends, tried before the others


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options with which an engine is opened.

    Attributes:
        device: The device, such as "cpu" or "cuda:0".
        dtype: The precision: fp32, bf16, fp16 or native.
        threads: The number of threads. With None, the engine chooses the number.
        providers: The execution providers of ONNX Runtime, in order of preference.
        graphs: The folder of exported ONNX graphs, or None for a bundle with weights.
        recipe: True to follow the bundle's quantisation recipe.
        storage: The half precision in which weights stay while products are float32 (:func:`half_storage`), else "".
        adapters: The bundle's adapters (LoRA weights), by the name that a request uses.
        kernels: Installs compiled products for low-bit weights. The loader calls this function if low-bit weights
            stay on a CPU.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    threads: int | None = None
    providers: tuple[str, ...] = ()
    graphs: Path | None = None
    recipe: bool = True
    storage: str = ""
    adapters: Mapping[str, Bundle] = field(default_factory=dict)
    kernels: Callable[[], object] | None = field(default=None, compare=False, repr=False)

    @property
    def kind(self) -> str:
        """Return the kind of device, such as "cpu" or "cuda"."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine, device and precision that will run a bundle, with the reasons for these choices.

    Attributes:
        ignored: The part of the bundle's quantisation recipe that the engine does not follow, because the user chose
            to ignore the recipe.
        recipe: The precision in use of each component (vision, language or head).
        times: The measured times of all engines that can run the bundle, as text. "" if the user named the engine, or
            if nothing was measured. ``sinew prepare``, ``sinew doctor`` and the server print this text.
    """

    engine: str
    engine_reason: str
    device_reason: str
    dtype_reason: str
    options: EngineOptions
    ignored: str = ""
    recipe: Mapping[str, str] = field(default_factory=dict)
    times: str = ""

    @property
    def precision_text(self) -> str:
        """Return the precision of each component as text for reports, before the bundle is loaded."""
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
    """Choose the fastest verified engine that is installed, fits the device and follows the bundle's recipe.

    An engine is verified if it was compared with the reference engine. The recipe states the precision of each
    component. A measurement on this machine decides which engine is the fastest (:mod:`sinew.engine.measured`). The
    first engine in :data:`ORDER` is chosen if there is no measurement, or if times differ by less than 5 % (15 % for
    the reference).

    Args:
        bundle: The bundle.
        engine: The engine's name. "auto" or None lets Sinew choose.
        device: The device. "auto" or None lets Sinew choose.
        dtype: The precision of the weights. None lets Sinew choose.
        threads: The number of threads.
        providers: The execution providers of ONNX Runtime.
        ignore_recipe: True to ignore the bundle's quantisation recipe.
        adapters: Adapters of the bundle that the engine has to compute.
        prepared: Also accept an engine that ``sinew prepare`` measured to be faster, although it supports fewer
            features than the other engines (:meth:`Backend.should`).
        stream: For streaming inference: the method by which each new chunk continues the running chunk
            (:func:`unstreamed`). None for no stream.

    Raises:
        SinewError: A requested engine, device or precision is not possible. Sinew never replaces a request silently.
    """
    if bundle.manifest.base is not None:
        raise SinewError(
            f"{bundle.path}: this file is an adapter of {bundle.manifest.base.name!r} and has no base weights;"
            f" run `sinew serve BASE --adapter NAME={bundle.path}`, or call sinew.load(base,"
            f" adapters={{name: path}})"
        )
    graphs = exported_graphs(bundle)
    if engine not in (None, AUTO, *BACKENDS):
        raise SinewError(f"engine: expected one of {', '.join((AUTO, *BACKENDS))}, got {engine!r}")
    named, reason = (None, "") if engine in (None, AUTO) else (engine, ASKED)
    if named is None and (graphs is not None or providers):
        named = next(name for name, each in BACKENDS.items() if each.runs_graphs)
        reason = "the folder contains graphs and no weights" if graphs else "providers belong to ONNX Runtime"
    backend = None if named is None else BACKENDS[named]
    where, device_reason = choose_device(device, backend)
    word = None if dtype is None else dtype_word(dtype)
    options = EngineOptions(
        where, "fp32", threads, tuple(providers), graphs, recipe=not ignore_recipe, adapters=adapters
    )
    if backend is None:
        return _fastest(bundle, options, device_reason, word, prepared, stream)
    options, dtype_reason = with_precision(backend, bundle, options, word)
    if problem := rejection(backend, bundle, options).against:
        raise SinewError(problem)
    if stream is not None and (problem := unstreamed(backend, bundle, options, stream)):
        raise SinewError(f"stream: {problem}")
    return _choice(backend, bundle, options, reason, device_reason, dtype_reason)


def _fastest(
    bundle: Bundle,
    options: EngineOptions,
    device_reason: str,
    word: str | None,
    prepared: bool,
    stream: str | None,
) -> EngineChoice:
    """Choose the fastest verified engine, if the user named none.

    Args:
        bundle: The bundle.
        options: The options without a precision.
        device_reason: The reason for the device.
        word: The requested precision, or None.
        prepared: As in :func:`choose`.
        stream: As in :func:`choose`.

    Raises:
        SinewError: No engine can run the bundle with these options.
    """
    contenders, passed_over = _contenders(bundle, options, word, prepared, stream)
    if not contenders:
        raise SinewError(
            f"{bundle.path}: no engine can run this bundle on {options.device}: {_each_once(passed_over)}"
        )
    times = _times(bundle, contenders, word)
    best = contenders[0]
    for each in contenders[1:]:
        margin = REFERENCE_MARGIN if each.backend.reference else MARGIN
        if not each.verdict.unmade and times.faster(each.name, than=best.name, margin=margin):
            best = each
    runs = {each.name for each in contenders} | {each.name for each in passed_over if each.runs}
    seconds = times.text(best.name, runs)
    reason = _reason(bundle, best, contenders, seconds, options.device)
    if options.adapters:
        reason += f", among the engines that compute adapters ({', '.join(options.adapters)})"
    notes = [] if best.verdict.reason else _told(bundle, best, contenders, passed_over, times)
    reason = "; ".join([reason, *notes])
    choice = _choice(best.backend, bundle, best.options, reason, device_reason, best.dtype_reason)
    return replace(choice, times=seconds)


class _Contender(NamedTuple):
    """An engine that may be chosen: it is verified and can run the bundle. The record contains the options for this
    engine.

    Attributes:
        follows: True if the engine computes each component in the precision that the bundle's recipe states.
    """

    name: str
    backend: Backend
    options: EngineOptions
    dtype_reason: str
    verdict: Suitability
    follows: bool


def _contenders(
    bundle: Bundle,
    options: EngineOptions,
    word: str | None,
    prepared: bool = False,
    stream: str | None = None,
) -> tuple[list[_Contender], list[_Passed]]:
    """Check for each engine whether it may be chosen for a bundle with these options.

    Returns:
        Two lists: the verified engines that can run the bundle in the requested precision, in the order of
            :data:`ORDER`, and the rejected engines with reasons.
    """
    contenders: list[_Contender] = []
    passed_over: list[_Passed] = []
    kinds = {*recipe(bundle).values()} if options.recipe else set()
    for name, backend in BACKENDS.items():
        if options.adapters and Capability.ADAPT not in backend.capabilities:
            continue
        own, dtype_reason = with_precision(backend, bundle, options, word)
        verdict = rejection(backend, bundle, own)
        runs = not verdict.against
        if runs:
            verdict = backend.should(bundle, own, prepared)
        if not verdict.against and stream is not None:
            verdict = replace(verdict, against=unstreamed(backend, bundle, own, stream))
        if verdict.against:
            passed_over.append(_Passed(name, verdict.against, verdict.elsewhere, runs))
            continue
        follows = bool(kinds) and backend.follows.issuperset(kinds)
        contenders.append(_Contender(name, backend, own, dtype_reason, verdict, follows))
    names = {each.name for each in contenders}
    for each in [*contenders]:
        finding = findings.kept(bundle.path, each.name, options.threads)
        if finding is not None and not finding.taken and finding.against in names - {each.name}:
            contenders.remove(each)
            passed_over.append(_Passed(each.name, finding.why, runs=True))
    return contenders, passed_over


def _under(bundle: Bundle, options: EngineOptions, word: str | None) -> Conditions:
    """Return the conditions (device, precision, threads) under which measured times of the engines are valid.

    Args:
        bundle: The bundle.
        options: The options that all engines share.
        word: The requested precision, or None.
    """
    precision = word or ("fp32" if options.kind == "cpu" else "native")
    ignored = bool(recipe(bundle)) and not options.recipe
    return Conditions(bundle.path, options.device, precision, options.threads or 1, not ignored)


def _times(bundle: Bundle, contenders: Sequence[_Contender], word: str | None) -> Times:
    """Return the measured times of these engines on this machine.

    If no engine has computed an action chunk with a timer yet, a small matrix product of each engine is timed now.
    This takes milliseconds.
    """
    if len(contenders) < 2:
        return Times()
    options = contenders[0].options
    under = _under(bundle, options, word)
    times = measured.stored(under)
    # The reference computes the same products as the other engines and more operations, so it is never faster.
    rivals = [each for each in contenders if not each.backend.reference]
    if options.kind != "cpu" or len(rivals) < 2 or times.chunks.keys() >= {each.name for each in rivals}:
        return times
    products = {each.name: each.backend.product(bundle, each.options) for each in rivals}
    calls = {name: product for name, product in products.items() if product is not None}
    if len(calls) < 2 or times.products.keys() >= calls.keys():
        return times
    times = replace(times, products=measured.time_products(calls, under.threads))
    # If the folder is not writable, the next start measures again.
    with contextlib.suppress(OSError):
        measured.store(under, products=times.products)
    return times


def _reason(
    bundle: Bundle, best: _Contender, contenders: Sequence[_Contender], seconds: str, where: str
) -> str:
    """Return the reason why the engine ``best`` is chosen. The measured times, ``seconds``, are a part of it."""
    kinds = {*recipe(bundle).values()}
    if kinds and best.options.recipe:
        if not (widened := sorted(kinds - best.backend.follows)):
            reason = "it follows the bundle's recipe"
        elif any(each.follows for each in contenders):
            reason = "it is the fastest by measurements on this machine, although it widens weights stored as"
            reason += f" {', '.join(widened)}"
        else:
            reason = (
                f"it widens weights stored as {', '.join(widened)}, because no engine on this machine computes"
                " with them"
            )
    elif best.verdict.reason:
        return best.verdict.reason
    else:
        reason = f"the fastest verified engine for {bundle.manifest.architecture} on {where}"
        reason += ", by measurements on this machine" if seconds else ""
    finding = findings.kept(bundle.path, best.name, best.options.threads)
    proof = finding.why if finding is not None and finding.taken else ""
    return "; ".join(filter(None, (reason, seconds, proof)))


def _told(
    bundle: Bundle,
    best: _Contender,
    contenders: Sequence[_Contender],
    passed_over: Sequence[_Passed],
    times: Times,
) -> list[str]:
    """Return notes for the user about the engines that were not chosen.

    The notes are about two kinds of engines. The first kind was rejected, although it comes earlier in :data:`ORDER`
    or follows the bundle's recipe. The second kind was not measured yet.
    """
    names = [*BACKENDS]
    kinds = {*recipe(bundle).values()} if best.options.recipe else set()

    def concerns(name: str) -> bool:
        earlier = names.index(name) < names.index(best.name)
        return earlier or bool(kinds and BACKENDS[name].follows.issuperset(kinds))

    texts = [each.text for each in passed_over if not each.elsewhere and concerns(each.name)]
    for each in contenders:
        if each.follows and each.name != best.name and each.verdict.unmade:
            texts.append(each.verdict.unmade)
        elif each.follows and each.name != best.name and times.of(best.name, each.name) is None:
            how = (
                f"run `sinew prepare {bundle.path}` to measure it; `sinew serve` does that in the background"
            )
            texts.append(f"engine {each.name} was not compared with it yet: {how}")
    return texts


class _Passed(NamedTuple):
    """An engine that was not chosen, with the reason. ``runs`` is True if the engine could run the bundle."""

    name: str
    text: str
    elsewhere: bool = False
    runs: bool = False


def choose_device(device: str | None, backend: Backend | None = None) -> tuple[str, str]:
    """Choose the device that a policy runs on. Return the device, and the reason for this choice.

    If the user named an engine, the engine's own device is used. Otherwise the device is a GPU if PyTorch finds one.
    """
    if device not in (None, AUTO):
        return device, ASKED
    if backend is not None and (own := backend.device()):
        return own
    if not machine.may_have_cuda():
        return "cpu", "this machine has no NVIDIA driver"
    if not installed("torch"):
        return "cpu", "this machine has an NVIDIA driver, but torch is not installed"
    import torch

    if torch.cuda.is_available():
        return "cuda", f"torch finds {torch.cuda.get_device_name(0)}"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return "cpu", f"torch {torch.__version__} ({built}) finds no CUDA device"


def exported_graphs(bundle: Bundle) -> Path | None:
    """Return the folder of an ONNX export if ``bundle`` is the header file of this export; None for a bundle with
    weights.
    """
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
    ignored = "" if options.recipe else not_computed(backend, bundle)
    in_force = {} if ignored else {p: kind for p, kind in recipe(bundle).items() if kind in backend.follows}
    return EngineChoice(backend.name, reason, device_reason, dtype_reason, options, ignored, in_force)


def _each_once(passed_over: Sequence[_Passed]) -> str:
    """Return the problems as text, each problem once, with the names of all engines that have it: "engine cpu or plan
    needs torch"."""
    owners: dict[tuple[bool, str], list[str]] = {}
    for name, problem, *_ in passed_over:
        own = f"engine {name} "
        owners.setdefault((problem.startswith(own), problem.removeprefix(own)), []).append(name)
    return "; ".join(
        f"engine {' or '.join(names)} {problem}" if named else problem
        for (named, problem), names in owners.items()
    )


@dataclass(frozen=True, slots=True)
class Suitability:
    """The answer to one of two questions about an engine: can it run a bundle, or should Sinew choose it for the
    bundle?

    Without a reason against the engine, the answer is yes.

    Attributes:
        against: The reason against the engine, as a sentence. "" means yes.
        elsewhere: True if the reason concerns missing devices or weights. The user does not see such a reason if
            another engine was chosen.
        reason: A special reason for the engine, besides being the fastest verified engine.
        unmade: A sentence about the files that must be made before the engine can start, with the command that makes
            them. "" if no file is missing.
        preparable: True if ``sinew prepare`` can make these files.
    """

    against: str = ""
    elsewhere: bool = False
    reason: str = ""
    unmade: str = ""
    preparable: bool = False


YES = Suitability()


class Backend:
    """The description of an engine that is not open yet: its properties, and the methods that an engine may override.

    Attributes:
        name: The engine's name.
        opens: The function that opens the engine, as "module:function". Its arguments are (bundle, options).
        packages: The packages that the engine needs.
        follows: The low-bit precisions of a quantisation recipe in which the engine can compute. Every engine also
            computes in fp32.
        rounds: The low-bit precisions to which the engine itself rounds float weights. For other precisions, the bundle
            must contain low-bit weights.
        stores_half: True if the engine multiplies weights in half precision with float32 arithmetic.
        copies_none: True if the engine reads weights from the memory map of the file, even if there is enough memory
            for copies of the weights.
        runs_graphs: True if the engine needs the graphs of an export instead of weights.
        reference: True for the engine that all other engines are compared with.
        starts_threads: True if the engine starts threads of its own while it is opened. They keep the priority that the
            process has at that time.
        capabilities: The optional features that the engine supports with at least one bundle on at least one device.
            An open engine states which of them it lacks with its bundle (:attr:`sinew.engine.engine.Facts.refusals`).
        guides: The methods of real-time chunking (values of an observation's ``rtc``) that the engine supports.
        counted_as: The name of the engine whose cost model predicts the memory of this engine: "eager", "plan" or
            "cpu".
    """

    name: str
    opens: str
    packages: tuple[str, ...] = ("torch",)
    follows: frozenset[str] = frozenset()
    rounds: frozenset[str] = frozenset()
    stores_half = True
    copies_none = False
    runs_graphs = False
    reference = False
    starts_threads = True
    capabilities: frozenset[Capability] = frozenset()
    guides: tuple[str, ...] = ()
    counted_as: Literal["eager", "plan", "cpu"] = "plan"

    def can(self, bundle: Bundle, options: EngineOptions) -> Suitability:
        """Check whether this engine can run the bundle with these options, if its packages are installed.

        The method reads the bundle's header, but no weights.

        Returns:
            The answer, with the reason against the engine.
        """
        if options.graphs is not None and not self.runs_graphs:
            able = either([name for name, each in BACKENDS.items() if each.runs_graphs])
            return Suitability(
                f"engine {self.name}: {options.graphs} contains graphs and no weights; use engine {able}"
            )
        if options.providers and not self.runs_graphs:
            able = either([name for name, each in BACKENDS.items() if each.runs_graphs])
            return Suitability(
                f"provider {', '.join(options.providers)}: expected engine {able}, got {self.name}"
            )
        return YES

    def multiplies(self, dtype: str) -> bool:
        """Return True if this engine multiplies "bf16" or "fp16" on this CPU without converting weights to float32
        first.
        """
        return machine.half_units(dtype) is not None

    def should(self, bundle: Bundle, options: EngineOptions, prepared: bool = False) -> Suitability:
        """Check whether Sinew may choose this engine by itself: the engine must be verified, start without delay, and
        support as much as other engines.

        Args:
            bundle: The bundle.
            options: The engine's options.
            prepared: Also accept an engine that ``sinew prepare`` measured to be faster, although it supports fewer
                features than the other engines.
        """
        against = unproved(self, bundle, options)
        return Suitability(against, preparable=bool(against) and options.kind == "cpu")

    def product(self, bundle: Bundle, options: EngineOptions) -> Callable[[], object] | None:
        """Return a function that computes one small matrix product in the same way in which this engine computes its
        products on a CPU.

        Sinew measures the time of the product to choose between engines before a chunk was measured. The result is
        None if the engine's products are not known before the engine is opened.
        """
        return None

    def streams(self, bundle: Bundle, options: EngineOptions) -> Refusal | None:
        """Return the reason why ``read`` and ``solve`` of this engine may not run at the same time on two threads, as
        streaming inference requires; None if they may.
        """
        if options.kind != "cpu":
            return Refusal("a CPU", f"{options.device}, where both share one CUDA stream")
        return self.lacking(Capability.STREAM)

    def device(self) -> tuple[str, str] | None:
        """Return the default device with the reason, or None if the engine supports any device."""
        return None

    def dtype(self, kind: str) -> tuple[str, str]:
        """Return the default precision of weights on a kind of device, and the reason."""
        return ("fp32", REFERENCE) if kind == "cpu" else ("native", "as stored in the bundle")

    def open(self, bundle: Bundle, options: EngineOptions) -> Engine:
        """Open the engine with options that :func:`choose` has checked."""
        lacking = {capability: self.lacking(capability) for capability in Capability}
        lacking[Capability.STREAM] = self.streams(bundle, options)
        module, _, function = self.opens.partition(":")
        engine: Engine = getattr(import_module(module), function)(bundle, options)
        never = {capability: refusal for capability, refusal in lacking.items() if refusal is not None}
        for each in (engine, *engine.adapters.values()):
            each.facts = replace(each.facts, refusals={**each.facts.refusals, **never})
        return engine

    def lacking(self, capability: Capability) -> Refusal | None:
        """Return the error if this engine lacks a capability with every bundle, otherwise None.

        The error names the engines that have the capability.
        """
        if capability in self.capabilities:
            return None
        able = either(engines_that(capability)) or "from another package"
        return Refusal(f"engine {able}, {capability.clause}", f"engine {self.name}")


def rejection(backend: Backend, bundle: Bundle, options: EngineOptions) -> Suitability:
    """Return the reason why an engine cannot run the bundle.

    The checks are in this order: the capability to compute adapters, the packages, :meth:`Backend.can`, and the
    bundle's recipe.
    """
    name = backend.name
    if options.adapters and Capability.ADAPT not in backend.capabilities:
        able, named = either(engines_that(Capability.ADAPT)), ", ".join(options.adapters)
        return Suitability(f"engine {name} cannot compute adapters ({named}); use engine {able}")
    if missing := [package for package in backend.packages if not installed(package)]:
        return Suitability(f"engine {name} needs {missing[0]}: {install(missing[0])}")
    if (verdict := backend.can(bundle, options)).against:
        return verdict
    if not options.recipe or not (lacking := not_computed(backend, bundle)):
        return YES
    others = [
        other
        for other, each in BACKENDS.items()
        if not (not_computed(each, bundle) or each.can(bundle, EngineOptions()).against)
    ]
    who = f"engine {either(others)} computes it" if others else "no engine on this machine computes it"
    return Suitability(
        f"{bundle.path}: its recipe has {lacking}, which engine {name} does not compute; {who}"
        f" ({option('ignore_recipe')} runs the bundle unquantised and notes this in every report)"
    )


def lowered(options: EngineOptions, bundle: Bundle) -> str:
    """Return the reason why PyTorch cannot compute in bf16 or fp16 on this machine; "" if it can.

    The precision is that of ``options``. With "native", the precisions are those of the bundle's weights.
    """
    if options.kind != "cpu" or options.storage or options.graphs is not None:
        return ""
    words = {HALVES[info.type.name] for info in bundle.infos.values() if info.type.name in HALVES}
    for word in sorted(words) if options.dtype == "native" else [options.dtype]:
        if setting := machine.half_lowered(word):
            return (
                f"cannot compute {word}: PyTorch's attention fails with {setting} on a CPU with AMX;"
                f" unset {setting.partition('=')[0]}, or choose {option('dtype', 'fp32')}"
            )
    return ""


def not_computed(backend: Backend, bundle: Bundle) -> str:
    """Return the parts of the bundle's quantisation recipe that an engine does not follow, as text.

    Every engine computes with low-bit weights. An engine without matrix products for such weights converts the weights
    to float32. This conversion is exact.
    """
    return ", ".join(
        f"{part} {kind}"
        for part, kind in recipe(bundle).items()
        if not (kind in backend.follows if kind not in LOWBIT else bundle.lowbit or kind in backend.rounds)
    )


def unproved(backend: Backend, bundle: Bundle, options: EngineOptions) -> str:
    """Return the reason why an engine is not verified (compared with the reference engine) for a bundle; "" if it is
    verified.

    The comparison is a test of the project for this architecture in the precisions in use, or `sinew validate` on
    this machine.
    """
    # The engine converts weights of other precisions to float32. Only its own low-bit precisions need a verification.
    kinds = backend.follows.intersection(recipe(bundle).values()) or {options.dtype}
    if options.kind == "cpu" and kinds <= proofs.proved(bundle.manifest.architecture, backend.name):
        return ""
    return proofs.lacking(bundle.path, backend.name, options.device)


def unstreamed(backend: Backend, bundle: Bundle, options: EngineOptions, guidance: str) -> str:
    """Return the reason why an engine cannot run a stream of the bundle, or "" if it can.

    Args:
        backend: The engine.
        bundle: The bundle.
        options: The engine's options.
        guidance: The method by which a new chunk continues the running chunk: "none", or one of :attr:`Backend.guides`.
    """
    if refusal := backend.streams(bundle, options):
        return str(refusal)
    if guidance not in (guidances := ("none", *backend.guides)):
        return f"expected a guidance of {', '.join(guidances)} on engine {backend.name}, got {guidance}"
    return ""


def with_precision(
    backend: Backend, bundle: Bundle, options: EngineOptions, word: str | None
) -> tuple[EngineOptions, str]:
    """Return the options with the precision of the weights on the engine's device, and the reason for that precision.

    Args:
        backend: The engine.
        bundle: The bundle.
        options: The options without a precision.
        word: The requested precision (fp32, bf16, fp16 or native), or None.
    """
    dtype, reason = backend.dtype(options.kind) if word is None else (word, ASKED)
    storage, why = half_storage(backend, bundle, dtype, options.kind)
    return replace(options, dtype=dtype, storage=storage), f"{reason}; {why}" if storage else reason


def half_storage(backend: Backend, bundle: Bundle, dtype: str, kind: str) -> tuple[str, str]:
    """Return the half precision ("bf16" or "fp16") in which weights stay in memory while products are float32, and
    the reason.

    Both are empty strings if no weight needs a conversion to float32 at run time:

    * on GPUs
    * on a CPU that multiplies in the weights' own precision
    * if fp32 was chosen and a copy of all weights fits the available memory (engine cpu never makes such a copy)

    Args:
        backend: The engine.
        bundle: The bundle.
        dtype: The chosen precision.
        kind: The kind of device.
    """
    if kind != "cpu" or not backend.stores_half or not bundle.infos:
        return "", ""
    kinds, nbytes = set(), 0
    for name, info in bundle.infos.items():
        # The table of prompt tokens is never copied, so it needs no memory for a copy.
        if info.type.name in HALVES and not name.endswith(f"{PROMPT_TABLE}.weight"):
            kinds.add(HALVES[info.type.name])
            nbytes += info.nbytes
    words = sorted(kinds) if dtype in ("fp32", "native") else [dtype]
    stored = "+".join(words)
    if not words:
        return "", ""
    if dtype == "fp32" and backend.copies_none:
        reason = f"engine {backend.name} copies no weights"
    elif dtype == "fp32":
        copies, available = 2 * nbytes, machine.memory()[1]
        if copies + ROOM <= available:
            return "", ""
        reason = f"{copies / GIB:.1f} GiB of fp32 copies do not fit the {available / GIB:.1f} GiB available"
    else:
        words = [word for word in words if not backend.multiplies(word)]
        if not words:
            return "", ""
        reason = f"this CPU has no {' or '.join(words)} products"
    return (
        stored,
        f"{reason}: weights stay {stored} and are converted to fp32 block by block",
    )


class Backends(Mapping[str, Backend]):
    """A mapping from an engine's name to its backend, in the order in which Sinew tries the engines.

    A backend's module is imported when the backend is looked up for the first time.
    """

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
    """Return the names of the engines with all given capabilities and methods of real-time chunking (``guides``)."""
    return [
        name
        for name, backend in BACKENDS.items()
        if backend.capabilities.issuperset(capabilities) and {*guides} <= {*backend.guides}
    ]


def either(names: Sequence[str]) -> str:
    """Return a list of names as text of the form "a, b or c"."""
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
    """Return the precision of each component that the bundle stores in a lower precision than its dtype."""
    quantization = bundle.manifest.quantization
    return (
        {}
        if quantization is None
        else {part: kind for part, kind in quantization.recipe.items() if kind != "fp32"}
    )


def other_precision() -> str:
    """Return a note for the user on whether bf16 may be faster than fp32 on this CPU."""
    unit = machine.half_units("bf16")
    why = (
        f"may be faster on this CPU ({unit}): measure it with `sinew bench`"
        if unit
        else "has slow linear layers on this CPU"
    )
    return f"{option('dtype', 'bf16')} {why}"


def installed(module: str) -> bool:
    """Return True if a module can be imported. The function does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (
        ModuleNotFoundError,
        ValueError,
    ):
        # The parent package is missing, or the module is blocked in sys.modules.
        return False


def chosen_by(options: Mapping[str, Any]) -> dict[str, Any]:
    """Select the options of ``sinew.load`` that :func:`choose` also accepts, except threads and adapters."""
    names = ("engine", "device", "dtype", "providers", "ignore_recipe", "prepared")
    return {name: options[name] for name in names if name in options}


def requested(choice: EngineChoice) -> str | None:
    """Return the precision that the user chose (fp32, bf16, fp16 or native), or None."""
    return choice.options.dtype if choice.dtype_reason.partition(";")[0] == ASKED else None


def ready(bundle: Bundle, choice: EngineChoice) -> list[EngineChoice]:
    """Return the verified engines that could run a bundle instead of ``choice`` without any preparation, in the order
    of :data:`ORDER`. The result contains ``choice`` itself.
    """
    contenders, _ = _contenders(bundle, choice.options, requested(choice), prepared=True)
    return [
        _choice(each.backend, bundle, each.options, "verified", choice.device_reason, each.dtype_reason)
        for each in contenders
        if not each.verdict.unmade or each.name == choice.engine
    ]


def measured_under(bundle: Bundle, choice: EngineChoice) -> Conditions:
    """Return the conditions under which stored measurements of ``choice`` and the other engines are valid."""
    return _under(bundle, choice.options, requested(choice))


def unmeasured(bundle: Bundle, choice: EngineChoice, reference: bool = False) -> list[str]:
    """Return the engines for which no measured time of a chunk can be compared with that of ``choice``, with the same
    number of threads.

    Args:
        bundle: The bundle.
        choice: The engine in use.
        reference: True to list the reference engine too.
    """
    if choice.options.graphs or choice.ignored:
        return []
    times = measured.stored(measured_under(bundle, choice))
    complete = times.threads == (choice.options.threads or 1)
    others = [each.engine for each in ready(bundle, choice) if each.engine != choice.engine]
    return [
        name
        for name in others
        if (reference or not BACKENDS[name].reference)
        and not (complete and times.chunks.keys() >= {name, choice.engine})
    ]


def candidates(bundle: Bundle, choice: EngineChoice) -> list[EngineChoice]:
    """Return the engines that ``sinew prepare`` could prepare for a bundle, the fastest engine first.

    Each engine runs the bundle with the same quantisation recipe on the same device as ``choice``. Before that,
    ``sinew prepare`` must make the files that the engine needs, verify the engine and measure it.
    """
    choices: list[EngineChoice] = []
    if choice.options.graphs or choice.ignored:
        return choices
    kinds = recipe(bundle).values()
    for name, backend in BACKENDS.items():
        if name == choice.engine or not backend.follows.issuperset(kinds):
            continue
        options, why = with_precision(backend, bundle, choice.options, requested(choice))
        if rejection(backend, bundle, options).against or not backend.should(bundle, options).preparable:
            continue
        prepared = _choice(backend, bundle, options, "prepared", choice.device_reason, why)
        # If the recipes differ, the prepared engine would round weights that the current engine converts to floats.
        if prepared.recipe == choice.recipe:
            choices.append(prepared)
    return choices
