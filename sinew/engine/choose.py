"""Choose the engine, device and precision of a bundle, with reasons. Imports torch only to ask it for a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sinew import machine
from sinew.bundle import Bundle
from sinew.bundle.schema import COMPONENTS
from sinew.core import SinewError, dtype_word, install
from sinew.engine.base import ENGINES, OFFERS, Offer, Options, followers, installed, recipe
from sinew.engine.onnx.borrowed import shipped
from sinew.engine.onnx.cache import cache_folder
from sinew.engine.storage import half_storage, upcast_text
from sinew.hints import option

ASKED = "asked for"
WORTH = "it was 1.1 to 4.6 times as fast as plan where both were measured (docs/engines.md)"


@dataclass(frozen=True, slots=True)
class Choice:
    """The engine, device and precision that will run a bundle, with reasons.

    ``ignored``: the part of the bundle's recipe that was given up, on request.
    """

    engine: str
    engine_reason: str
    device_reason: str
    dtype_reason: str
    options: Options
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
) -> Choice:
    """Return the fastest engine that is installed, fits the device, follows the bundle's recipe and is proved for it.

    engine and device: "auto" or None leave it open. Raises :class:`SinewError` for what was asked for and cannot be:
    nothing else is taken in its place.
    """
    if engine not in (None, *ENGINES):
        raise SinewError(f"engine: expected one of {', '.join(ENGINES)}, got {engine!r}")
    named = None if engine in (None, "auto") else engine
    word = None if dtype is None else dtype_word(dtype)
    graphs = exported_graphs(bundle)
    if named is None and (graphs is not None or providers):
        named = "onnx"
    where, device_reason = choose_device(device, named, graphs)
    options = Options(where, "fp32", threads, tuple(providers), graphs, recipe=not ignore_recipe)

    def opened(name: str) -> tuple[Options, str]:
        chosen, storage, why = choose_precision(bundle, word, where, name)
        return replace(options, dtype=chosen, storage=storage), why

    if named is not None:
        options, dtype_reason = opened(named)
        offer = OFFERS[named]
        if problem := _refused(offer, bundle, options, ignore_recipe):
            raise SinewError(problem)
        reason = ASKED
        if engine in (None, "auto"):
            reason = "the folder holds graphs and no weights" if graphs else "providers are ONNX Runtime's"
        ignored = offer.unfollowed(bundle) if ignore_recipe else ""
        return Choice(
            named, reason, device_reason, dtype_reason, options, ignored, _in_force(offer, bundle, ignored)
        )

    passed_over: list[tuple[str, str]] = []
    for name, offer in OFFERS.items():
        options, dtype_reason = opened(name)
        problem = _refused(offer, bundle, options, ignore_recipe) or offer.unproved(bundle, options)
        if not problem:
            problem = _slow_start(name, bundle)
        if not problem and name == "cpu" and recipe(bundle) and not ignore_recipe:
            wins, found = _onnx_instead(bundle, replace(options, dtype="fp32", storage=""))
            if wins:
                problem = found
            elif found:
                passed_over.append(("onnx", found))
        if not problem:
            reason = f"the fastest that is proved for {bundle.manifest.architecture} on {where}"
            if recipe(bundle) and not ignore_recipe:
                reason = "it follows the bundle's recipe"
            elif _plays_shipped(name, bundle):
                reason = "its graphs of this policy come with Sinew, and torch, which the others need, is not installed"
                passed_over.clear()
            if _worth_saying(passed_over):
                reason += f"; {'; '.join(_worth_saying(passed_over))}"
            ignored = offer.unfollowed(bundle) if ignore_recipe else ""
            return Choice(
                name, reason, device_reason, dtype_reason, options, ignored, _in_force(offer, bundle, ignored)
            )
        passed_over.append((name, problem))
    raise SinewError(
        f"{bundle.path}: no engine can run this bundle on {where}: "
        + "; ".join(dict.fromkeys(problem for _, problem in passed_over))
    )


def choose_device(
    device: str | None, engine: str | None = None, graphs: Path | None = None
) -> tuple[str, str]:
    """Return the device and why: a GPU where PyTorch has one, unless the engine is ONNX Runtime's."""
    if device not in (None, "auto"):
        return device, ASKED
    if engine == "onnx" or graphs is not None:
        return "cpu", f"other hardware of ONNX Runtime's is chosen as {option('providers', ['openvino'])}"
    if engine == "cuda":
        return (
            "cuda",
            f"engine cuda is for GPUs; {option('device', 'cpu')} runs its kernels' twins, to test them",
        )
    if not machine.may_have_cuda():
        return "cpu", "no NVIDIA driver here"
    if not installed("torch"):
        return "cpu", "an NVIDIA driver is here, but no torch"
    import torch

    if torch.cuda.is_available():
        return "cuda", f"torch finds {torch.cuda.get_device_name(0)}"
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return "cpu", f"torch {torch.__version__} ({built}) finds no CUDA device"


