"""Tokens that only mark a place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep


@dataclass(frozen=True)
class Drop(PromptStep):
    """Without these tokens: they mark in the text where the model puts something of its own, such as a view."""

    ids: tuple[int, ...]
    kind: Literal["drop"] = field(default="drop", kw_only=True, repr=False)

    @property
    def names(self) -> tuple[int, ...]:
        return self.ids

    def tokens(self, ids: list[int], text: str) -> list[int]:
        return [token for token in ids if token not in self.ids]

    def __str__(self) -> str:
        return f"without tokens {', '.join(map(str, self.ids))}"
