"""A step for the advantage of a request: a label for the quality of the actions that the policy should generate.

Source: pi*0.6's RECAP, Amin et al. 2025, section V-B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sinew.core.fields import MAX_TEXT, characters, count, printable
from sinew.steps.prompt.base import PromptStep, PromptText

MOST = 256  # largest number of advantages of a policy; published value functions have 201 bins
MAX_NAME = 64  # largest length of a name in characters
SHOWN = 4  # `sinew inspect` lists at most this many advantages


@dataclass(frozen=True)
class Advantage(PromptStep):
    """Write the text for a request's advantage into the prompt. Without an advantage, no text is added.

    Attributes:
        words: Name and text of each advantage. A request contains the name, and the prompt contains the text.
        usual: The name that is used for a request without an advantage, or "" for none.
        place: "instruction" writes the text after the instruction, so that later steps change the instruction and this
            text together (RLinf's ``TokenizePromptWithGuidance``). "text" writes it at this step's position in the
            prompt.
    """

    words: Annotated[
        tuple[
            tuple[Annotated[str, printable(1, MAX_NAME)], Annotated[str, characters(1, MAX_TEXT // MOST)]],
            ...,
        ],
        count(1, MOST, "advantages"),
    ]
    usual: str = ""
    place: Literal["instruction", "text"] = "instruction"
    kind: Literal["advantage"] = field(default="advantage", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        if len(set(self.advantages)) != len(self.words):
            yield "words: expected a different name for each advantage"
        if self.usual and self.usual not in self.advantages:
            names = ", ".join(self.advantages[:SHOWN])
            yield f"usual: expected one of {names}, or none, got {self.usual[:MAX_NAME]!r}"

    @property
    def slot(self) -> str:
        return "{advantage}" if self.place == "text" else ""

    @property
    def advantages(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.words)

    @property
    def usual_advantage(self) -> str:
        return self.usual

    def forward(self, said: PromptText) -> PromptText:
        text = dict(self.words).get(said.advantage, "")
        if self.place == "text":
            return said.saying(text)
        return said._replace(instruction=said.instruction + text)

    def __str__(self) -> str:
        where = "behind the instruction" if self.place == "instruction" else "as {advantage}"
        usual = f", {self.usual} where none is named" if self.usual else ""
        texts = [json.dumps(text) for _, text in self.words[:SHOWN]]
        if (more := len(self.words) - SHOWN) > 0:
            texts.append(f"{more} others")
        return f"{' or '.join(texts)} {where}{usual}"
