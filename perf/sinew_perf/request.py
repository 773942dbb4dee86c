"""What a prediction asks of a policy: the sizes of one observation and of its answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sinew.core import SinewError
from sinew.layers.sizes import MAX_LENGTH

LEAST = {"cameras": 1, "prompt_tokens": 0, "chunk": 1, "steps": 1}
LIMITS = {"cameras": 64, "prompt_tokens": 1 << 20, "chunk": MAX_LENGTH, "steps": 1000}


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """The sizes of one request; None is the policy's own: all cameras, its longest prompt, its chunk and steps.

    Attributes:
        cameras: views of an observation; the policy's own number if absent, as for the next three.
        prompt_tokens: length of the prompt; 0 is a policy that is asked without words.
        chunk: actions per chunk.
        steps: of the solver.
    """

    cameras: int | None = None
    prompt_tokens: int | None = None
    chunk: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Raise :class:`SinewError` for a size below ``LEAST`` or beyond ``LIMITS``."""
        for name, value in asdict(self).items():
            if value is not None and not LEAST[name] <= value <= LIMITS[name]:
                raise SinewError(f"{name}: expected {LEAST[name]} to {LIMITS[name]}, got {value}")


AS_THE_POLICY = TracedRequest()
