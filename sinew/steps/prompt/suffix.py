"""A step for the last text of a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText, Written


@dataclass(frozen=True)
class Suffix(PromptStep):
    """Write ``text``, unless the prompt ends in this text already."""

    text: Written
    kind: Literal["suffix"] = field(default="suffix", kw_only=True, repr=False)

    @property
    def slot(self) -> str:
        return self.text

    def forward(self, said: PromptText) -> PromptText:
        return said if said.text.endswith(self.text) else said.saying(self.text)

    def __str__(self) -> str:
        return f"{json.dumps(self.text)} at the end"
