"""Advantages in the prompt of a checkpoint that was trained with them (RECAP). The user states their names and words,
because no file of the checkpoint has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinew.convert.options import ConvertOptions, Setting
from sinew.core import ConvertError
from sinew.core.fields import problems
from sinew.steps.prompt.advantage import Advantage

if TYPE_CHECKING:  # the module imports torch
    from sinew.convert.conversion import Conversion

WORDS = r"\nAdvantage: {advantage}"  # RLinf's TokenizePromptWithGuidance, and Evo-RL's
NAME = "{advantage}"
SETTINGS = {
    "advantage": Setting(
        str, "advantages that training wrote into the prompt, separated by commas, as positive,negative"
    ),
    "advantage_words": Setting(
        str, rf"what it wrote for one, with {NAME} for its name and \n for a line break; {WORDS} if absent"
    ),
    "advantage_place": Setting(
        str,
        "where: behind the instruction, before that is cleaned (the rule), or behind the whole text",
        values=("instruction", "text"),
    ),
    "usual_advantage": Setting(str, "the advantage of a request that names none; none if absent"),
}


def with_advantage(conversion: Conversion, options: ConvertOptions) -> Conversion:
    """Return the conversion with the prompt step that ``--set advantage=...`` and the related settings request.

    Raises :class:`ConvertError` for words without a place for the advantage's name, for settings without advantages,
    and for a policy whose prompt has no instruction.
    """
    values: dict[str, Any] = {name: options.settings[name] for name in SETTINGS if name in options.settings}
    if not values:
        return conversion
    names = [name.strip() for name in values.get("advantage", "").split(",") if name.strip()]
    if not names:
        raise ConvertError(f"--set {next(iter(values))} needs --set advantage=NAME,NAME")
    if len(set(names)) != len(names):
        raise ConvertError(f"--set advantage: expected different names, got {', '.join(names)}")
    words = values.get("advantage_words", WORDS).replace(r"\n", "\n")
    if NAME not in words:
        raise ConvertError(f"--set advantage_words: expected a place for the name, {NAME}, got {words!r}")
    prompt = conversion.processing.prompt
    if not any(step.slot == "{prompt}" for step in prompt.steps):
        kind = conversion.spec.architecture
        raise ConvertError(f"--set advantage: expected a policy that reads an instruction, got {kind}")
    step = Advantage(
        tuple((name, words.replace(NAME, name)) for name in names),
        values.get("usual_advantage", ""),
        values.get("advantage_place", "instruction"),
    )
    if problem := next(problems(step), None):
        raise ConvertError(f"--set advantage: {problem}")
    steps = (*prompt.steps, step) if step.place == "text" else (step, *prompt.steps)
    return replace(conversion, processing=replace(conversion.processing, prompt=replace(prompt, steps=steps)))
