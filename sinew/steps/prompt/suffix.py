"""How every prompt ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import MAX_TEXT, PromptStep, Sentence


@dataclass(frozen=True)
class Suffix(PromptStep):
    """``text``, unless the text ends in it already."""

    text: str
    kind: Literal["suffix"] = field(default="suffix", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if not 0 < len(self.text) <= MAX_TEXT:
            yield f"text: expected 1 to {MAX_TEXT} characters, got {len(self.text)}"

    @property
    def slot(self) -> str:
        return self.text

    def forward(self, said: Sentence) -> Sentence:
        return said if said.text.endswith(self.text) else said.saying(self.text)

    def __str__(self) -> str:
        return f"{json.dumps(self.text)} at the end"
