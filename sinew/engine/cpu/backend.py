"""The engine of low-bit products, before it is opened."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sinew.core.extras import install
from sinew.engine import prepared
from sinew.engine.backend import BACKENDS, LOWBIT, Backend, EngineOptions, installed, recipe

if TYPE_CHECKING:
    from sinew.bundle import Bundle


class Cpu(Backend):
    """The planned model over low-bit weights as the bundle stores them, multiplied by compiled kernels."""

    name, opens = "cpu", "sinew.engine.cpu.open:open_cpu"
    follows = LOWBIT
    copies_none = True
    counted_as = "cpu"

    def unfit(self, bundle: Bundle, options: EngineOptions) -> str:
        if problem := super().unfit(bundle, options):
            return problem
        if options.kind != "cpu" or options.dtype != "fp32":
            return f"engine cpu computes in fp32 around low-bit weights on cpu, not {options.dtype} on {options.device}"
        if not bundle.lowbit:
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
        """Ask ONNX Runtime, which computes some recipes too, in ways that the words name."""
        other, kinds = BACKENDS["onnx"], recipe(bundle)
        options = replace(options, dtype="fp32", storage="")
        if not other.follows.issuperset(kinds.values()) or other.why_not(bundle, options):
            return False, ""
        if problem := other.unproved(bundle, options):
            return False, problem
        from sinew.engine.onnx.backend import lacks_graphs

        found = prepared.kept(bundle.path, other.name)
        measured_here = found is not None and found.against == self.name  # the very bundle
        if found is not None and measured_here and not found.taken:
            return False, found.why
        if lacking := lacks_graphs(bundle):
            return False, lacking
        if found is not None and measured_here:
            return True, found.why
        if not installed("onnx"):
            return False, f"engine onnx was not measured beside it: {install('onnx')}"
        from sinew.engine.cpu.probe import measure
        from sinew.engine.onnx.opening import usable_bits

        try:
            measured = measure(bundle, kinds, options.threads)
        except Exception as error:  # noqa: BLE001, whatever ONNX Runtime has: engine cpu runs
            return False, f"engine onnx was not measured beside it: {type(error).__name__}: {error}"
        per = "tensor" if "int8" in kinds.values() else "token"
        bits = usable_bits(bundle)
        parity = f"onnx rounds weights to {bits} bits and activations per {per}, cpu keeps 8 bits, per token"
        return measured.onnx_wins, f"{measured.text}; {parity}"


BACKEND = Cpu()
