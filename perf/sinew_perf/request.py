"""The sizes of one observation and its answer, for which time or memory is predicted."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sinew.core import SinewError
from sinew.layers.sizes import MAX_LENGTH

MINIMA = {"cameras": 1, "prompt_tokens": 0, "chunk": 1, "steps": 1}
LIMITS = {"cameras": 64, "prompt_tokens": 1 << 20, "chunk": MAX_LENGTH, "steps": 1000}


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """Sizes of one request. None means the policy's own value: all cameras, its longest prompt, its chunk and its
    steps.

    Attributes:
        cameras: Number of camera frames in an observation.
        prompt_tokens: Length of the prompt. 0 for a policy without a prompt.
        chunk: Number of actions in a chunk.
        steps: Number of solver steps.
    """

    cameras: int | None = None
    prompt_tokens: int | None = None
    chunk: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Raise :class:`SinewError` for a size below ``MINIMA`` or above ``LIMITS``."""
        for name, value in asdict(self).items():
            if value is not None and not MINIMA[name] <= value <= LIMITS[name]:
                raise SinewError(f"{name}: expected {MINIMA[name]} to {LIMITS[name]}, got {value}")


AS_THE_POLICY = TracedRequest()
