"""A sentence that is said where the state tells of it, and another one elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import MAX_TEXT, PromptStep, Sentence


@dataclass(frozen=True)
class OnlyFor(PromptStep):
    """What the steps so far have written where number ``dim`` of the state is one of ``values``; ``text`` elsewhere."""

    dim: int
    values: tuple[float, ...]
    text: str
    kind: Literal["only_for"] = field(default="only_for", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if not self.values:
            yield "values: expected one or more, got none"
        if not 0 < len(self.text) <= MAX_TEXT:
            yield f"text: expected 1 to {MAX_TEXT} characters, got {len(self.text)}"
        if not 0 <= self.dim < MAX_TEXT:
            yield f"dim: expected a number of the state, got {self.dim}"

    def forward(self, said: Sentence) -> Sentence:
        if any(said.state[self.dim : self.dim + 1] == value for value in self.values):
            return said
        return said._replace(text=self.text)

    def __str__(self) -> str:
        values = " or ".join(f"{value:g}" for value in self.values)
        return f"where the state's number {self.dim} is {values}, else {self.text!r}"
