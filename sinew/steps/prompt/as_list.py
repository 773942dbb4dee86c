"""An instruction as Python writes a list of one text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class AsList(PromptStep):
    """``['pick it up']``."""

    kind: Literal["as_list"] = field(default="as_list", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=str([said.instruction]))

    def __str__(self) -> str:
        return "as a list of one text"
