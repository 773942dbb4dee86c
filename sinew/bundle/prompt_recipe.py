"""How an instruction becomes tokens, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sinew.core import MAX_SAID, MAX_SIZE
from sinew.steps.prompt.base import MAX_TEXT, HeldTokens, PromptStep
from sinew.steps.prompt.instruction import Instruction

MOST = 4  # times that an instruction, or a state, may stand in a prompt


@dataclass(frozen=True)
class TextRecipe:
    """States what a language head is asked with, where the bundle keeps one: which words it was trained to go on from.

    subtask: writes the prompt behind which it says a subtask; () where it does not. action: what is written behind the
    subtask before the head of actions reads it all. question: writes the prompt behind which it answers, with the
    question in the instruction's place; () where it does not. most: tokens of a text whose request says no number.
    """

    subtask: tuple[PromptStep, ...] = ()
    action: str = ""
    question: tuple[PromptStep, ...] = ()
    most: int = 48

    def problems(self, vocab_size: int) -> Iterator[str]:
        """Yield what is wrong with a recipe from a file, each with its field."""
        if not 1 <= self.most <= MAX_SAID:
            yield f".most: expected 1 to {MAX_SAID}, got {self.most}"
        if len(self.action) > MAX_TEXT:
            yield f".action: expected at most {MAX_TEXT} characters"
        for name in ("subtask", "question"):
            steps: tuple[PromptStep, ...] = getattr(self, name)
            yield from _problems(steps, vocab_size, f".{name}")
            if steps and not any(step.slot == "{prompt}" for step in steps):
                yield f".{name}: expected a place for the {'question' if name == 'question' else 'instruction'}"
            if any(step.holds is not None for step in steps):
                yield f".{name}: expected no tokens of views"


@dataclass(frozen=True)
class PromptRecipe:
    """Instruction to tokens: ``steps`` change the instruction and write the text, it is tokenised, they change the ids.

    padding: how the model was trained; what it computes on may leave padding out. padding_side: where padding goes
             if there is any, so also where engines put it that run a few lengths only; "left" for models whose
             sequence goes on behind the prompt.
    eos_token_id: ends a text that a language head says; -1 for none. text: what such a head is asked with; None where
             the bundle keeps none, or nobody knows.
    """

    max_tokens: int
    vocab_size: int  # rows of the model's token table; ids beyond it are refused
    pad_token_id: int
    steps: tuple[PromptStep, ...] = (Instruction(),)
    padding: Literal["longest", "max_length"] = "longest"
    padding_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    eos_token_id: int = -1
    text: TextRecipe | None = None

    @property
    def template(self) -> str:
        """Return the text with its places in braces."""
        return template(self.steps)

    @cached_property
    def advantages(self) -> tuple[str, ...]:
        """Return the advantages that requests may name; () for a prompt without a place for them."""
        return next((step.advantages for step in self.steps if step.advantages), ())

    @cached_property
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
        yield from _problems(self.steps, self.vocab_size, "")
        if self.text is not None:
            yield from (f".text{problem}" for problem in self.text.problems(self.vocab_size))
        if len({(step.advantages, step.usual_advantage) for step in self.steps if step.advantages}) > 1:
            yield ": expected the same advantages in each of its steps"
        if any(held.times > MAX_SIZE for held in self.held):
            yield f": expected at most {MAX_SIZE} tokens of all views"

    def __str__(self) -> str:
        """Return the changes that the template does not show."""
        return ", ".join(str(step) for step in self.steps if not step.slot)


def template(steps: tuple[PromptStep, ...]) -> str:
    """Return the text that steps write, with its places in braces."""
    return "".join(step.slot for step in steps)


def _problems(steps: tuple[PromptStep, ...], vocab_size: int, where: str) -> Iterator[str]:
    """Yield what is wrong with the steps of one prompt."""
    for index, step in enumerate(steps):
        place = f"{where}{'' if where else '.steps'}[{index}]: {step.kind}: "
        yield from (place + problem for problem in step.problems())
        for token in step.names:
            if not 0 <= token < vocab_size:
                yield f"{place}expected tokens of the vocabulary, 0 to {vocab_size - 1}, got {token}"
    if len(template(steps)) > MAX_TEXT:
        yield f"{where}: expected texts of at most {MAX_TEXT} characters"
    for slot in ("{prompt}", "{state}"):
        if sum(step.slot == slot for step in steps) > MOST:
            yield f"{where}: expected {slot} at most {MOST} times"
