"""A step that writes the instruction as a Python list with one string."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class AsList(PromptStep):
    """Write the instruction as a Python list with one string, such as ``['pick it up']``."""

    kind: Literal["as_list"] = field(default="as_list", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=str([said.instruction]))

    def __str__(self) -> str:
        return "as a list of one text"
