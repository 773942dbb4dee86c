"""The text of a stream: one token per prefix, from the same pass over the same weights.

After section 6 of "Running VLAs at Real-time Speed" (Ma et al. 2025). A token is appended to the prompt of the next
pass, which reads all text again together with the newest frame. Keys and values of an older frame are never used. The
text is the greedy continuation of the newest observation's prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StreamedText:
    """running: what is being said. said: the last text that is complete and not empty."""

    running: str = ""
    said: str = ""


SILENT = StreamedText()


class TextDecoder:
    """Texts one after the other, each of at most ``limit`` tokens. Belongs to the slow loop.

    words: ids -> what they spell. end: the token that ends a text; -1: none. A text whose instruction changes is
    dropped, since it goes on behind another prompt.
    """

    def __init__(self, limit: int, words: Callable[[list[int]], str], end: int):
        self.limit, self._words, self._end = limit, words, end
        self.tokens: list[int] = []
        self.text = SILENT
        self._prompt: str | None = None

    def begin(self, prompt: str) -> list[int]:
        """Return the tokens behind the prompt of the next pass."""
        if prompt != self._prompt:
            self._prompt = prompt
            self._next(self.text.said)
        return self.tokens

    def add(self, token: int) -> StreamedText:
        """Take the token of a pass, and return the present text. After a text has ended, another one begins."""
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
