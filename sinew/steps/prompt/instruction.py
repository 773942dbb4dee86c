"""A step for the position of the instruction in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class Instruction(PromptStep):
    """Write the instruction, after the changes of the previous steps."""

    kind: Literal["instruction"] = field(default="instruction", kw_only=True, repr=False)
    slot = "{prompt}"

    def forward(self, said: PromptText) -> PromptText:
        return said.saying(said.instruction)

    def __str__(self) -> str:
        return "the instruction"
