"""Convert a prompt template with placeholders in braces, as training projects write it, to steps."""

from __future__ import annotations

import re

from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.state import State
from sinew.steps.prompt.text import Text


def sentence(template: str, state: State | None = None, image: Image | None = None) -> tuple[PromptStep, ...]:
    """Return the steps that write a template.

    Args:
        template: Text with the placeholders ``{prompt}`` for the instruction, ``{state}`` and ``{image}``. Other braces
            are text.
        state: The step for ``{state}``. With None, the placeholder is text.
        image: The step for ``{image}``. With None, the placeholder is text.
    """
    places = {"{prompt}": Instruction(), "{state}": state, "{image}": image}
    parts = re.split(r"(\{prompt\}|\{state\}|\{image\})", template)
    return tuple(places.get(part) or Text(part) for part in parts if part)
