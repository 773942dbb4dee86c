"""The interface of action tokens: the length and the end of a token sequence, and the chunk that the tokens encode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from sinew.core import SinewError
from sinew.core.fields import Side, Tagged
from sinew.steps import registry

State = TypeVar("State")


class ActionTokens(Tagged):
    """Converts the tokens that an autoregressive head generates to an action chunk.

    Attributes:
        most: Number of tokens of the longest sequence.
        end: The token that ends a sequence, or -1 if all sequences have ``most`` tokens.
        rows: Number of actions of a chunk.
        dims: Number of values of an action.
    """

    registry = registry.ACTION_TOKENS
    most: Side
    end: int
    rows: Side
    dims: Side

    def chunk(self, said: np.ndarray) -> np.ndarray:
        """Return the chunk that a token sequence encodes, float32 [rows, dims] in model units.

        Args:
            said: The generated tokens without the end token, int64 [n].

        Raises:
            SinewError: The training project's code rejects the sequence.
        """
        raise NotImplementedError

    def chunks(self, said: np.ndarray) -> np.ndarray:
        """Return the chunks of a batch of token sequences, float32 [B, rows, dims].

        In a batch of several sequences, an invalid sequence gives a chunk of NaN, so that the other chunks stay valid.

        Args:
            said: int64 [B, n]. Tokens after the end token of a sequence are ignored.

        Raises:
            SinewError: The only sequence of the batch is invalid.
        """
        result = np.full((len(said), self.rows, self.dims), np.nan, np.float32)
        for chunk, sentence in zip(result, said, strict=True):
            ends = np.flatnonzero(sentence == self.end)
            try:
                chunk[:] = self.chunk(sentence[: ends[0]] if len(ends) else sentence)
            except SinewError:
                if len(said) == 1:
                    raise
        return result

    def speak(
        self,
        state: State,
        more: Callable[[State], State],
        token: Callable[[State], np.ndarray],
        after_token: Callable[[np.ndarray], None],
    ) -> np.ndarray:
        """Generate tokens until each of the B sequences has ended, or has ``most`` tokens.

        If a sequence has ended and others continue, its further tokens have no meaning.

        Args:
            state: The model's state after the first token.
            more: Generates one more token for all sequences.
            token: Returns the newest token, int64 [B].
            after_token: Called with each token, for timing and cancellation.

        Returns:
            The generated tokens, int64 [B, n].
        """
        tokens = [token(state)]
        ended = tokens[0] == self.end
        after_token(tokens[0])
        while len(tokens) < self.most and not ended.all():
            state = more(state)
            tokens.append(token(state))
            ended = ended | (tokens[-1] == self.end)
            after_token(tokens[-1])
        return np.stack(tokens, axis=1)
