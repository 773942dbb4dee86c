"""A step that writes the instruction in lower case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class Lower(PromptStep):
    """Write the instruction in lower case."""

    kind: Literal["lower"] = field(default="lower", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=said.instruction.lower())

    def __str__(self) -> str:
        return "in small letters"
