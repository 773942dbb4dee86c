"""A step for the position of a camera view in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from sinew.core.fields import Side, characters
from sinew.steps.prompt.base import HeldTokens, PromptStep, PromptText


@dataclass(frozen=True)
class Image(PromptStep):
    """Write ``text`` once for each of ``count`` tokens with the id ``token``.

    The model replaces these tokens by the features of a camera view.
    """

    text: Annotated[str, characters(0, 64)]
    count: Side
    token: int
    kind: Literal["image"] = field(default="image", kw_only=True, repr=False)
    slot = "{image}"

    @property
    def names(self) -> tuple[int, ...]:
        return (self.token,)

    @property
    def holds(self) -> HeldTokens:
        return HeldTokens("image tokens", self.token, self.count)

    def forward(self, said: PromptText) -> PromptText:
        return said.saying(self.text * self.count)

    def __str__(self) -> str:
        return f"a view, {self.count} times {self.text}"
