"""Convert an instruction to tokens, with the tokenizer and the prompt steps of the bundle."""

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

MAX_CHARACTERS = 1 << 16  # longer texts are rejected, because the tokenizer would need much time for them
REMEMBERED = 64  # the tokens of this many texts are cached
# Key: kind of prompt. Value: field of the observation that contains the text of the prompt.
FIELDS = {"prompt": "prompt", "subtask": "prompt", "question": "question"}
# Key: kind of prompt. Value: (expected value, actual value) for the error message if its text is empty.
ASKED = {
    "subtask": ("an instruction from which a subtask is generated", "it"),
    "question": ("a question, such as 'what is in the gripper?'", "one"),
}


class Prompter:
    """Converts an instruction to tokens.

    Args:
        tokenizer_json: The content of tokenizer.json.
        recipe: The prompt recipe.
        opened: The tokenizer object, if it has already been created from the same content; None to create it.
        may_be_empty: Accept an empty instruction and tokenise it like any other, for policies that were trained with
            it.

    Attributes:
        behind: The tokens between a generated subtask and the actions.
    """

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
        """Return the exact string that is tokenised.

        Args:
            prompt: The instruction or the question.
            state: The normalised state, [D].
            kind: "prompt" for actions, "subtask" or "question" for a text that the language head generates.
            advantage: The advantage; "" for none.
        """
        written = PromptText(prompt, "", state, advantage)
        for step in self._steps[kind]:
            written = step.forward(written)
        return written.text

    def encode(self, prompt: object, state: np.ndarray, advantage: str = "") -> np.ndarray:
        """Return the token ids of the formatted instruction, int64 [L], 1 <= L <= max_tokens. A longer prompt is an
        error and is not truncated."""
        expected = "an instruction, such as 'pick up the red cube' (this policy has no default)"
        return self._encoded("prompt", prompt, state, expected, advantage)

    def encode_asked(self, kind: str, text: object, state: np.ndarray) -> np.ndarray:
        """Return the token ids of a prompt after which the language head generates text.

        Args:
            kind: "subtask" or "question".
            text: The instruction or the question.
            state: The normalised state, [D].

        Raises:
            ObservationError: The bundle has no prompt of this kind.
        """
        expected, got = ASKED[kind]
        if not self._steps[kind]:
            option = f"sinew convert --set {kind}_prompt="
            raise ObservationError(kind, f"nothing, because this bundle has no prompt for it ({option})", got)
        return self._encoded(kind, text, state, expected)

    def _encoded(
        self, kind: str, text: object, state: np.ndarray, expected: str, advantage: str = ""
    ) -> np.ndarray:
        """Return the tokens of a text. The arguments are those of :meth:`text`, and ``expected`` is for messages.

        The result is cached, because an episode has one instruction. If a prompt step reads the state, which changes,
        only the tokens of each complete text are cached.
        """
        name = FIELDS[kind]
        if not isinstance(text, str):
            raise ObservationError(name, "a string", type(text).__name__)
        if not text.strip() and not (self.may_be_empty and kind == "prompt"):
            hint = f" ({option('allow_empty_prompt')} allows it)" if kind == "prompt" else ""
            raise ObservationError(name, expected, f"an empty string{hint}")
        if len(text) > MAX_CHARACTERS:
            raise ObservationError(name, f"at most {MAX_CHARACTERS} characters", str(len(text)))
        try:
            written = (
                self.text(text, state, kind, advantage)
                if self._reads_state[kind]
                else self._text(text, kind=kind, advantage=advantage)
            )
            return self._ids(written, kind).copy()
        # Lone surrogates cannot be encoded as UTF-8, so no tokenizer accepts them.
        except (UnicodeEncodeError, TypeError):
            raise ObservationError(name, "text that can be encoded as UTF-8", "lone surrogates") from None
        except ValueError as error:
            raise ObservationError(name, "text that the tokenizer accepts", str(error)) from None

    def _behind(self, words: str) -> tuple[int, ...]:
        """Return the token ids of the text ``words``, which is inserted between a subtask and the actions.

        Raises:
            BundleError: The tokenizer lacks a required token.
        """
        with BundleError.at("sinew.processing.prompt.text.action", ValueError, ObservationError):
            ids = encode(self.tokenizer, words, False) if words else []
            return tuple(map(int, self.check_tokens(np.array(ids), "text.action", ()))) if ids else ()

    def _tokenize(self, text: str, kind: str) -> np.ndarray:
        ids = encode(self.tokenizer, text, self.recipe.add_special_tokens)
        for step in self._steps[kind]:
            ids = step.tokens(ids, text)
        required = None if kind == "prompt" else ()
        return self.check_tokens(np.asarray(ids, np.int64), FIELDS[kind], required)

    def words(self, tokens: Sequence[int]) -> str:
        """Return the text of vocabulary tokens, without special tokens; "" if the tokenizer fails."""
        try:
            return decode(self.tokenizer, tokens)
        except ValueError:
            return ""

    def check_tokens(
        self, tokens: object, name: str = "tokens", required: Sequence[HeldTokens] | None = None
    ) -> np.ndarray:
        """Check the token ids that a client sends instead of a text. Return them as int64 [L].

        Args:
            tokens: The token ids.
            name: The field, for messages.
            required: Special tokens that must occur; None for the special tokens that the prompt recipe requires.
        """
        array = numbers(name, tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ObservationError(name, "a vector of integers", f"{array.dtype} {list(array.shape)}")
        limit = self.recipe.max_tokens
        if not 1 <= len(array) <= limit:
            raise ObservationError(name, f"1 to {limit} tokens", f"{len(array)}")
        if array.min() < 0 or array.max() >= self.recipe.vocab_size:
            expected = f"token ids in [0, {self.recipe.vocab_size})"
            raise ObservationError(name, expected, f"{array.min()} to {array.max()}")
        if required is None and len(array) != (whole := self.recipe.whole or len(array)):
            raise ObservationError(name, f"{whole} tokens, with their padding", f"{len(array)}")
        for what, token, expected_count in self.recipe.held if required is None else required:
            if (count := int((array == token).sum())) != expected_count:
                raise ObservationError(name, f"{expected_count} {what} ({token})", str(count))
        return array.astype(np.int64)

    def pad(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pad tokens on the right as in training. Return the ids and the mask of the real tokens."""
        length = self.recipe.max_tokens if self.recipe.padding == "max_length" else len(tokens)
        ids = np.full(length, self.recipe.pad_token_id, np.int64)
        ids[: len(tokens)] = tokens
        return ids, np.arange(length) < len(tokens)
