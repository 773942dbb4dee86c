"""The interface of a step that writes or changes a prompt, and the recipe: a list of steps with token options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple

import numpy as np

from sinew.core import MAX_SAID, MAX_SIZE
from sinew.core.fields import MAX_TEXT, Side, Tagged, characters, within
from sinew.steps import registry

MOST_PLACES = 4  # largest number of placeholders for the instruction, or for the state, in a prompt
Written = Annotated[str, characters(1, MAX_TEXT)]  # text that a step writes


class PromptText(NamedTuple):
    """A prompt between two steps.

    Attributes:
        instruction: The instruction after the steps so far.
        text: The text that the steps so far have written.
        state: The normalised state, [D].
        advantage: The request's advantage: a name for the quality of the actions to generate
            (:attr:`PromptStep.advantages`), or "".
    """

    instruction: str
    text: str
    state: np.ndarray
    advantage: str = ""

    def saying(self, text: str) -> PromptText:
        """Return a copy of the prompt with ``text`` appended to its text."""
        return self._replace(text=self.text + text)


class HeldTokens(NamedTuple):
    """A special token that a prompt must contain exactly ``times`` times.

    The user's instruction must not add such a token.

    Attributes:
        what: The token's name in error messages.
        token: The token's id.
        times: How often the prompt must contain the token.
    """

    what: str
    token: int
    times: int


class PromptStep(Tagged):
    """One step of the conversion from an instruction to tokens.

    A step changes the instruction, writes a part of the prompt's text, or changes the tokens.

    Attributes:
        reads_state: True if the step's result depends on the robot's state.
    """

    registry = registry.PROMPT
    reads_state: ClassVar[bool] = False

    @property
    def slot(self) -> str:
        """The placeholder for the step's text in a template, or "" for a step that writes no text."""
        return ""

    @property
    def names(self) -> tuple[int, ...]:
        """The ids of all tokens that the step uses. The model's vocabulary must contain these ids."""
        return ()

    @property
    def holds(self) -> HeldTokens | None:
        """Return the special tokens that a prompt contains because of the step, or None."""
        return None

    @property
    def advantages(self) -> tuple[str, ...]:
        """Return the names of the advantages for which the step can write text.

        An advantage is a label for the quality of the actions that the policy should generate.
        """
        return ()

    @property
    def usual_advantage(self) -> str:
        """Return the advantage that is used for a request without an advantage, or "" for none."""
        return ""

    def forward(self, said: PromptText) -> PromptText:
        return said

    @property
    def whole(self) -> int:
        """Return the fixed number of tokens to which this step fills every prompt, or 0 if the number varies."""
        return 0

    def tokens(self, ids: list[int], text: str) -> list[int]:
        """Return the token ids after the step.

        Args:
            ids: The tokens before the step.
            text: The whole text of the prompt.
        """
        return ids


@dataclass(frozen=True)
class TextRecipe:
    """The prompts with which a language head (text output) was trained.

    Attributes:
        subtask: Steps that write the prompt for a subtask, or () if the head generates no subtasks.
        action: Text between the subtask and the action head's input.
        question: Steps that write the prompt for an answer, with the question as the instruction, or () if the head
            answers no questions.
        most: Largest number of tokens of a generated text, if the request states no number.
    """

    subtask: tuple[PromptStep, ...] = ()
    action: Annotated[str, characters(0, MAX_TEXT)] = ""
    question: tuple[PromptStep, ...] = ()
    most: Annotated[int, within(1, MAX_SAID)] = 48

    def problems(self) -> Iterator[str]:
        """Yield a message for each error in the prompts."""
        for name, what in (("subtask", "instruction"), ("question", "question")):
            steps: tuple[PromptStep, ...] = getattr(self, name)
            if steps and not any(step.slot == "{prompt}" for step in steps):
                yield f"{name}: expected a placeholder for the {what}, got {template(steps)!r}"
            if any(step.holds is not None for step in steps):
                yield (
                    f"{name}: a prompt of the language head cannot contain tokens of views, got a step with such"
                    " tokens"
                )


