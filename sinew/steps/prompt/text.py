"""What every prompt says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import MAX_TEXT, PromptStep, Sentence


@dataclass(frozen=True)
class Text(PromptStep):
    """``text``, the same for every instruction."""

    text: str
    kind: Literal["text"] = field(default="text", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if not 0 < len(self.text) <= MAX_TEXT:
            yield f"text: expected 1 to {MAX_TEXT} characters, got {len(self.text)}"

    @property
    def slot(self) -> str:
        return self.text

    def forward(self, said: Sentence) -> Sentence:
        return said.saying(self.text)

    def __str__(self) -> str:
        return json.dumps(self.text)
