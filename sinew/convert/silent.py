"""A tokenizer and a prompt recipe for policies that do not read any instruction.

Every bundle must have a tokenizer and a prompt recipe. The tokenizer of this module converts any instruction to one
token, which the model ignores.
"""

from __future__ import annotations

from typing import Any

from sinew.bundle.schema import PromptRecipe
from sinew.steps.prompt.text import Text

WORD = "go"
TOKENIZER = (
    '{"version": "1.0", "added_tokens": [],'
    ' "model": {"type": "WordLevel", "vocab": {"go": 0}, "unk_token": "go"}}'
)
PROMPT = PromptRecipe(max_tokens=1, vocab_size=1, pad_token_id=0, steps=(Text(WORD),))
# Fields of sinew.core.PolicySpec for a policy that does not read any instruction.
SPEC: dict[str, Any] = {
    "max_prompt_tokens": 1,
    "default_prompt": WORD,
}
