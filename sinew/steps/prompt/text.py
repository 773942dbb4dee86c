"""A step that writes fixed text into a prompt."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText, Written


@dataclass(frozen=True)
class Text(PromptStep):
    """Write the fixed text ``text``, which is the same for every instruction."""

    text: Written
    kind: Literal["text"] = field(default="text", kw_only=True, repr=False)

    @property
    def slot(self) -> str:
        return self.text

    def forward(self, said: PromptText) -> PromptText:
        return said.saying(self.text)

    def __str__(self) -> str:
        return json.dumps(self.text)
