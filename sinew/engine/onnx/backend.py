"""The description of the ONNX engine, which Sinew reads before it opens the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinew.core.extras import install
from sinew.core.hints import option
from sinew.engine import prepared as findings
from sinew.engine.backend import (
    BACKENDS,
    YES,
    Backend,
    EngineOptions,
    Suitability,
    either,
    installed,
    recipe,
    unproved,
)
from sinew.engine.capability import Capability, Refusal
from sinew.engine.onnx.borrowed import shipped
from sinew.engine.onnx.cache import graphs_folder

if TYPE_CHECKING:
    from sinew.bundle import Bundle

MAKERS = ("torch", "onnx", "onnxscript")  # packages that an export needs
WORTH = "in measurements it was 1.1 to 4.6 times as fast as engine plan"


class Onnx(Backend):
    name, opens = "onnx", "sinew.engine.onnx.opening:open_onnx"
    packages = ("onnxruntime",)
    follows = rounds = frozenset({"int8", "int8-rows"})
    stores_half = False
    runs_graphs = True
    capabilities = frozenset(
        {
            Capability.GUIDE,
            Capability.BATCH,
            Capability.STREAM,
            Capability.TWO_PROMPTS,
            Capability.REUSE,
        }
    )
    guides = ("no-jacobian", "ramp")  # the graphs have no Jacobian and no denoising time per action

    def can(self, bundle: Bundle, options: EngineOptions) -> Suitability:
        if options.kind != "cpu" or options.dtype != "fp32":
            return Suitability(
                f"engine onnx runs fp32 on cpu, not {options.dtype} on {options.device}; choose other hardware"
                f" with {option('providers', ['openvino'])}, and a lower precision with `sinew quantize`"
            )
        if not options.recipe and recipe(bundle):
            able = either(
                [name for name, each in BACKENDS.items() if not each.follows and not each.reference]
            )
            return Suitability(
                f"engine onnx runs the bundle's graphs, which follow its recipe; use engine {able} to ignore the recipe"
            )
        return YES

    def streams(self, bundle: Bundle, options: EngineOptions) -> Refusal | None:
        return self.lacking(Capability.ROLL) if bundle.manifest.config.get("rolling") else None

    def device(self) -> tuple[str, str]:
        return "cpu", f"choose other hardware of ONNX Runtime with {option('providers', ['openvino'])}"

    def should(self, bundle: Bundle, options: EngineOptions, prepared: bool = False) -> Suitability:
        unmade = lacks_graphs(bundle)
        against = unproved(self, bundle, options) or self._slow_start(bundle, options, unmade, prepared)
        reason = (
            "Sinew contains graphs of this policy, and the other engines need torch, which is not installed"
        )
        return Suitability(
            against,
            reason=reason if self._plays_shipped(bundle) else "",
            unmade=unmade,
            preparable=bool(against or unmade) and options.kind == "cpu" and self._preparable(bundle),
        )

    def _slow_start(self, bundle: Bundle, options: EngineOptions, unmade: str, prepared: bool) -> str:
        """Return the reason why Sinew must not choose this engine by itself, because it would start slowly or lack a
        capability; "" if there is no such reason.
        """
        kinds = {*recipe(bundle).values()}
        if (kinds and self.follows.issuperset(kinds)) or self._plays_shipped(bundle):
            # A recipe is followed even if its graphs must be exported first.
            return ""
        if kinds and unmade:
            return f"engine onnx also widens these weights, after an export, which {option('engine', 'onnx')} starts"
        if bundle.manifest.config.get("lm_head"):
            run = option("engine", "onnx")
            return f"engine onnx cannot generate text with this bundle's language head; {run} runs it without text"
        finding = findings.kept(bundle.path, self.name, options.threads)
        if finding is not None and not finding.taken:
            return finding.why
        if unmade and shipped(bundle.path) is not None:
            if prepared and finding is not None:
                return ""
            request = option("engine", "onnx")
            return f"engine onnx has graphs that come with Sinew and support no guidance; {request} runs them"
        return unmade and f"{unmade}; {WORTH}"

    def _preparable(self, bundle: Bundle) -> bool:
        """Return True if ``sinew prepare`` can export the graphs, or can verify and measure the graphs that come with
        Sinew.
        """
        config = bundle.manifest.config
        if bundle.manifest.spec.committed_rows or config.get("rolling") or config.get("lm_head"):
            # The graphs do not support three features that such a bundle needs: an action prefix, a denoising time
            # per action, or text.
            return False
        if shipped(bundle.path) is not None:
            # Examples in the documentation use real-time chunking with this policy, which its graphs do not support.
            return bundle.manifest.spec.solver.kind != "euler"
        return all(map(installed, MAKERS))

    def _plays_shipped(self, bundle: Bundle) -> bool:
        """Return True for a built-in policy whose graphs come with Sinew, if torch is not installed.

        With torch, other engines run the policy and support more (guidance with a Jacobian, a denoising time per
        action).
        """
        return not installed("torch") and shipped(bundle.path) is not None


def lacks_graphs(bundle: Bundle) -> str:
    """Return a message if the bundle must be exported before this engine can run it; "" if the graphs exist."""
    if (graphs_folder(bundle) / "graphs.json").exists():
        return ""
    how = (
        "run `sinew prepare` to export, verify and measure them (`sinew serve` does that in the background);"
    )
    how = once_made(f"{how} {option('engine', 'onnx')} only exports them")
    return f"engine onnx has no graphs of this bundle yet: {how}"


def once_made(how: str) -> str:
    """Complete the instruction ``how`` for the user, which tells how to export graphs.

    If a package for the export is missing, the result is an instruction to install this package instead.
    """
    missing = next((module for module in MAKERS if not installed(module)), "")
    return f"an export needs {missing}: {install(missing)}" if missing else how


BACKEND = Onnx()
