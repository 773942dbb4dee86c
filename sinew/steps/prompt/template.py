"""A sentence with places in braces, as upstream writes its prompts, as steps."""

from __future__ import annotations

import re

from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.state import State
from sinew.steps.prompt.text import Text


def sentence(template: str, state: State | None = None, image: Image | None = None) -> tuple[PromptStep, ...]:
    """Return the steps that write a template: ``{prompt}`` is the instruction's place, ``{state}`` and ``{image}`` are
    those of the steps that are given; other braces are text."""
    places = {"{prompt}": Instruction(), "{state}": state, "{image}": image}
    parts = re.split(r"(\{prompt\}|\{state\}|\{image\})", template)
    return tuple(places.get(part) or Text(part) for part in parts if part)
