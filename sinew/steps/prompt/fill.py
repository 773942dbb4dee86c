"""A step that pads every prompt to the same number of tokens, for models that also read the padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sinew.core.fields import MAX_TEXT, Side, characters, count
from sinew.steps.prompt.base import PromptStep

MOST = 4096  # largest number of texts with their own padded length


@dataclass(frozen=True)
class Fill(PromptStep):
    """Pad the tokens to ``length``: with ``token`` up to the text's own padded length, and with ``behind`` after it.

    If a text has more tokens than its padded length, it is not changed. A later check rejects this prompt.

    Attributes:
        length: Number of tokens of every prompt.
        token: Id of the padding.
        behind: Id for the positions after the padding.
        lengths: Pairs of a text and its own padded length, for texts that were padded to fewer tokens in training.
            Other texts are padded to ``length``.
    """

    length: Side
    token: int
    behind: int
    lengths: Annotated[
        tuple[tuple[Annotated[str, characters(1, MAX_TEXT)], Side], ...], count(0, MOST, "texts")
    ] = ()
    kind: Literal["fill"] = field(default="fill", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if len({text for text, _ in self.lengths}) != len(self.lengths):
            yield "lengths: expected different texts"
        if longest := max((each for _, each in self.lengths if each > self.length), default=0):
            yield f"lengths: expected at most {self.length} tokens, got {longest}"

    @property
    def names(self) -> tuple[int, ...]:
        return (self.token, self.behind)

    @property
    def whole(self) -> int:
        return self.length

    def tokens(self, ids: list[int], text: str) -> list[int]:
        own = dict(self.lengths).get(text, self.length)
        if len(ids) > own:
            return ids
        return ids + [self.token] * (own - len(ids)) + [self.behind] * (self.length - own)

    def __str__(self) -> str:
        others = f", {len(self.lengths)} texts to fewer" if self.lengths else ""
        return f"filled up to {self.length} tokens{others}"
