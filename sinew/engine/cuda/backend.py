"""The engine for NVIDIA GPUs, before it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinew.engine import proofs
from sinew.engine.backend import Backend, EngineOptions
from sinew.hints import option

if TYPE_CHECKING:
    from sinew.bundle import Bundle

UNSHARED = "expected engine eager, plan, cpu or onnx, whose stages share no memory, got cuda"


class Cuda(Backend):
    name, opens = "cuda", "sinew.engine.cuda.open:open_cuda"
    follows = frozenset({"fp8"})
    stores_half = False

    def unproved(self, bundle: Bundle, options: EngineOptions) -> str:
        if options.kind == "cpu":
            return "engine cuda runs its kernels' references on a CPU, which is for tests of them"
        return proofs.lacking(bundle.path, self.name, options.device)

    def unshared(self, bundle: Bundle, options: EngineOptions) -> str:
        return UNSHARED

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
