"""A step with MolmoAct2's cleaning of an instruction."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from sinew.steps.prompt.base import PromptStep, PromptText

SENTENCE_ENDS = ".,!?;:,\u2026"
CLOSERS = "\"'\u201d\u2019)]}"
AROUND = "\"'`\u201c\u201d\u2018\u2019[](){}"
BEGINNINGS = (
    re.compile(r"(?:task|instruction|language[_ ]instruction|goal)\s*[:\-]\s*", re.IGNORECASE),
    re.compile(r"(?:the\s+task\s+is\s+to|your\s+task\s+is\s+to)\s+", re.IGNORECASE),
)


@dataclass(frozen=True)
class TaskPrompt(PromptStep):
    """Write the instruction in lower case on one line, without quotation marks, brackets, beginnings such as "Task:",
    and punctuation at its end. Semicolons separate several sentences.
    """

    kind: Literal["task"] = field(default="task", kw_only=True, repr=False)

    def forward(self, said: PromptText) -> PromptText:
        return said._replace(instruction=normalized(said.instruction))

    def __str__(self) -> str:
        return "small letters, one line, no quotation marks around and no punctuation at the end"


def normalized(text: str) -> str:
    """Return the instruction as MolmoAct2's training data has it (LeRobot's ``_normalize_question_text``)."""
    text, before = re.sub(r"\s+", " ", text).strip(), None
    # A part that is removed can reveal another one, such as brackets in quotation marks.
    while text != before:
        before = text
        text = text.strip().strip(AROUND).strip()
        for beginning in BEGINNINGS:
            if found := beginning.match(text):
                text = text[found.end() :].strip()
        for marks in (SENTENCE_ENDS, CLOSERS, SENTENCE_ENDS):
            text = text.rstrip(marks).rstrip()
    sentences = [part for part in map(str.strip, re.split(r"[.!?]+", text)) if part]
    return ("; ".join(sentences) if len(sentences) > 1 else text).lower()
