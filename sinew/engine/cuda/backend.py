"""The description of the engine "cuda" for NVIDIA GPUs, which Sinew reads before it opens the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinew.core.hints import option
from sinew.core.registry import model_class
from sinew.engine import prepared as findings
from sinew.engine.backend import LOWBIT, Backend, EngineOptions, Suitability, unproved
from sinew.engine.capability import Capability, Refusal

if TYPE_CHECKING:
    from sinew.bundle import Bundle


class Cuda(Backend):
    name, opens = "cuda", "sinew.engine.cuda.open:open_cuda"
    follows = LOWBIT | {"fp8"}
    stores_half = False
    capabilities = frozenset({Capability.BATCH, Capability.GUIDE, Capability.STREAM, Capability.AUDIT})
    guides = ("no-jacobian", "ramp")  # the graphs have no Jacobian and no denoising time per action

    def should(self, bundle: Bundle, options: EngineOptions, prepared: bool = False) -> Suitability:
        if options.kind == "cpu":
            against = "on a CPU, engine cuda runs the references of its kernels, which are for tests only"
            return Suitability(against, elsewhere=True)
        finding = findings.kept(bundle.path, self.name, options.threads)
        against = unproved(self, bundle, options) or (finding.why if finding and not finding.taken else "")
        # `sinew prepare` compiles, verifies and measures the kernels on this machine's GPU.
        return Suitability(against, preparable=options.kind == "cuda")

    def streams(self, bundle: Bundle, options: EngineOptions) -> Refusal | None:
        if bundle.manifest.config.get("rolling"):
            return self.lacking(Capability.ROLL)
        from sinew.models.base import AutoregressiveModel

        if issubclass(model_class(bundle.manifest.architecture), AutoregressiveModel):
            # The CPU reads each token, and the graph of a token changes the context.
            return Refusal(f"a head with solver steps on engine {self.name}", "one that generates tokens")
        return None

    def device(self) -> tuple[str, str]:
        return (
            "cuda",
            f"engine cuda is for GPUs; {option('device', 'cpu')} runs the references of its kernels, for tests",
        )

    def dtype(self, kind: str) -> tuple[str, str]:
        if kind == "cpu":
            return super().dtype(kind)
        return "bf16", "the kernels multiply bf16 on tensor cores; the head's projections stay fp32"


BACKEND = Cuda()
