"""Read the output layer ("head") of the language model, which generates text, and the prompts for these texts.
Actions do not need the head, so a bundle contains it only if the user requests it, for subtasks, answers and the
text of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sinew.bundle.writer import TensorSource
from sinew.convert.options import ConvertOptions, Setting
from sinew.convert.tokenizer_files import TokenizerFiles
from sinew.core import ConvertError
from sinew.steps.prompt.base import PromptStep, TextRecipe
from sinew.steps.prompt.state import State
from sinew.steps.prompt.template import sentence

LM_HEAD_SETTING = Setting(
    bool,
    "true stores the language model's head, for subtasks, answers and the text of a stream",
)
PROMPT_SETTINGS = {
    "subtask_prompt": Setting(
        str, "prompt for a subtask, with {prompt} for the instruction and {state} for the state"
    ),
    "subtask_action": Setting(str, "text between a subtask and the actions"),
    "question_prompt": Setting(str, "prompt for an answer, with {prompt} for the question"),
}


@dataclass(frozen=True)
class LMHead:
    """The decision how a bundle stores the output layer ("head") of the language model.

    Attributes:
        kind: How the head is stored, for the model's configuration: "" (no head), "own" (its own matrix) or "tied"
            (the token table is used as the head).
        dead: Prefixes of the names of tensors that are not written into the bundle.
        end: The id of the token that ends a text; -1 if there is no such token.
        notes: Notes for the user.
    """

    kind: Any
    dead: tuple[str, ...]
    end: int = -1
    notes: tuple[str, ...] = ()


def lm_head(
    options: ConvertOptions,
    tensors: Mapping[str, TensorSource],
    head: str,
    table: str,
    tokenizer: TokenizerFiles,
    end: str,
    dead: tuple[str, ...],
    tied: bool,
) -> LMHead:
    """Select the tensors of the language head that the bundle stores: none, unless ``--set lm_head=true`` is passed.

    Args:
        options: The user's options.
        tensors: The checkpoint's tensors.
        head: Name of the head's matrix.
        table: Name of the token table. If head and table have equal bytes, the bundle stores them once.
        tokenizer: The tokenizer.
        end: Token that ends a text if tokenizer_config.json names no eos_token.
        dead: Prefixes of the names of tensors that are left out if the head is not stored.
        tied: True if the token table is used as the head when a checkpoint contains no head.

    Raises:
        ConvertError: The checkpoint has no head.
    """
    if not options.setting("lm_head", False):
        for name in PROMPT_SETTINGS:
            if options.setting(name, None) is not None:
                raise ConvertError(f"--set {name} requires --set lm_head=true; pass both settings")
        return LMHead("", dead)
    matrix = tensors.get(head)
    if matrix is None and not tied:
        raise ConvertError(
            f"--set lm_head=true: expected {head} in the checkpoint, got none; omit this setting"
        )
    shared = matrix is None or _same(matrix, tensors.get(table))
    eos = tokenizer.eos_token_id
    if eos is None:
        eos = tokenizer.tokenizer.token_to_id(end)
    ends = (
        f"a text ends with token {eos} ({tokenizer.token_text(eos)!r})"
        if eos is not None
        else f"the tokenizer has no {end!r}, so a text ends only at its largest length"
    )
    if shared:
        note = f"language head: it shares the token table, so it adds no bytes; {ends}"
        return LMHead("tied", dead, -1 if eos is None else eos, (note,))
    assert matrix is not None
    note = f"language head: {matrix.nbytes / 1e6:.1f} MB; {ends}"
    own_dead = tuple(prefix for prefix in dead if not head.startswith(prefix))
    return LMHead("own", own_dead, -1 if eos is None else eos, (note,))


def text_recipe(
    options: ConvertOptions,
    before: tuple[PromptStep, ...],
    state: State | None = None,
    *,
    subtask: str = "",
    action: str = "",
    question: str = "",
) -> TextRecipe | None:
    """Return the prompts for the texts of the language head. ``--set`` overrides the family's prompts.

    Args:
        options: The user's options.
        before: Steps that change the instruction of each prompt.
        state: The step that writes the state in the place of ``{state}``.
        subtask: The family's prompt for a subtask.
        action: The family's text that is inserted between a generated subtask and the actions.
        question: The family's prompt for a question.

    Returns:
        The recipe; None if both prompts are "".

    Raises:
        ConvertError: A prompt contains ``{state}``, but the policy's prompt does not.
    """
    subtask = options.setting("subtask_prompt", subtask)
    question = options.setting("question_prompt", question)
    if not subtask and not question:
        return None
    for name, words in (("subtask_prompt", subtask), ("question_prompt", question)):
        if "{state}" in words and state is None:
            raise ConvertError(
                f"--set {name}: expected no {{state}}, because this policy's prompts do not contain the state, got one"
            )
    return TextRecipe(
        subtask=(*before, *sentence(subtask, state)) if subtask else (),
        action=options.setting("subtask_action", action) if subtask else "",
        question=(*before, *sentence(question, state)) if question else (),
    )


def _same(head: TensorSource, table: TensorSource | None) -> bool:
    if table is None or (head.shape, head.type) != (table.shape, table.type):
        return False
    return head.sha256() == table.sha256()
