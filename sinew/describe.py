"""Describe a loaded policy in words, for metadata, reports, notebooks and ``sinew doctor``."""

from __future__ import annotations

import html
from typing import Any

from sinew.assemble import LoadedPolicy, identity
from sinew.engine.backend import REFERENCE, other_precision
from sinew.processing import Prepared


class DescribedPolicy(LoadedPolicy):
    """The parts of a loaded policy, and the methods that describe it for people and for metadata."""

    def __repr__(self) -> str:
        spec, cameras = self.spec, ", ".join(camera.name for camera in self.spec.cameras)
        return (
            f"<sinew.Policy {spec.name!r} ({spec.architecture}), cameras {cameras},"
            f" state {spec.state.dim}, action {spec.action.dim}, chunks of {spec.chunk_size};"
            f" engine {self.choice.engine} on {self.facts.device}, {self.precision_text}>"
        )

    def _repr_html_(self) -> str:
        """Return an HTML table for notebooks, with inputs, outputs, engine, device, precision and the reasons."""
        spec, about = self.spec, self.describe()
        rows = {
            "policy": f"{spec.name} ({spec.architecture})",
            "cameras": ", ".join(f"{each.name} {each.height}x{each.width}" for each in spec.cameras),
            "state": ", ".join(spec.state.labels) or f"{spec.state.dim} numbers",
            "action": f"{', '.join(spec.action.labels) or f'{spec.action.dim} numbers'}; chunks of {spec.chunk_size}",
            **{name: f"{about[name]}: {about[f'{name}_reason']}" for name in ("engine", "device", "dtype")},
        }
        cells = (f"<tr><th>{name}</th><td>{html.escape(text)}</td></tr>" for name, text in rows.items())
        return f"<table>{''.join(cells)}</table>"

    @property
    def precision_text(self) -> str:
        """The precision of the computation as text, such as "bf16".

        If the engine ignores the bundle's quantisation recipe, the text also states this recipe.
        """
        kinds, ignored = self.facts.precision, self.choice.ignored
        if len({*kinds.values()}) < 2:
            text = next(iter(kinds.values()), self.choice.options.dtype)
        else:
            text = ", ".join(f"{part} {kind}" for part, kind in kinds.items())
        return f"{text} (the bundle's recipe is IGNORED: {ignored})" if ignored else text

    @property
    def dtype_reason(self) -> str:
        """The reason, as text, why the weights have their precision."""
        reason = "the bundle's recipe" if self.facts.recipe else self.choice.dtype_reason
        return f"{reason}; {other_precision()}" if reason.startswith(REFERENCE) else reason

    @property
    def threads_reason(self) -> str:
        """The reason, as text, why the engine has its number of threads."""
        return self.start.threads_reason

    def describe(self) -> dict[str, Any]:
        """Return the engine, device and precision with the reasons for their choice, ready for JSON.

        Metadata, reports and ``sinew doctor`` show this description.
        """
        return {
            "identity": self.identity,
            "engine": self.choice.engine,
            "engine_reason": self.choice.engine_reason,
            "device": self.facts.device,
            "device_reason": self.choice.device_reason,
            "dtype": self.precision_text,
            "dtype_reason": self.dtype_reason,
            "precision": dict(self.facts.precision),
            "providers": list(self.facts.providers),
            "assigned": self.facts.assigned,
            "ignored_recipe": self.choice.ignored,
            **self.capabilities.to_dict(),
            "reuse": self.start.reuse_reason,
            "adapters": {
                name: {"policy": each.manifest.name, "hash": identity(each)["hash"]}
                for name, each in self.adapters.items()
            },
        }

    def metadata(self) -> dict[str, Any]:
        """Return the metadata that a server with default settings would send for this policy.

        Returns:
            ``policy``: inputs and outputs, with the limits of the actions. ``server``: engine and precision, from
                :meth:`describe`.
        """
        from sinew.processing.safety import Safety

        described = self.spec.to_dict()
        described["action"]["limits"] = Safety(self.processors[""]).limits()
        return {"policy": described, "server": self.describe()}

    def warnings(self, member: Prepared) -> tuple[str, ...]:
        """Return one warning, as a sentence, for each input that a prepared observation does not contain."""
        spec, names = self.spec, ", ".join(member.missing)
        count = spec.history - member.unsent
        sentences = [f"no frame for {names}: the policy ran without these frames"] if names else []
        if member.unsent and spec.history_padding == "repeat":
            sentences.append(
                f"earlier: the policy uses {spec.history} observation steps and got {count};"
                " the oldest step is repeated"
            )
        elif member.unsent and count == 1:
            sentences.append(
                f"earlier: the policy uses {spec.history} observation steps, {spec.history_stride} control steps"
                " apart, and got 1, which is normal at the start of an episode only"
            )
        if self.choice.ignored:
            sentences.append(f"the bundle's recipe is ignored: {self.choice.ignored}")
        return tuple(sentences)
