"""Instruction to tokens, with the tokenizer and the steps that the bundle carries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from sinew.core import BundleError, ObservationError
from sinew.core.hints import option
from sinew.processing.arrays import numbers
from sinew.steps.prompt.base import HeldTokens, PromptRecipe, PromptText
from sinew.steps.tokenizer import decode, encode, open_tokenizer

MAX_CHARACTERS = 1 << 16  # bounds the tokenizer's work before the token limit can
REMEMBERED = 64  # texts
FIELDS = {"prompt": "prompt", "subtask": "prompt", "question": "question"}  # what a kind of prompt is made of
ASKED = {  # expected and actual value, for a bundle without such a text
    "subtask": ("an instruction, of which a subtask is said", "it"),
    "question": ("a question, as 'what is in the gripper?'", "one"),
}


class Prompter:
    """Turns an instruction into ``(tokens int64 [L], mask bool [L])``. opened: the tokenizer, where it is at hand.
    may_be_empty: an instruction of no words is what was trained with, and is tokenised as any other. behind: the tokens
    that follow a subtask."""

    def __init__(
        self, tokenizer_json: str, recipe: PromptRecipe, opened: Any = None, may_be_empty: bool = False
    ):
        self.recipe, self.may_be_empty, text = recipe, may_be_empty, recipe.text
        self._steps = {
            "prompt": recipe.steps,
            "subtask": () if text is None else text.subtask,
            "question": () if text is None else text.question,
        }
        self._reads_state = {k: any(each.reads_state for each in s) for k, s in self._steps.items()}
        self.tokenizer = opened or open_tokenizer(tokenizer_json, BundleError, "the bundle's tokenizer")
        self._text = lru_cache(maxsize=REMEMBERED)(partial(self.text, state=np.zeros(0)))
        self._ids = lru_cache(maxsize=REMEMBERED)(self._tokenize)
        self.behind = () if recipe.text is None else self._behind(recipe.text.action)

    def text(self, prompt: str, state: np.ndarray, kind: str = "prompt", advantage: str = "") -> str:
        """Return the exact string that is tokenised. ``state``: [D], normalised. kind:
        "prompt", "subtask" or "question". ``advantage``: "" for none."""
        said = PromptText(prompt, "", state, advantage)
        for step in self._steps[kind]:
            said = step.forward(said)
        return said.text

    def encode(self, prompt: object, state: np.ndarray, advantage: str = "") -> np.ndarray:
        """Token ids of the formatted instruction, int64 [L], 1 <= L <= max_tokens. Never truncates."""
        wanted = "an instruction, as 'pick up the red cube' (this policy has none of its own)"
        return self._encoded("prompt", prompt, state, wanted, advantage)

    def encode_asked(self, kind: str, text: object, state: np.ndarray) -> np.ndarray:
        """The same of the prompt behind which words are said: kind "subtask", of an instruction, or "question". Raises
        :class:`ObservationError` where the bundle has none."""
        wanted, got = ASKED[kind]
        if not self._steps[kind]:
            option = f"sinew convert --set {kind}_prompt="
            raise ObservationError(kind, f"nothing, as this bundle has no prompt for it ({option})", got)
        return self._encoded(kind, text, state, wanted)

    def _encoded(
        self, kind: str, text: object, state: np.ndarray, wanted: str, advantage: str = ""
    ) -> np.ndarray:
        """Return the tokens of a text. kind: as for :meth:`text`.

        An episode has one instruction. If no step reads the state, neither steps nor tokenizer run twice for it.
        """
        name = FIELDS[kind]
        if not isinstance(text, str):
            raise ObservationError(name, "a string", type(text).__name__)
        if not text.strip() and not (self.may_be_empty and kind == "prompt"):
            hint = f" ({option('allow_empty_prompt')} allows it)" if kind == "prompt" else ""
            raise ObservationError(name, wanted, f"an empty string{hint}")
        if len(text) > MAX_CHARACTERS:
            raise ObservationError(name, f"at most {MAX_CHARACTERS} characters", str(len(text)))
        try:
            read = self._reads_state[kind]
            written = (
                self.text(text, state, kind, advantage)
                if read
                else self._text(text, kind=kind, advantage=advantage)
            )
            return self._ids(written, kind).copy()
        except (UnicodeEncodeError, TypeError):  # lone surrogates, which no tokenizer can take
            raise ObservationError(name, "text that UTF-8 can carry", "lone surrogates") from None
        except ValueError as error:
            raise ObservationError(name, "text that the tokenizer takes", str(error)) from None

    def _behind(self, words: str) -> tuple[int, ...]:
        """Return the tokens of what a bundle writes behind a subtask. Raises :class:`BundleError`."""
        with BundleError.at("sinew.processing.prompt.text.action", ValueError, ObservationError):
            ids = encode(self.tokenizer, words, False) if words else []
            return tuple(map(int, self.check_tokens(np.array(ids), "text.action", ()))) if ids else ()

    def _tokenize(self, text: str, kind: str) -> np.ndarray:
        ids = encode(self.tokenizer, text, self.recipe.add_special_tokens)
        for step in self._steps[kind]:
            ids = step.tokens(ids, text)
        held = None if kind == "prompt" else ()
        return self.check_tokens(np.asarray(ids, np.int64), FIELDS[kind], held)

    def words(self, tokens: Sequence[int]) -> str:
        """Return the text of vocabulary tokens, without special ones; "" if the tokenizer fails."""
        try:
            return decode(self.tokenizer, tokens)
        except ValueError:
            return ""

    def check_tokens(
        self, tokens: object, name: str = "tokens", held: Sequence[HeldTokens] | None = None
    ) -> np.ndarray:
        """Ids from a client that tokenises itself, checked: int64 [L]. held: that they have to hold, if not the
        recipe's."""
        array = numbers(name, tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ObservationError(name, "a vector of integers", f"{array.dtype} {list(array.shape)}")
        limit = self.recipe.max_tokens
        if not 1 <= len(array) <= limit:
            raise ObservationError(name, f"1 to {limit} tokens", f"{len(array)}")
        if array.min() < 0 or array.max() >= self.recipe.vocab_size:
            expected = f"token ids in [0, {self.recipe.vocab_size})"
            raise ObservationError(name, expected, f"{array.min()} to {array.max()}")
        if held is None and len(array) != (whole := self.recipe.whole or len(array)):
            raise ObservationError(name, f"{whole} tokens, with their padding", f"{len(array)}")
        for what, token, wanted in self.recipe.held if held is None else held:
            if (found := int((array == token).sum())) != wanted:
                raise ObservationError(name, f"{wanted} {what} ({token})", str(found))
        return array.astype(np.int64)

    def pad(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Right padding as in training; returns ids and the mask of real tokens."""
        length = self.recipe.max_tokens if self.recipe.padding == "max_length" else len(tokens)
        ids = np.full(length, self.recipe.pad_token_id, np.int64)
        ids[: len(tokens)] = tokens
        return ids, np.arange(length) < len(tokens)
