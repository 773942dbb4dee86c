"""A step with pi0.5's cleaning of an instruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class Clean(PromptStep):
    """Remove white space around the instruction, and replace underscores and line breaks by spaces."""

    kind: Literal["clean"] = field(default="clean", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=said.instruction.strip().replace("_", " ").replace("\n", " "))

    def __str__(self) -> str:
        return "underscores and line breaks as spaces"
