"""A step that writes the state into a prompt as one token per value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sinew.core.fields import Side
from sinew.steps.prompt.base import PromptStep, PromptText


@dataclass(frozen=True)
class StateTokens(PromptStep):
    """Write each value of the normalised state as a token, such as ``<state_12>``.

    Attributes:
        levels: Number of tokens. They stand for equal distances from -1 to 1, with both ends.
    """

    levels: Side = 256
    kind: Literal["state_tokens"] = field(default="state_tokens", kw_only=True, repr=False)
    slot = "{state}"
    reads_state = True

    def forward(self, said: PromptText) -> PromptText:
        return said.saying("".join(f"<state_{number}>" for number in self.numbers(said.state)))

    def numbers(self, state: np.ndarray) -> list[int]:
        """Return the index of the nearest level, 0 .. levels - 1, of each value of a normalised state [D].

        Ties go to the even index. The computation is in float32, as in LeRobot's MolmoAct2, because a value near a tie
        could have another index in another precision.
        """
        values = np.clip(state.astype(np.float32), np.float32(-1), np.float32(1))
        scaled = (values + np.float32(1)) / np.float32(2) * np.float32(self.levels - 1)
        return [int(number) for number in np.rint(scaled)]

    def __str__(self) -> str:
        return f"a token per value of the state, of {self.levels} levels"
