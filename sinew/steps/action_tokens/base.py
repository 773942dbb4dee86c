"""Action tokens of an autoregressive head: how long a sequence may be, what ends it, and which chunk it encodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from sinew.core import SinewError
from sinew.core.fields import Side, Tagged
from sinew.steps import registry

State = TypeVar("State")


class ActionTokens(Tagged):
    """The token sequences of a head that generates a chunk as tokens.

    Attributes:
        most: Tokens of the longest sequence.
        end: The token that ends one; -1 if all have ``most`` tokens.
        rows: Actions of a chunk.
        dims: Numbers of an action.
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
        """Generate the tokens, int64 [B, n]: until each of the B sequences has ended, at most ``most``.

        After the end of a sequence that others of its batch outlast, its tokens have no meaning.

        Args:
            state: State in which the first token is read.
            more: Generates one more token for all sequences.
            token: Returns the newest token, int64 [B].
            after_token: Called with each token, for timing and cancellation.
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
