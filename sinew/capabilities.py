"""The record of the operations that a loaded policy supports. It is made once, from the policy's engine and its bundle.

Metadata, error messages and ``sinew doctor`` use this record. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinew.bundle import Manifest
from sinew.core import RTC, Observation, ObservationError, PolicySpec
from sinew.engine.backend import either, engines_that
from sinew.engine.capability import Capability, Refusal
from sinew.engine.engine import Facts
from sinew.processing.continuation import kind_of

TEXTS = ("subtask", "question")  # fields of an observation that request text


@dataclass(frozen=True)
class Capabilities:
    """The operations that a policy supports, and the reasons why other operations are not supported.

    Attributes:
        engine: Name of the engine.
        guides: The methods of continuing a running chunk that the engine supports: values of an observation's ``rtc``.
        guidance: The methods that this policy supports on this engine. Empty if the policy cannot continue a running
            chunk.
        texts: The fields that may request text: "subtask", "question".
        advantages: The values that an observation's ``advantage`` may have. An advantage is a text in the prompt that
            states how good the actions should be. Empty if the prompt contains none.
        usual_advantage: The advantage that is used for observations without one.
        language_head: How the bundle stores its language head. "" if the bundle has no language head.
        refusals: The capabilities that this policy lacks, each with the reason.
    """

    engine: str
    guides: tuple[str, ...]
    guidance: tuple[str, ...]
    texts: tuple[str, ...]
    advantages: tuple[str, ...]
    usual_advantage: str
    language_head: str
    refusals: Mapping[Capability, Refusal]

    @classmethod
    def of(cls, manifest: Manifest, facts: Facts, engine: str) -> Capabilities:
        """Find the capabilities of a bundle on an open engine.

        If both the bundle and the engine lack a capability, the record has the reason of the bundle.

        Args:
            manifest: Manifest of the bundle.
            facts: Facts of the open engine.
            engine: Name of the engine.

        Returns:
            The record, which does not change while the policy is open.
        """
        refusals = {**facts.refusals, **_of_bundle(manifest)}
        prompt = manifest.processing.prompt
        guides = () if Capability.GUIDE in refusals else facts.guides
        return cls(
            engine=engine,
            guides=facts.guides,
            guidance=tuple(kind for kind in guides if kind != "trained" or manifest.spec.committed_rows),
            texts=() if Capability.SPEAK in refusals else _texts(manifest),
            advantages=prompt.advantages,
            usual_advantage=prompt.usual_advantage,
            language_head=str(manifest.config.get("lm_head", "")),
            refusals=refusals,
        )

    def why_not(self, capability: Capability) -> str:
        """Return the reason why the policy lacks a capability, as ``expected X, got Y``. "" if it is supported."""
        return str(self.refusals.get(capability, ""))

    def to_dict(self) -> dict[str, Any]:
        """Return the record in the form of a server's metadata, ready for JSON."""
        return {
            "unguided": self.why_not(Capability.GUIDE),
            "guidance": list(self.guidance),
            "advantages": list(self.advantages),
            "usual_advantage": self.usual_advantage,
            "unscaled": self.why_not(Capability.TWO_PROMPTS),
            "unbatched": self.why_not(Capability.BATCH),
            "unstreamed": self.why_not(Capability.STREAM),
            "lm_head": self.language_head,
            "says": list(self.texts),
        }

    def check(self, observation: Observation, spec: PolicySpec) -> None:
        """Raise :class:`ObservationError` if a field requests a capability that this policy lacks."""
        request = observation.continuation
        if request is not None and request.previous is not None:
            self._require(Capability.GUIDE, "previous")
            kind = kind_of(request, spec)
            if kind in RTC and kind not in self.guides:
                able = either(engines_that(guides=RTC))
                guides = either(self.guides)
                raise ObservationError(
                    "rtc", f"{guides} on engine {self.engine}; engine {able} supports all values", kind
                )
        if field := observation.asks:
            self._require(Capability.SPEAK, field, "nothing, or ")
        scale = observation.guidance_scale
        # The guidance scales 0 and 1 need only one prompt, so every engine supports them. The processor later rejects
        # scales that are not numbers, and observations whose prompt has no advantage.
        if isinstance(scale, (int, float, np.number)) and scale not in (0, 1) and self.advantages:
            self._require(Capability.TWO_PROMPTS, "guidance_scale")

    def _require(self, capability: Capability, field: str, instead: str = "") -> None:
        if refusal := self.refusals.get(capability):
            raise ObservationError(field, instead + refusal.expected, refusal.got)


def _texts(manifest: Manifest) -> tuple[str, ...]:
    recipe = manifest.processing.prompt.text
    return () if recipe is None else tuple(name for name in TEXTS if getattr(recipe, name))


def _of_bundle(manifest: Manifest) -> dict[Capability, Refusal]:
    """Return the capabilities that a bundle lacks on every engine, each with the reason."""
    spec = manifest.spec
    refusals: dict[Capability, Refusal] = {}
    solver = Refusal("a policy that integrates a velocity", f"solver {spec.solver.kind}")
    if step := next((step for step in manifest.processing.action_steps if step.no_inverse), None):
        expected = "a policy whose action steps can all be inverted"
        refusals[Capability.GUIDE] = Refusal(expected, f"a step {step.kind}: {step.no_inverse}")
    if spec.solver.kind != "euler":
        refusals |= dict.fromkeys((Capability.GUIDE, Capability.TWO_PROMPTS), solver)
    if not manifest.processing.prompt.advantages:
        expected = "a policy whose prompt contains an advantage"
        refusals[Capability.TWO_PROMPTS] = Refusal(expected, spec.architecture)
    head = manifest.config.get("lm_head", "")
    if not head or not _texts(manifest):
        required = "a bundle with a language head and a prompt for text"
        got = f"{spec.name}, which has {'no prompt for text' if head else 'no language head'}"
        how = "sinew convert --set lm_head=true"
        refusals[Capability.SPEAK] = Refusal(f"{required} ({how})", got)
    return refusals
