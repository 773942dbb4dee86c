"""What a head says token by token: how long a sentence may be, what ends it, and which chunk it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from sinew.core import SinewError
from sinew.core.fields import Side, Tagged
from sinew.steps import registry

State = TypeVar("State")


class ActionTokens(Tagged):
    """The sentences of a head that says a chunk as tokens.

    most: the tokens of the longest sentence. end: the token that ends one, -1 where all of them have ``most``.
    rows, dims: of a chunk.
    """

    registry = registry.ACTION_TOKENS
    most: Side
    end: int
    rows: Side
    dims: Side

    def chunk(self, said: np.ndarray) -> np.ndarray:
        """said: int64 [n], without the token that ends it -> float32 [rows, dims] in model units.

        Raises :class:`SinewError` for a sentence that the reference refuses.
        """
        raise NotImplementedError

    def chunks(self, said: np.ndarray) -> np.ndarray:
        """said: int64 [B, n], each up to its own end -> float32 [B, rows, dims].

        Raises :class:`SinewError` for a sentence alone that is refused; among others it leaves NaN in its place, so
        that it harms none of them.
        """
        found = np.full((len(said), self.rows, self.dims), np.nan, np.float32)
        for chunk, sentence in zip(found, said, strict=True):
            ends = np.flatnonzero(sentence == self.end)
            try:
                chunk[:] = self.chunk(sentence[: ends[0]] if len(ends) else sentence)
            except SinewError:
                if len(said) == 1:
                    raise
        return found

    def speak(
        self,
        state: State,
        more: Callable[[State], State],
        token: Callable[[State], np.ndarray],
        after_token: Callable[[np.ndarray], None],
    ) -> np.ndarray:
        """Return what is said, int64 [B, n]: n tokens until each of the B sentences has ended, at most ``most``.

        state: in which the first token is said. more: says one more token for all of them. token: the newest, int64
        [B]. after_token runs after each, with it: timing, cancellation. Behind the end of a sentence that others of
        its batch outlast stand tokens that mean nothing.
        """
        said = [token(state)]
        ended = said[0] == self.end
        after_token(said[0])
        while len(said) < self.most and not ended.all():
            state = more(state)
            said.append(token(state))
            ended = ended | (said[-1] == self.end)
            after_token(said[-1])
        return np.stack(said, axis=1)
