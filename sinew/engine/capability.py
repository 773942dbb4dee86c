"""The capabilities that some engines have and others lack, and the reasons that engines give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is impossible, in the form of every error: `expected X, got Y`.

    Attributes:
        expected: What would make it possible.
        got: What is there instead.
    """

    expected: str
    got: str

    def __str__(self) -> str:
        return f"expected {self.expected}, got {self.got}"


class Capability(StrEnum):
    """Something that an engine may be able to do. :attr:`sinew.engine.backend.Backend.capabilities` lists each
    engine's, and :attr:`sinew.engine.engine.Facts.refusals` what an open one cannot do with its bundle."""

    GUIDE = "guide"  # continue a running chunk (real-time chunking)
    BATCH = "batch"  # several observations in one inference
    STREAM = "stream"  # read and solve at the same time, on two threads
    ROLL = "roll"  # give each row of a chunk a time of its own
    SPEAK = "speak"  # generate text with the language head
    TWO_PROMPTS = "two prompts"  # read two prompts over the same views (classifier-free guidance)
    REUSE = "reuse"  # keep what observations repeat
    EXCHANGE = "exchange"  # take new weights between two inferences
    SPLIT = "split"  # solve a context that another machine has read
    ADAPT = "adapt"  # compute adapters beside the bundle's weights
    AUDIT = "audit"  # list what a recorded program could not hold

    @property
    def clause(self) -> str:
        """The relative clause that follows the names of engines in a message."""
        return CLAUSES[self]


CLAUSES: Mapping[Capability, str] = {
    Capability.GUIDE: "which can continue a running chunk",
    Capability.BATCH: "which computes several observations at once",
    Capability.STREAM: "whose stages share no memory",
    Capability.ROLL: "which takes a time per row",
    Capability.SPEAK: "which generates text",
    Capability.TWO_PROMPTS: "which reads two prompts over the same views",
    Capability.REUSE: "which keeps what observations repeat",
    Capability.EXCHANGE: "which takes new weights while it runs",
    Capability.SPLIT: "which solves a context that another machine has read",
    Capability.ADAPT: "which computes adapters",
    Capability.AUDIT: "which records its program",
}
