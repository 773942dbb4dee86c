"""A step that removes tokens which only mark a position in the text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep


@dataclass(frozen=True)
class Drop(PromptStep):
    """Remove the tokens with the given ids.

    Such a token only marks the position in the text where the model inserts another input, such as a camera view.
    """

    ids: tuple[int, ...]
    kind: Literal["drop"] = field(default="drop", kw_only=True, repr=False)

    @property
    def names(self) -> tuple[int, ...]:
        return self.ids

    def tokens(self, ids: list[int], text: str) -> list[int]:
        return [token for token in ids if token not in self.ids]

    def __str__(self) -> str:
        return f"without tokens {', '.join(map(str, self.ids))}"
