"""Where a view stands in a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from sinew.core import MAX_SIZE
from sinew.steps.base import within
from sinew.steps.prompt.base import HeldTokens, PromptStep, Sentence


@dataclass(frozen=True)
class Image(PromptStep):
    """``text`` once for each of ``count`` tokens, whose id is ``token``: the model puts the view's features there."""

    text: str
    count: int
    token: int
    kind: Literal["image"] = field(default="image", kw_only=True, repr=False)
    slot = "{image}"

    def problems(self) -> Iterator[str]:
        yield from within("count", self.count, 1, MAX_SIZE)
        if len(self.text) > 64:
            yield f"text: expected at most 64 characters, got {len(self.text)}"

    @property
    def names(self) -> tuple[int, ...]:
        return (self.token,)

    @property
    def holds(self) -> HeldTokens:
        return HeldTokens("image tokens", self.token, self.count)

    def forward(self, said: Sentence) -> Sentence:
        return said.saying(self.text * self.count)

    def __str__(self) -> str:
        return f"a view, {self.count} times {self.text}"
