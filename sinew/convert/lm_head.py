"""The language model's head, which no chunk of actions needs. It is kept on request, for subtasks, answers and the text
of a stream, together with the prompts that its texts follow."""

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
    "true keeps the language model's head, for subtasks, answers and the text of a stream (docs/stream.md)",
)
PROMPT_SETTINGS = {
    "subtask_prompt": Setting(
        str, "the prompt that a subtask follows, with {prompt} and {state} in their places"
    ),
    "subtask_action": Setting(str, "what is written behind a subtask before actions follow"),
    "question_prompt": Setting(str, "the prompt that an answer follows, with the question at {prompt}"),
}


@dataclass(frozen=True)
class LMHead:
    """The part of the head that a bundle keeps.

    Attributes:
        kind: The kind of head in the model's configuration: "", "own" or "tied".
        dead: Prefixes of the names of tensors that are not written into the bundle.
        end: The id of the token that ends a text; -1 for none.
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
    """Return the parts of a checkpoint that ``--set lm_head=true`` keeps; without this setting, no parts.

    Args:
        options: The user's options.
        tensors: The checkpoint's tensors.
        head: Name of the head's matrix.
        table: Name of the token table. Head and table are stored once if their bytes are equal.
        tokenizer: The tokenizer.
        end: Token that ends a text if tokenizer_config.json names no eos_token.
        dead: Prefixes of the names of tensors that are left out if no head is kept.
        tied: True if a checkpoint without a head uses its token table.

    Raises:
        ConvertError: The checkpoint has no head.
    """
    if not options.setting("lm_head", False):
        for name in PROMPT_SETTINGS:
            if options.setting(name, None) is not None:
                raise ConvertError(f"--set {name} needs --set lm_head=true")
        return LMHead("", dead)
    matrix = tensors.get(head)
    if matrix is None and not tied:
        raise ConvertError(f"--set lm_head=true: expected {head} in the checkpoint, got none")
    shared = matrix is None or _same(matrix, tensors.get(table))
    eos = tokenizer.eos_token_id
    if eos is None:
        eos = tokenizer.tokenizer.token_to_id(end)
    ends = (
        f"a text ends with token {eos} ({tokenizer.token_text(eos)!r})"
        if eos is not None
        else f"the tokenizer has no {end!r}, so a text ends at its length alone"
    )
    if shared:
        note = f"language head: the token table once more, no bytes of its own; {ends}"
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
    """Return the prompts of a kept language head. They come from ``--set``, else from the family; None if both prompts
    are "".

    Args:
        options: The user's options.
        before: Steps that change the instruction of each prompt.
        state: The step that writes the state in the place of ``{state}``.
        subtask: The family's prompt for a subtask.
        action: The family's text between subtask and actions.
        question: The family's prompt for a question.
    """
    subtask = options.setting("subtask_prompt", subtask)
    question = options.setting("question_prompt", question)
    if not subtask and not question:
        return None
    for name, words in (("subtask_prompt", subtask), ("question_prompt", question)):
        if "{state}" in words and state is None:
            raise ConvertError(
                f"--set {name}: expected no {{state}}, as this policy's prompts have none, got one"
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
