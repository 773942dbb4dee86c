"""An instruction without the white space around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class Strip(PromptStep):
    """The instruction without the spaces and line breaks around it."""

    kind: Literal["strip"] = field(default="strip", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=said.instruction.strip())

    def __str__(self) -> str:
        return "stripped"
