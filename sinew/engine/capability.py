"""The list of capabilities that only some engines have, and the reason why an engine lacks a capability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why an action is impossible, in the form of every error: `expected X, got Y`.

    Attributes:
        expected: The condition that the action requires, such as "a CPU".
        got: The condition that was found instead.
    """

    expected: str
    got: str

    def __str__(self) -> str:
        return f"expected {self.expected}, got {self.got}"


class Capability(StrEnum):
    """An optional feature of an engine. Some features concern the two methods of an engine: ``read`` computes the
    context of an observation, and ``solve`` computes actions from the context.

    :attr:`sinew.engine.backend.Backend.capabilities` lists the capabilities of each engine, and
    :attr:`sinew.engine.engine.Facts.refusals` lists the capabilities that an open engine lacks with its bundle.

    Attributes:
        GUIDE: Continue the chunk that the robot is executing (real-time chunking).
        BATCH: Compute several observations in one inference.
        STREAM: Run ``read`` and ``solve`` at the same time, on two threads.
        ROLL: Denoise each action of a chunk at its own time.
        SPEAK: Generate text with the language head.
        TWO_PROMPTS: Read two prompts over the same views (classifier-free guidance).
        REUSE: Store results for later observations that repeat earlier ones.
        EXCHANGE: Accept new weights between two inferences.
        SPLIT: Compute actions from a context that another machine has computed.
        ADAPT: Compute LoRA adapters in addition to the bundle's weights.
        AUDIT: List the operations that a recorded program cannot contain.
    """

    GUIDE = "guide"
    BATCH = "batch"
    STREAM = "stream"
    ROLL = "roll"
    SPEAK = "speak"
    TWO_PROMPTS = "two prompts"
    REUSE = "reuse"
    EXCHANGE = "exchange"
    SPLIT = "split"
    ADAPT = "adapt"
    AUDIT = "audit"

    @property
    def clause(self) -> str:
        """Return the capability as a relative clause for messages, such as "which generates text".

        Messages put the clause after the names of engines.
        """
        return CLAUSES[self]


CLAUSES: Mapping[Capability, str] = {
    Capability.GUIDE: "which can continue a running chunk",
    Capability.BATCH: "which computes several observations at once",
    Capability.STREAM: "which can run read and solve at the same time",
    Capability.ROLL: "which denoises each action at its own time",
    Capability.SPEAK: "which generates text",
    Capability.TWO_PROMPTS: "which reads two prompts over the same views",
    Capability.REUSE: "which reuses results of repeated observations",
    Capability.EXCHANGE: "which accepts new weights while it runs",
    Capability.SPLIT: "which computes actions from a context of another machine",
    Capability.ADAPT: "which computes adapters",
    Capability.AUDIT: "which records its program",
}
