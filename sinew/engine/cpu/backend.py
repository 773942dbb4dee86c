"""The engine of compiled products, before it is opened."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sinew.core import RTC, machine
from sinew.engine import prepared
from sinew.engine.backend import BACKENDS, LOWBIT, Backend, EngineOptions, recipe
from sinew.engine.capability import Capability

if TYPE_CHECKING:
    from sinew.bundle import Bundle


class Cpu(Backend):
    """The planned model over low-bit weights as the bundle stores them, or in bfloat16, with compiled kernels."""

    name, opens = "cpu", "sinew.engine.cpu.open:open_cpu"
    follows = LOWBIT
    copies_none = True
    capabilities = frozenset(Capability) - {Capability.AUDIT, Capability.EXCHANGE, Capability.ADAPT}
    guides = RTC
    counted_as = "cpu"

    def unfit(self, bundle: Bundle, options: EngineOptions) -> str:
        if problem := super().unfit(bundle, options):
            return problem
        half = options.dtype == "bf16" and not bundle.lowbit
        if options.kind != "cpu" or not (half or options.dtype == "fp32"):
            return f"engine cpu computes in fp32 around low-bit weights on cpu, not {options.dtype} on {options.device}"
        if half and "avx512_bf16" not in machine.cpu_flags():
            return "engine cpu multiplies bf16 on CPUs with AVX512_BF16, which this one lacks"
        if not (half or bundle.lowbit):
            return (
                "engine cpu is for weights that `sinew quantize` stored in few bits, and this bundle has none"
            )
        return ""

    def unproved(self, bundle: Bundle, options: EngineOptions) -> str:
        from sinew.engine.cpu.kernels.library import extension  # compiles the kernels, once

        if not extension().compiled:
            return f"engine cpu has no compiled kernels ({extension().reason}), and is slow without them"
        return super().unproved(bundle, options)

    def rival(self, bundle: Bundle, options: EngineOptions) -> tuple[bool, str]:
        """Ask what `sinew prepare` found of ONNX Runtime, which computes some recipes too, in ways that it names."""
        other, options = BACKENDS["onnx"], replace(options, dtype="fp32", storage="")
        if not other.follows.issuperset(recipe(bundle).values()) or other.why_not(bundle, options):
            return False, ""
        if problem := other.unproved(bundle, options):
            return False, problem
        from sinew.engine.onnx.backend import lacks_graphs, once_made

        found = prepared.kept(bundle.path, other.name)
        if found is None or found.against != self.name:
            asked = once_made(f"`sinew prepare {bundle.path}` measures it, as `sinew serve` does by itself")
            return False, lacks_graphs(bundle) or f"engine onnx was not measured beside it: {asked}"
        lacking = found.taken and lacks_graphs(bundle)
        return (False, lacking) if lacking else (found.taken, found.why)


BACKEND = Cpu()
