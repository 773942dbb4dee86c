"""The engines, and what each of them answers before it is opened. Needs no torch: a robot with graphs alone has none.

An :class:`Offer` answers four questions by name of what is wrong: is the engine installed, does it fit the device,
does it follow the bundle's recipe, is it proved for the bundle. :mod:`sinew.engine.choose` asks them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinew.core import SinewError, install
from sinew.engine import proofs
from sinew.hints import option

if TYPE_CHECKING:
    from sinew.bundle import Bundle

LOWBIT = frozenset({"int8", "int8-rows", "q8_0", "q4_0"})  # precisions that weights are stored in
TESTED = frozenset({"smolvla", "pi0", "pi05"})  # architectures with golden tests of every engine on a CPU
# The others are held against their references in fp32, unquantised: docs/proofs.json, which a test compares with this.
_OTHERS = frozenset(
    ["gr00t_n1_5", "gr00t_n1_6", "gr00t_n1_7", "evo1", "openvla", "openvla_oft", "vla_jepa", "vla_adapter"]
)
PROVED = {"plan": _OTHERS | {"bitvla"}, "onnx": _OTHERS, "cpu": frozenset({"bitvla"})}


@dataclass(frozen=True, slots=True)
class Options:
    """The options that an engine is opened with.

    ``dtype``: fp32, bf16, fp16 or native. ``recipe``: True to follow the bundle's.
    ``graphs``: the folder of an export; None for a bundle with weights. ``storage``: the half precision in which
    weights stay while products are float32 (:func:`sinew.engine.storage.half_storage`), else empty.
    """

    device: str = "cpu"
    dtype: str = "fp32"
    threads: int | None = None
    providers: tuple[str, ...] = ()
    graphs: Path | None = None
    recipe: bool = True
    storage: str = ""


class Offer:
    """One engine: how it is opened, and whether it can and should be. Each ``un...`` method returns what is wrong,
    or nothing."""

    name: str
    opens: str  # "module:function" of (bundle, options)
    packages: tuple[str, ...] = ("torch",)
    follows: frozenset[str] = frozenset()  # precisions of a recipe, besides fp32

    def uninstalled(self) -> str:
        missing = [package for package in self.packages if not installed(package)]
        return f"engine {self.name} needs {missing[0]}: {install(missing[0])}" if missing else ""

    def unfit(self, bundle: Bundle, options: Options) -> str:
        """Return why this engine cannot run the bundle on the device; reads no weights."""
        if options.graphs is not None:
            return f"engine {self.name}: {options.graphs} holds graphs and no weights; engine onnx runs them"
        if options.providers:
            return f"provider {', '.join(options.providers)}: expected engine onnx, got {self.name}"
        return ""

    def unfollowed(self, bundle: Bundle) -> str:
        """Return the parts of the bundle's recipe that this engine does not compute.

        Every engine computes with weights that are stored in few bits: it may widen them, which rounds nothing.
        """
        stored = LOWBIT if bundle.lowbit else frozenset()
        return ", ".join(
            f"{part} {kind}" for part, kind in recipe(bundle).items() if kind not in self.follows | stored
        )

    def unproved(self, bundle: Bundle, options: Options) -> str:
        """Return why nothing shows that this engine computes what the reference computes."""
        architecture = bundle.manifest.architecture
        plain = options.dtype == "fp32" and not recipe(bundle)
        proved = TESTED | PROVED.get(self.name, frozenset()) if plain else TESTED
        if _type(options.device) == "cpu" and architecture in proved:
            return ""
        return proofs.lacking(bundle.path, self.name, options.device)

    def open(self, bundle: Bundle, options: Options) -> Any:
        """Return the engine; raises :class:`SinewError` for what keeps it from running."""
        for problem in (self.uninstalled(), self.unfit(bundle, options)):
            if problem:
                raise SinewError(problem)
        module, _, function = self.opens.partition(":")
        return getattr(import_module(module), function)(bundle, options)


class Eager(Offer):
    name, opens = "eager", "sinew.engine.loading:open_eager"

    def unproved(self, bundle: Bundle, options: Options) -> str:
        return ""  # it is what the others are compared with


class Planned(Offer):
    name, opens = "plan", "sinew.engine.loading:open_planned"


class Cpu(Offer):
    """The planned model over low-bit weights as the bundle stores them, multiplied by compiled kernels."""

    name, opens = "cpu", "sinew.engine.loading:open_cpu"
    follows = LOWBIT

    def unfit(self, bundle: Bundle, options: Options) -> str:
        if problem := super().unfit(bundle, options):
            return problem
        if _type(options.device) != "cpu" or options.dtype != "fp32":
            return f"engine cpu computes in fp32 around low-bit weights on cpu, not {options.dtype} on {options.device}"
        if not bundle.lowbit:
            return (
                "engine cpu computes on weights that `sinew quantize` stored in few bits, and this bundle has none;"
                " engine plan runs it"
            )
        return ""

    def unproved(self, bundle: Bundle, options: Options) -> str:
        from sinew.engine.cpu import extension  # compiles the kernels, once

        if not extension().compiled:
            return f"engine cpu has no compiled kernels ({extension().reason}), and is slow without them"
        return super().unproved(bundle, options)


class Onnx(Offer):
    name, opens = "onnx", "sinew.engine.onnx.opening:open_onnx"
    packages = ("onnxruntime",)
    follows = frozenset({"int8", "int8-rows"})

    def unfit(self, bundle: Bundle, options: Options) -> str:
        if _type(options.device) != "cpu" or options.dtype != "fp32":
            return (
                f"engine onnx runs fp32 on cpu, not {options.dtype} on {options.device};"
                f" other hardware is chosen as {option('providers', ['openvino'])},"
                " less precision with `sinew quantize`"
            )
        if not options.recipe and recipe(bundle):
            return "engine onnx runs the bundle's graphs, which follow its recipe; engine plan can ignore it"
        return ""


class Cuda(Offer):
    name, opens = "cuda", "sinew.engine.loading:open_cuda"
    follows = frozenset({"fp8"})

    def unproved(self, bundle: Bundle, options: Options) -> str:
        if _type(options.device) == "cpu":
            return "engine cuda runs its kernels' twins on a CPU, which is for tests of them"
        return proofs.lacking(bundle.path, self.name, options.device)


# The order is that of speed, where they run (docs/engines.md); the last one runs everywhere.
OFFERS: dict[str, Offer] = {offer.name: offer for offer in (Cuda(), Cpu(), Onnx(), Planned(), Eager())}
ENGINES = ("auto", "eager", "plan", "cpu", "onnx", "cuda")


def recipe(bundle: Bundle) -> dict[str, str]:
    """Return the components that the bundle wants below its dtype, with their precision."""
    found = bundle.manifest.quantization
    return {} if found is None else {part: kind for part, kind in found.recipe.items() if kind != "fp32"}


def followers(bundle: Bundle) -> Sequence[str]:
    """Return the names of the engines that follow the bundle's recipe and can run it somewhere."""
    return [
        name
        for name, offer in OFFERS.items()
        if not (offer.unfollowed(bundle) or offer.unfit(bundle, Options()))
    ]


def installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # the parent of a dotted name; a module blocked in sys.modules
        return False


def _type(device: str) -> str:
    return device.partition(":")[0]
