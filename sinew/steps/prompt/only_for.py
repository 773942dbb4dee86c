"""A step that uses one of two texts, depending on a value of the state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sinew.core.fields import SOME, Width
from sinew.steps.prompt.base import PromptStep, PromptText, Written


@dataclass(frozen=True)
class OnlyFor(PromptStep):
    """Keep the text of the previous steps if element ``dim`` of the state is one of ``values``.

    Otherwise use ``text``.
    """

    dim: Width
    values: Annotated[tuple[float, ...], SOME]
    text: Written
    kind: Literal["only_for"] = field(default="only_for", kw_only=True, repr=False)

    reads_state = True

    def forward(self, said: PromptText) -> PromptText:
        if any(said.state[self.dim : self.dim + 1] == value for value in self.values):
            return said
        return said._replace(text=self.text)

    def __str__(self) -> str:
        values = " or ".join(f"{value:g}" for value in self.values)
        return f"where the state's number {self.dim} is {values}, else {self.text!r}"
