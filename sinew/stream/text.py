"""Generates the text of a stream. Each computation of a prefix also generates one token of the text, in the same pass
over the weights.

Source: section 6 of "Running VLAs at Real-time Speed" (Ma et al. 2025). A token is appended to the prompt of the
next pass. This pass reads the whole text again together with the newest frame, so keys and values of an older
frame are never used. The text is the greedy continuation of the prompt with the newest observation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamedText:
    """The generated text of a stream at the time when one prefix was computed.

    Attributes:
        running: The text that is being generated.
        said: The last text that was completed and is not empty.
    """

    running: str = ""
    said: str = ""


SILENT = StreamedText()


class TextDecoder:
    """Generates texts one after another. Only the slow loop uses this object.

    If the instruction changes, the running text is dropped, because it continues another prompt.

    Args:
        limit: Largest number of tokens of a text.
        words: Converts token ids to text.
        end: Token that ends a text; -1 if there is none.
    """

    def __init__(self, limit: int, words: Callable[[list[int]], str], end: int):
        self.limit, self._words, self._end = limit, words, end
        self.tokens: list[int] = []
        self.text = SILENT
        self._prompt: str | None = None

    def begin(self, prompt: str) -> list[int]:
        """Return the tokens that the model reads after the prompt in the next pass: the text that was generated so
        far.
        """
        if prompt != self._prompt:
            self._prompt = prompt
            self._next(self.text.said)
        return self.tokens

    def add(self, token: int) -> StreamedText:
        """Add the token of a pass, and return the present text. After the end of a text, the next text begins."""
        if token != self._end:
            self.tokens = [*self.tokens, token]
        words = self._words(self.tokens)
        if token == self._end or len(self.tokens) >= self.limit:
            self._next(words or self.text.said)
        else:
            self.text = StreamedText(words, self.text.said)
        return self.text

    def _next(self, said: str) -> None:
        self.tokens, self.text = [], StreamedText("", said)
