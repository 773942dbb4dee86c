"""The engine for NVIDIA GPUs, before it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinew.core.hints import option
from sinew.engine import prepared as findings
from sinew.engine import proofs
from sinew.engine.backend import Backend, EngineOptions
from sinew.engine.capability import Capability, Refusal

if TYPE_CHECKING:
    from sinew.bundle import Bundle


class Cuda(Backend):
    name, opens = "cuda", "sinew.engine.cuda.open:open_cuda"
    follows = frozenset({"fp8"})
    stores_half = False
    capabilities = frozenset({Capability.GUIDE, Capability.AUDIT})
    guides = ("no-jacobian", "ramp")  # graphs have neither a Jacobian nor a time per row

    def unproved(self, bundle: Bundle, options: EngineOptions) -> str:
        if options.kind == "cpu":
            return "engine cuda runs its kernels' references on a CPU, which is for tests of them"
        return proofs.lacking(bundle.path, self.name, options.device)

    def slow_start(self, bundle: Bundle, prepared: bool = False) -> str:
        found = findings.kept(bundle.path, self.name)
        return "" if found is None or found.taken else found.why

    def preparable(self, bundle: Bundle, kind: str) -> bool:
        """Its kernels are compiled, proved and measured on the GPU that is here."""
        return kind == "cuda"

    def streams(self, bundle: Bundle, options: EngineOptions) -> Refusal | None:
        return self.lacking(Capability.STREAM)

    def device(self) -> tuple[str, str]:
        return (
            "cuda",
            f"engine cuda is for GPUs; {option('device', 'cpu')} runs its kernels' references, to test them",
        )

    def dtype(self, kind: str) -> tuple[str, str]:
        if kind == "cpu":
            return super().dtype(kind)
        return "bf16", "what the kernels' tensor cores multiply; projections of the head stay fp32"


BACKEND = Cuda()
