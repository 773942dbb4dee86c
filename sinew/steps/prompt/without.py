"""A step that rejects instructions that contain a certain text."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from sinew.core import ObservationError
from sinew.steps.prompt.base import PromptStep, PromptText, Written


@dataclass(frozen=True)
class Without(PromptStep):
    """Reject an instruction that contains ``text``.

    The policy's project treats this text by a rule that Sinew does not have.
    """

    text: Written
    kind: Literal["without"] = field(default="without", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        if self.text in said.instruction:
            raise ObservationError(
                "prompt",
                f"an instruction without {self.text}, which Sinew does not support for this policy",
                "an instruction with this text",
            )
        return said

    def __str__(self) -> str:
        return f"without {json.dumps(self.text)}"
