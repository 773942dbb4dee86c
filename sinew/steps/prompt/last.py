"""A step for the last token of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep


@dataclass(frozen=True)
class Last(PromptStep):
    """Append ``token``, unless it is the last token already."""

    token: int
    kind: Literal["last"] = field(default="last", kw_only=True, repr=False)

    @property
    def names(self) -> tuple[int, ...]:
        return (self.token,)

    def tokens(self, ids: list[int], text: str) -> list[int]:
        return ids if ids[-1:] == [self.token] else [*ids, self.token]

    def __str__(self) -> str:
        return f"token {self.token} at the end"
