"""What a step of a prompt has to say and to do."""

from __future__ import annotations

from typing import Annotated, ClassVar, NamedTuple

import numpy as np

from sinew.core.fields import MAX_TEXT, Tagged, characters
from sinew.steps import registry

Written = Annotated[str, characters(1, MAX_TEXT)]  # of a step


class Sentence(NamedTuple):
    """instruction: as the steps so far have left it. text: what they have written. state: [D], normalised. advantage:
    one of those that a step knows (:attr:`PromptStep.advantages`), "" for none."""

    instruction: str
    text: str
    state: np.ndarray
    advantage: str = ""

    def saying(self, text: str) -> Sentence:
        """Return the sentence with this text behind the other."""
        return self._replace(text=self.text + text)


class HeldTokens(NamedTuple):
    """``times`` tokens of an id that a prompt has to hold, no more and no fewer; no instruction may add one."""

    what: str
    token: int
    times: int


class PromptStep(Tagged):
    """A change of the instruction, a part of the text that is tokenised, or a change of its tokens.

    reads_state: what it leaves is another for another state.
    """

    registry = registry.PROMPT
    reads_state: ClassVar[bool] = False

    @property
    def slot(self) -> str:
        """Return what the step writes, as a template shows it; "" for one that writes nothing."""
        return ""

    @property
    def names(self) -> tuple[int, ...]:
        """Return the tokens that the step knows by their ids, which the vocabulary has to have."""
        return ()

    @property
    def holds(self) -> HeldTokens | None:
        """Return the tokens that a prompt holds because of the step."""
        return None

    @property
    def advantages(self) -> tuple[str, ...]:
        """Return the advantages that the step has words for."""
        return ()

    @property
    def usual_advantage(self) -> str:
        """Return the advantage of a request that names none; "" for none."""
        return ""

    def forward(self, said: Sentence) -> Sentence:
        """Return the sentence after the step."""
        return said

    def tokens(self, ids: list[int]) -> list[int]:
        """Return the tokens of the finished text after the step."""
        return ids
