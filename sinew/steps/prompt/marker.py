"""Tokens that a model reads its own outputs at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.core.fields import Width
from sinew.steps.prompt.base import HeldTokens, PromptStep


@dataclass(frozen=True)
class Marker(PromptStep):
    """``count`` tokens of the id ``token``, which the text writes; no instruction may add one. 0: there may be none."""

    token: int
    count: Width
    kind: Literal["marker"] = field(default="marker", kw_only=True, repr=False)

    @property
    def names(self) -> tuple[int, ...]:
        return (self.token,)

    @property
    def holds(self) -> HeldTokens:
        return HeldTokens("marking tokens", self.token, self.count)

    def __str__(self) -> str:
        return f"{self.count} tokens {self.token}"
