"""Instruction to tokens, with the tokenizer and the steps that the bundle carries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from sinew.bundle.prompt_recipe import PromptRecipe
from sinew.core import BundleError, ObservationError
from sinew.processing.arrays import numbers
from sinew.steps.prompt.base import Sentence
from sinew.steps.tokenizer import decode, encode, open_tokenizer

MAX_CHARACTERS = 1 << 16  # bounds the tokenizer's work before the token limit can
REMEMBERED = (
    64  # texts; an episode has one instruction, and a request is tokenised when checked and when computed
)


class Prompter:
    """Turns an instruction into ``(tokens int64 [L], mask bool [L])``."""

    def __init__(self, tokenizer_json: str, recipe: PromptRecipe):
        self.recipe, self.held = recipe, recipe.held
        self.tokenizer = open_tokenizer(tokenizer_json, BundleError, "the bundle's tokenizer")
        self._ids = lru_cache(maxsize=REMEMBERED)(self._tokenize)

    def text(self, prompt: str, state: np.ndarray) -> str:
        """The exact string that is tokenised. ``state``: [D], normalised."""
        said = Sentence(prompt, "", state)
        for step in self.recipe.steps:
            said = step.forward(said)
        return said.text

    def encode(self, prompt: object, state: np.ndarray) -> np.ndarray:
        """Token ids of the formatted instruction, int64 [L], 1 <= L <= max_tokens. Never truncates."""
        if not isinstance(prompt, str):
            raise ObservationError("prompt", "a string", type(prompt).__name__)
        if not prompt.strip():
            raise ObservationError(
                "prompt",
                "an instruction, as 'pick up the red cube' (this policy has none of its own)",
                "an empty string",
            )
        if len(prompt) > MAX_CHARACTERS:
            raise ObservationError("prompt", f"at most {MAX_CHARACTERS} characters", str(len(prompt)))
        try:
            ids = self._ids(self.text(prompt, state))
        except (UnicodeEncodeError, TypeError):  # lone surrogates, which no tokenizer can take
            raise ObservationError("prompt", "text that UTF-8 can carry", "lone surrogates") from None
        except ValueError as error:
            raise ObservationError("prompt", "text that the tokenizer takes", str(error)) from None
        return self.check_tokens(ids, "prompt")

    def _tokenize(self, text: str) -> np.ndarray:
        ids = encode(self.tokenizer, text, self.recipe.add_special_tokens)
        for step in self.recipe.steps:
            ids = step.tokens(ids)
        return np.asarray(ids, np.int64)

    def words(self, tokens: Sequence[int]) -> str:
        """Return what tokens of the vocabulary spell, special ones left out; "" where the tokenizer fails."""
        try:
            return decode(self.tokenizer, tokens)
        except ValueError:
            return ""

    def check_tokens(self, tokens: object, name: str = "tokens") -> np.ndarray:
        """Ids from a client that tokenises itself, checked: int64 [L]."""
        array = numbers(name, tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ObservationError(name, "a vector of integers", f"{array.dtype} {list(array.shape)}")
        limit = self.recipe.max_tokens
        if not 1 <= len(array) <= limit:
            raise ObservationError(name, f"1 to {limit} tokens", f"{len(array)}")
        if array.min() < 0 or array.max() >= self.recipe.vocab_size:
            expected = f"token ids in [0, {self.recipe.vocab_size})"
            raise ObservationError(name, expected, f"{array.min()} to {array.max()}")
        for what, token, wanted in self.held:
            if (found := int((array == token).sum())) != wanted:
                raise ObservationError(name, f"{wanted} {what} ({token})", str(found))
        return array.astype(np.int64)

    def pad(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Right padding as in training; returns ids and the mask of real tokens."""
        length = self.recipe.max_tokens if self.recipe.padding == "max_length" else len(tokens)
        ids = np.full(length, self.recipe.pad_token_id, np.int64)
        ids[: len(tokens)] = tokens
        return ids, np.arange(length) < len(tokens)
