"""A step that checks for marker tokens. The model's outputs are read at the positions of these tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sinew.core.fields import Width
from sinew.steps.prompt.base import HeldTokens, PromptStep


@dataclass(frozen=True)
class Marker(PromptStep):
    """Require ``count`` tokens with the id ``token`` in the prompt.

    Other steps write these tokens, and the user's instruction must not add more. If ``count`` is 0, the prompt must not
    contain the token.
    """

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
