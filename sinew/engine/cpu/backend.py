"""The description of the engine "cpu", which computes matrix products with compiled kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from sinew.core import RTC, machine
from sinew.engine.backend import LOWBIT, YES, Backend, EngineOptions, Suitability
from sinew.engine.capability import Capability

if TYPE_CHECKING:
    from sinew.bundle import Bundle

# The Linux kernel's flags of CPUs whose kernels multiply bfloat16. Kernels for ARM without bfloat16 instructions use
# fmla. They belong to the kernels with dot products (csrc/dispatch.cpp).
BF16_FLAGS = frozenset({"avx512_bf16", "asimddp"})


class Cpu(Backend):
    """The engine that runs the rewritten model (the plan) with compiled kernels, on low-bit or bfloat16 weights."""

    name, opens = "cpu", "sinew.engine.cpu.open:open_cpu"
    follows = LOWBIT
    copies_none = True
    capabilities = frozenset(Capability) - {Capability.AUDIT, Capability.EXCHANGE, Capability.ADAPT}
    guides = RTC
    counted_as = "cpu"

    def can(self, bundle: Bundle, options: EngineOptions) -> Suitability:
        if (verdict := super().can(bundle, options)).against:
            return verdict
        half = options.dtype == "bf16" and not bundle.lowbit
        if options.kind != "cpu" or not (half or options.dtype == "fp32"):
            return Suitability(
                f"engine cpu computes fp32 with low-bit weights on cpu, not {options.dtype} on {options.device}"
            )
        if half and not self.multiplies("bf16"):
            return Suitability(
                "engine cpu multiplies bf16 with AVX512_BF16 or, on ARM, ASIMDDP only, which this CPU does not have"
            )
        if not (half or bundle.lowbit):
            return Suitability(
                "engine cpu needs low-bit weights, which this bundle does not have; make them with `sinew quantize`",
                elsewhere=True,
            )
        return YES

    def multiplies(self, dtype: str) -> bool:
        return dtype == "bf16" and not BF16_FLAGS.isdisjoint(machine.cpu_flags())

    def should(self, bundle: Bundle, options: EngineOptions, prepared: bool = False) -> Suitability:
        # The import compiles the kernels on the first call.
        from sinew.engine.cpu.kernels.library import extension

        if not extension().compiled:
            reason = extension().reason
            return Suitability(f"engine cpu is slow, because its kernels are not compiled ({reason})")
        return super().should(bundle, options, prepared)

    def product(self, bundle: Bundle, options: EngineOptions) -> Callable[[], object] | None:
        from sinew.engine.cpu.product import compiled_product  # this module imports torch

        if options.dtype == "bf16":
            return compiled_product("bf16")
        ((kind, _),) = Counter(bundle.lowbit.values()).most_common(1)
        return compiled_product(kind)


BACKEND = Cpu()
