"""FAST tokens (Pertsch et al. 2025, arXiv 2501.09747): byte pairs over a discrete cosine transform of the chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from sinew.core import BundleError, SinewError
from sinew.core.fields import Finite, Positive, Side, characters
from sinew.steps.action_tokens.base import ActionTokens
from sinew.steps.tokenizer import decode, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST = 8 << 20  # largest accepted length of a tokenizer in characters; the published one has 0.2 million


@dataclass(frozen=True)
class FastTokens(ActionTokens):
    """Action tokens of FAST. Decoded to text, each character is one coefficient of the chunk's cosine
    transform along time.

    The rules are LeRobot's: extra characters are cut, and missing characters are zeros. Ids after the
    tokenizer's last id are ignored. If a sequence contains an id before the tokenizer's first id, the whole
    chunk is zeros. The inverse of the normalisation then gives the mean action.

    Attributes:
        most: Number of tokens of the longest sequence.
        end: The token that ends a sequence.
        rows: Number of actions of a chunk.
        dims: Number of values of an action.
        zero: The language model's id of FAST's token 0. FAST's other tokens have lower ids.
        tokenizer: FAST's own tokenizer, a whole ``tokenizer.json``.
        least: The coefficient that the character with code 0 means. The next code means the next integer.
        scale: The number by which the integers are divided to get the coefficients.
        begins: Ids with which a sequence must begin.
        leaves_out: A sequence of ids without meaning, which is removed wherever it occurs.
    """

    most: Side
    end: int
    rows: Side
    dims: Side
    zero: int
    tokenizer: Annotated[str, characters(0, LONGEST)] = field(repr=False)
    least: Finite
    scale: Positive
    begins: tuple[int, ...] = ()
    leaves_out: tuple[int, ...] = ()
    kind: Literal["fast"] = field(default="fast", kw_only=True, repr=False)

    def problems(self) -> Iterator[str]:
        try:
            self.opened()
        except BundleError as error:
            yield f"tokenizer: {error}"

    def opened(self) -> Tokenizer:
        """Return the tokenizer object of FAST, created from the text in ``tokenizer``.

        Raises:
            BundleError: The text is not a valid tokenizer.
        """
        return _opened(self.tokenizer)

    def chunk(self, said: np.ndarray) -> np.ndarray:
        if tuple(said[: len(self.begins)].tolist()) != self.begins:
            begins, got = list(self.begins), said[: len(self.begins)].tolist()
            raise SinewError(
                f"tokens: expected a chunk that begins with the tokens {begins}, as in training, got {got}"
            )
        count, values = self.rows * self.dims, self.characters(said)
        coefficients = np.zeros(count, np.float64)
        coefficients[: len(values)] = values[:count]
        return inverse_dct(coefficients.reshape(self.rows, self.dims) / self.scale).astype(np.float32)

    def characters(self, said: np.ndarray) -> list[float]:
        """Decode a token sequence to coefficients. Their number depends on the sequence."""
        ids = [self.zero - token for token in without(said.tolist(), self.leaves_out)]
        if min(ids, default=0) < 0:
            return []
        with SinewError.at(f"FAST's tokenizer cannot spell {len(ids)} tokens", ValueError):
            text = decode(self.opened(), ids, skip_special_tokens=False)
        return [ord(letter) + self.least for letter in text]

    def __str__(self) -> str:
        return f"FAST below token {self.zero}, at most {self.most}"


@lru_cache(maxsize=4)
def _opened(text: str) -> Tokenizer:
    return open_tokenizer(text, where="FAST's tokenizer")


def without(ids: list[int], run: tuple[int, ...]) -> list[int]:
    """Return the ids without each occurrence of ``run``, from left to right.

    If the removal of a run makes a new run, that run is removed too.
    """
    remaining, at = list(ids), 0
    while run and at <= len(remaining) - len(run):
        if tuple(remaining[at : at + len(run)]) == run:
            del remaining[at : at + len(run)]
        else:
            at += 1
    return remaining


def inverse_dct(x: np.ndarray) -> np.ndarray:
    """Return the inverse of the orthonormal DCT-II along the first axis, float64 [n, ...]."""
    count = len(x)
    time, frequency = np.arange(count)[:, None] + 0.5, np.arange(count)
    basis = np.cos(np.pi / count * time * frequency) * np.sqrt(2 / count)  # [time, frequency]
    basis[:, 0] = np.sqrt(1 / count)
    return basis @ x
