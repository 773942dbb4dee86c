"""Add an advantage (RECAP) to the prompt of a policy that was trained with one.

An advantage is a text in the prompt, such as "positive", that states how good the actions should be. The user passes
the allowed values and the text around them, because the checkpoint's files do not contain them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinew.convert.options import ConvertOptions, Setting
from sinew.core import ConvertError
from sinew.core.fields import problems
from sinew.steps.prompt.advantage import Advantage

# conversion.py imports torch. Import it for type checkers only.
if TYPE_CHECKING:
    from sinew.convert.conversion import Conversion

# The text that RLinf (TokenizePromptWithGuidance) and Evo-RL add to the prompt.
WORDS = r"\nAdvantage: {advantage}"
NAME = "{advantage}"
SETTINGS = {
    "advantage": Setting(
        str, "advantages that training wrote into the prompt, separated by commas, as positive,negative"
    ),
    "advantage_words": Setting(
        str,
        rf"text of an advantage in the prompt, with {NAME} for its name and \n for a line break; {WORDS} if absent",
    ),
    "advantage_place": Setting(
        str,
        "position of this text: after the instruction, before the instruction is cleaned (the rule), or after the whole"
        " prompt",
        values=("instruction", "text"),
    ),
    "usual_advantage": Setting(
        str, "advantage of a request that names none; if absent, such a request has no advantage"
    ),
}


def with_advantage(conversion: Conversion, options: ConvertOptions) -> Conversion:
    """Add the prompt step that ``--set advantage=...`` and the related settings request.

    Args:
        conversion: The checkpoint that has been read.
        options: The options of the conversion. ``options.settings`` may contain the names in :data:`SETTINGS`.

    Returns:
        The changed conversion, or ``conversion`` itself if the options contain none of these settings.

    Raises:
        ConvertError: A setting is invalid, a setting needs ``advantage``, or the policy's prompt has no instruction.
    """
    values: dict[str, Any] = {name: options.settings[name] for name in SETTINGS if name in options.settings}
    if not values:
        return conversion
    names = [name.strip() for name in values.get("advantage", "").split(",") if name.strip()]
    if not names:
        raise ConvertError(
            f"--set {next(iter(values))} requires --set advantage=NAME,NAME; pass both settings"
        )
    if len(set(names)) != len(names):
        raise ConvertError(
            f"--set advantage: expected different names, got {', '.join(names)}; remove duplicates"
        )
    words = values.get("advantage_words", WORDS).replace(r"\n", "\n")
    if NAME not in words:
        raise ConvertError(f"--set advantage_words: expected a text that contains {NAME}, got {words!r}")
    prompt = conversion.processing.prompt
    if not any(step.slot == "{prompt}" for step in prompt.steps):
        kind = conversion.spec.architecture
        raise ConvertError(
            f"--set advantage: expected a policy that reads an instruction, got {kind}; omit this setting"
        )
    step = Advantage(
        tuple((name, words.replace(NAME, name)) for name in names),
        values.get("usual_advantage", ""),
        values.get("advantage_place", "instruction"),
    )
    if problem := next(problems(step), None):
        raise ConvertError(f"--set advantage: {problem}")
    steps = (*prompt.steps, step) if step.place == "text" else (step, *prompt.steps)
    return replace(conversion, processing=replace(conversion.processing, prompt=replace(prompt, steps=steps)))
