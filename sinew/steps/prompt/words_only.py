"""A step that formats the instruction as GR00T's function ``formalize_language`` does."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class InstructionPrompt(PromptStep):
    """Write the instruction in lower case, with letters, digits, underscores and spaces only."""

    kind: Literal["words_only"] = field(default="words_only", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=re.sub(r"[^\w\s]", "", said.instruction.lower()))

    def __str__(self) -> str:
        return "small letters, digits and spaces alone"
