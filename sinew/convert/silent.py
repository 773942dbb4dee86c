"""The tokenizer and the prompt recipe of a policy without language.

Every bundle has both. Here, any instruction becomes one token, which the model's ``read`` ignores.
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
SPEC: dict[str, Any] = {
    "max_prompt_tokens": 1,
    "default_prompt": WORD,
}  # fields of :class:`sinew.core.PolicySpec`
