"""A step that removes the white space around an instruction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class Strip(PromptStep):
    """Remove the spaces and line breaks around the instruction."""

    kind: Literal["strip"] = field(default="strip", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=said.instruction.strip())

    def __str__(self) -> str:
        return "stripped"
