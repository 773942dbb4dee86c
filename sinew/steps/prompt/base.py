"""What a step of a prompt has to say and to do, and the recipe that is a list of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np

from sinew.core import MAX_SAID, MAX_SIZE
from sinew.core.fields import MAX_TEXT, Side, Tagged, characters, within
from sinew.steps import registry

MOST_PLACES = 4  # of an instruction, or of a state, in a prompt
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
        return said

    def tokens(self, ids: list[int]) -> list[int]:
        """Return the tokens of the finished text after the step."""
        return ids


@dataclass(frozen=True)
class TextRecipe:
    """States what a language head is asked with, where the bundle keeps one: which words it was trained to go on from.

    subtask: writes the prompt behind which it says a subtask; () where it does not. action: what is written behind the
    subtask before the head of actions reads it all. question: writes the prompt behind which it answers, with the
    question in the instruction's place; () where it does not. most: tokens of a text whose request says no number.
    """

    subtask: tuple[PromptStep, ...] = ()
    action: Annotated[str, characters(0, MAX_TEXT)] = ""
    question: tuple[PromptStep, ...] = ()
    most: Annotated[int, within(1, MAX_SAID)] = 48

    def problems(self) -> Iterator[str]:
        """Yield what its prompts lack for their purpose."""
        for name, what in (("subtask", "instruction"), ("question", "question")):
            steps: tuple[PromptStep, ...] = getattr(self, name)
            if steps and not any(step.slot == "{prompt}" for step in steps):
                yield f"{name}: expected a place for the {what}, got {template(steps)!r}"
            if any(step.holds is not None for step in steps):
                yield f"{name}: expected no tokens of views, got a step that holds them"


@dataclass(frozen=True)
class PromptRecipe:
    """Instruction to tokens: ``steps`` change the instruction and write the text, it is tokenised, they change the ids.

    padding: how the model was trained; what it computes on may leave padding out. padding_side: where padding goes
             if there is any, so also where engines put it that run a few lengths only; "left" for models whose
             sequence goes on behind the prompt.
    eos_token_id: ends a text that a language head says; -1 for none. text: what such a head is asked with; None where
             the bundle keeps none, or nobody knows.
    """

    max_tokens: Side
    vocab_size: int  # rows of the model's token table; ids beyond it are refused
    pad_token_id: int
    steps: tuple[PromptStep, ...] = field(default_factory=lambda: (PromptStep.registered("instruction")(),))
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

    @cached_property
    def held(self) -> tuple[HeldTokens, ...]:
        """Return the tokens that every prompt holds, those of an id together."""
        found: dict[tuple[str, int], int] = {}
        for step in self.steps:
            if step.holds is not None:
                what, token, count = step.holds
                found[what, token] = found.get((what, token), 0) + count
        return tuple(HeldTokens(what, token, count) for (what, token), count in found.items())

    def problems(self) -> Iterator[str]:
        """Yield what its steps and its vocabulary do not have together."""
        last = self.vocab_size - 1
        for name, token, least in (
            ("pad_token_id", self.pad_token_id, 0),
            ("eos_token_id", self.eos_token_id, -1),
        ):
            if not least <= token <= last:
                yield f"{name}: expected {least} to {last}, got {token}"
        prompts = {"steps": self.steps}
        if self.text is not None:
            prompts |= {"text.subtask": self.text.subtask, "text.question": self.text.question}
        for where, steps in prompts.items():
            slots, choices, times = [], set(), 0
            for index, step in enumerate(steps):
                slot, tokens, holds = step.slot, step.names, step.holds
                choice = step.advantages, step.usual_advantage
                slots.append(slot)
                choices |= {choice} if choice[0] else set()
                times += 0 if holds is None else holds.times
                for token in tokens:
                    if not 0 <= token <= last:
                        place = f"{where}[{index}]: {step.kind}"
                        yield f"{place}: expected tokens of the vocabulary, 0 to {last}, got {token}"
            if (length := len("".join(slots))) > MAX_TEXT:
                yield f"{where}: expected texts of at most {MAX_TEXT} characters, got {length}"
            for slot in ("{prompt}", "{state}"):
                if (count := slots.count(slot)) > MOST_PLACES:
                    yield f"{where}: expected {slot} at most {MOST_PLACES} times, got {count}"
            if len(choices) > 1:
                yield f"{where}: expected the same advantages in each step, got {len(choices)} lists"
            if times > MAX_SIZE:
                yield f"{where}: expected at most {MAX_SIZE} tokens of all views, got {times}"

    def __str__(self) -> str:
        """Return the changes that the template does not show."""
        return ", ".join(str(step) for step in self.steps if not step.slot)


def template(steps: tuple[PromptStep, ...]) -> str:
    """Return the text that steps write, with its places in braces."""
    return "".join(step.slot for step in steps)