@dataclass(frozen=True)
class PromptRecipe:
    """The conversion of an instruction to tokens.

    The steps change the instruction and write the text. The text is tokenised. Then the steps change the token ids.

    Attributes:
        max_tokens: Largest number of tokens.
        vocab_size: Number of rows of the model's token table. Larger ids are rejected.
        pad_token_id: Id of the padding token.
        steps: The steps.
        padding: The padding of prompts in training. Inference may skip the padding.
        padding_side: The side of the prompt on which padding is added, also by engines that run only a few lengths.
            "left" is for models whose sequence continues after the prompt.
        add_special_tokens: True if the tokenizer adds its special tokens.
        eos_token_id: Token that ends a text of the language head, or -1.
        text: Prompts of the language head, or None if the bundle has no language head or the prompts are unknown.
    """

    max_tokens: Side
    vocab_size: int
    pad_token_id: int
    steps: tuple[PromptStep, ...] = field(default_factory=lambda: (PromptStep.registered("instruction")(),))
    padding: Literal["longest", "max_length"] = "longest"
    padding_side: Literal["right", "left"] = "right"
    add_special_tokens: bool = True
    eos_token_id: int = -1
    text: TextRecipe | None = None

    @property
    def template(self) -> str:
        """Return the text of a prompt with placeholders in braces."""
        return template(self.steps)

    @cached_property
    def advantages(self) -> tuple[str, ...]:
        """Return the names of the advantages for requests, or () for a prompt without advantages."""
        return next((step.advantages for step in self.steps if step.advantages), ())

    @cached_property
    def usual_advantage(self) -> str:
        """Return the advantage that is used for a request without an advantage, or "" for none."""
        return next((step.usual_advantage for step in self.steps if step.advantages), "")

    @cached_property
    def whole(self) -> int:
        """Return the number of tokens of a prompt if all prompts have the same length; otherwise 0."""
        return max((step.whole for step in self.steps), default=0)

    @cached_property
    def held(self) -> tuple[HeldTokens, ...]:
        """Return the special tokens that every prompt must contain, one entry per token id."""
        counts: dict[tuple[str, int], int] = {}
        for step in self.steps:
            if step.holds is not None:
                what, token, count = step.holds
                counts[what, token] = counts.get((what, token), 0) + count
        return tuple(HeldTokens(what, token, count) for (what, token), count in counts.items())

    def problems(self) -> Iterator[str]:
        """Yield a message for each contradiction between the recipe's steps and its vocabulary."""
        last = self.vocab_size - 1
        for name, token, least in (
            ("pad_token_id", self.pad_token_id, 0),
            ("eos_token_id", self.eos_token_id, -1),
        ):
            if not least <= token <= last:
                yield f"{name}: expected {least} to {last}, got {token}"
        if self.whole not in (0, self.max_tokens):
            yield f"max_tokens: expected the {self.whole} tokens of every prompt, got {self.max_tokens}"
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
                        yield f"{place}: expected token ids of the vocabulary, 0 to {last}, got {token}"
            if (length := len("".join(slots))) > MAX_TEXT:
                yield f"{where}: expected texts of at most {MAX_TEXT} characters, got {length}"
            for slot in ("{prompt}", "{state}"):
                if (count := slots.count(slot)) > MOST_PLACES:
                    yield f"{where}: expected {slot} at most {MOST_PLACES} times, got {count}"
            if len(choices) > 1:
                yield f"{where}: expected the same advantages in each step, got {len(choices)} lists"
            if times > MAX_SIZE:
                yield f"{where}: expected at most {MAX_SIZE} tokens for all views, got {times}"

    def __str__(self) -> str:
        """Return a text that lists the changes that :attr:`template` does not show, such as lower case."""
        return ", ".join(str(step) for step in self.steps if not step.slot)


def template(steps: tuple[PromptStep, ...]) -> str:
    """Return the text that a list of steps writes, with placeholders such as ``{prompt}`` for parts that vary."""
    return "".join(step.slot for step in steps)