def choose_dtype(dtype: str | None, device: str, engine: str = "eager") -> tuple[str, str]:
    """Return the precision of the weights (fp32, bf16, fp16, native) and why it was chosen."""
    if dtype is not None:
        return dtype_word(dtype), ASKED
    if device.partition(":")[0] == "cpu":
        return "fp32", "the reference precision; half-precision linear layers are slow on most CPUs"
    if engine == "cuda":
        return "bf16", "what the kernels' tensor cores multiply; projections of the head stay fp32"
    return "native", "as stored in the bundle"


def choose_precision(bundle: Bundle, dtype: str | None, device: str, engine: str) -> tuple[str, str, str]:
    """Return the precision of the weights, the half precision in which they are stored while products are float32
    ("" if they are not), and why."""
    chosen, reason = choose_dtype(dtype, device, engine)
    storage, why = half_storage(bundle, chosen, device, engine)
    return chosen, storage, f"{reason}; {why}" if storage else reason


def exported_graphs(bundle: Bundle) -> Path | None:
    """Return the folder of graphs that this bundle is the head of; None for a bundle with weights."""
    folder = bundle.path.parent
    return folder if not bundle.infos and (folder / "graphs.json").is_file() else None


def _refused(offer: Offer, bundle: Bundle, options: Options, ignore_recipe: bool) -> str:
    """Why an engine must not run this bundle, whoever asks for it."""
    if problem := offer.uninstalled() or offer.unfit(bundle, options):
        return problem
    if ignore_recipe or not (unfollowed := offer.unfollowed(bundle)):
        return ""
    able = followers(bundle)
    who = f"engine {' or '.join(able)} does" if able else "no engine here does"
    return (
        f"{bundle.path}: its recipe has {unfollowed}, which engine {offer.name} does not compute; {who}"
        f" ({option('ignore_recipe')} runs it unquantised and says so in every report)"
    )


def _in_force(offer: Offer, bundle: Bundle, ignored: str) -> Mapping[str, str]:
    return {} if ignored else {part: kind for part, kind in recipe(bundle).items() if kind in offer.follows}


def _slow_start(name: str, bundle: Bundle) -> str:
    """Why an engine that could run would keep its user waiting: nobody asked for an export of minutes."""
    if name != "onnx" or recipe(bundle) or (cache_folder(bundle.path) / "graphs.json").exists():
        return ""
    return "" if _plays_shipped(name, bundle) else f"{_no_graphs()}; {WORTH}"


def _no_graphs() -> str:
    return f"engine onnx has no graphs of this bundle yet; {option('engine', 'onnx')} exports them, once"


def _plays_shipped(name: str, bundle: Bundle) -> bool:
    """Return True for an embedded policy whose graphs came with this package, where torch is not installed: with torch
    other engines run it, which take more (guidance with a Jacobian, a time per row)."""
    return name == "onnx" and not installed("torch") and shipped(bundle.path) is not None


def _onnx_instead(bundle: Bundle, options: Options) -> tuple[bool, str]:
    """Return whether ONNX Runtime computes the bundle's recipe faster than engine cpu on this machine, and what to say
    of it: nothing where it could not run. Both obey the recipe, in ways that the words name."""
    offer = OFFERS["onnx"]
    kinds = recipe(bundle)
    if not offer.follows.issuperset(kinds.values()) or offer.uninstalled() or offer.unfit(bundle, options):
        return False, ""
    if problem := offer.unproved(bundle, options):
        return False, problem
    from sinew.engine.onnx.opening import usable_bits, variant

    bits = usable_bits(bundle)
    if not (cache_folder(bundle.path, variant(bits)) / "graphs.json").exists():
        return False, _no_graphs()
    if not installed("onnx"):
        return False, f"engine onnx was not measured beside it: {install('onnx')}"
    from sinew.engine.probe import measure

    try:
        measured = measure(bundle, kinds, options.threads)
    except Exception as error:  # noqa: BLE001, whatever ONNX Runtime has: engine cpu runs
        return False, f"engine onnx was not measured beside it: {type(error).__name__}: {error}"
    per = "tensor" if "int8" in kinds.values() else "token"
    parity = f"onnx rounds weights to {bits} bits and activations per {per}, cpu keeps 8 bits, per token"
    return measured.onnx_wins, f"{measured.text}; {parity}"


def _worth_saying(passed_over: Sequence[tuple[str, str]]) -> list[str]:
    return [problem for name, problem in passed_over if name != "cuda" or "valid" in problem]
