"""Guess the tokens that a head will say from those that it said, which costs nothing: numpy alone.

A robot that asks again, a step or a chunk later, gets a sentence much like the last. A guess is what followed, in the
sentences said last, the tokens that this one ends with; where none of them is there, the last sentence's own
continuation at the same place. One pass of the model checks it, so a guess changes no answer
(:meth:`sinew.models.base.Speaker.check`); such a pass may take as long as several plain ones, so the time that a token
took with and without guesses decides which way goes on. Speculative decoding (Leviathan et al. 2023, arXiv 2211.17192)
with earlier text as the draft (Saxena 2023, prompt lookup decoding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

SENTENCES = 4  # that are kept, the newest: of several robots in turn
LONGEST = 4  # tokens at the end of a sentence that are looked for
AGAIN = 16  # passes after which the slower way is tried once more, as sentences and machines change
ELSEWHERE = 2  # of them that have to be there for a guess from another place


class Drafts:
    """Keep the last sentences and guess from them, at most ``most`` tokens at a time."""

    def __init__(self, most: int):
        self.most = most
        self._kept: deque[list[int]] = deque(maxlen=SENTENCES)
        self._passes = 0
        self._took: dict[bool, float] = {}  # seconds of a token, with guesses and without

    def pays(self) -> bool:
        """Return whether the next pass shall check a guess: the way that took less, and at times the other."""
        self._passes += 1
        if len(self._took) < 2:
            return True not in self._took
        return (self._took[True] < self._took[False]) != (self._passes % AGAIN == 0)

    def note(self, guessed: bool, seconds: float, tokens: int) -> None:
        """Take in what a pass took and how many tokens it said."""
        new = seconds / tokens
        self._took[guessed] = 0.7 * self._took.get(guessed, new) + 0.3 * new

    def guess(self, said: Sequence[int], room: int) -> list[int]:
        """Return a guess at what follows ``said``, at most ``room`` tokens; empty where nothing is like it."""
        found: tuple[tuple[int, int, int], list[int]] = (0, 0, 0), []
        for age, sentence in enumerate([*reversed(self._kept), list(said)]):
            for at in range(1, len(sentence)):
                same = 0
                while same < min(at, len(said), LONGEST) and sentence[at - 1 - same] == said[-1 - same]:
                    same += 1
                if same < ELSEWHERE and at != len(said):
                    continue
                rank = (same + (at == len(said)), -abs(at - len(said)), -age)
                if not found[1] or rank > found[0]:
                    found = rank, sentence[at : at + min(self.most, room)]
        return found[1]

    def keep(self, sentence: Sequence[int]) -> None:
        """Remember a sentence that was said whole."""
        self._kept.append(list(sentence))
