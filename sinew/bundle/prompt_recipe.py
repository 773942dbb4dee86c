"""How an instruction becomes tokens, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sinew.steps.base import MAX_SIZE
from sinew.steps.prompt.base import MAX_TEXT, HeldTokens, PromptStep
from sinew.steps.prompt.instruction import Instruction

MOST = 4  # times that an instruction, or a state, may stand in a prompt


@dataclass(frozen=True)
class PromptRecipe:
    """Instruction to tokens: ``steps`` change the instruction and write the text, it is tokenised, they change the ids.

    padding: how the model was trained; what it computes on may leave padding out. padding_side: where padding goes
             if there is any, so also where engines put it that run a few lengths only; "left" for models whose
             sequence goes on behind the prompt.
    eos_token_id: ends a text that a language head says; -1 for none.
    """

    max_tokens: int
    vocab_size: int  # rows of the model's token table; ids beyond it are refused
    pad_token_id: int
    steps: tuple[PromptStep, ...] = (Instruction(),)
    padding: Literal["longest", "max_length"] = "longest"
    padding_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    eos_token_id: int = -1

    @property
    def template(self) -> str:
        """Return the text with its places in braces."""
        return "".join(step.slot for step in self.steps)

    @property
    def advantages(self) -> tuple[str, ...]:
        """Return the advantages that requests may name; () for a prompt without a place for them."""
        return next((step.advantages for step in self.steps if step.advantages), ())

    @property
    def usual_advantage(self) -> str:
        """Return the advantage of a request that names none; "" for none."""
        return next((step.usual_advantage for step in self.steps if step.advantages), "")

    @property
    def held(self) -> tuple[HeldTokens, ...]:
        """Return the tokens that every prompt holds, those of an id together."""
        found: dict[tuple[str, int], int] = {}
        for step in self.steps:
            if step.holds is not None:
                what, token, count = step.holds
                found[what, token] = found.get((what, token), 0) + count
        return tuple(HeldTokens(what, token, count) for (what, token), count in found.items())

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with a recipe from a file, each with its field."""
        if not 1 <= self.max_tokens <= MAX_SIZE:
            yield ": max_tokens out of range"
        if not 0 <= self.pad_token_id < self.vocab_size:
            yield ": pad_token_id is not in the vocabulary"
        if not -1 <= self.eos_token_id < self.vocab_size:
            yield ": eos_token_id is not in the vocabulary"
        for index, step in enumerate(self.steps):
            where = f".steps[{index}]: {step.kind}: "
            yield from (where + problem for problem in step.problems())
            for token in step.names:
                if not 0 <= token < self.vocab_size:
                    yield f"{where}expected tokens of the vocabulary, 0 to {self.vocab_size - 1}, got {token}"
        if len(self.template) > MAX_TEXT:
            yield f": expected texts of at most {MAX_TEXT} characters"
        for slot in ("{prompt}", "{state}"):
            if sum(step.slot == slot for step in self.steps) > MOST:
                yield f": expected {slot} at most {MOST} times"
        if len({(step.advantages, step.usual_advantage) for step in self.steps if step.advantages}) > 1:
            yield ": expected the same advantages in each of its steps"
        if any(held.times > MAX_SIZE for held in self.held):
            yield f": expected at most {MAX_SIZE} tokens of all views"

    def __str__(self) -> str:
        """Return the changes that the template does not show."""
        return ", ".join(str(step) for step in self.steps if not step.slot)
