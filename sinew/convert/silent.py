"""The tokenizer and the prompt recipe of a policy that reads no instruction.

Every bundle needs a tokenizer and a prompt recipe. These ones turn any instruction into one token, and the model
ignores it.
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
# Fields of sinew.core.PolicySpec for such a policy.
SPEC: dict[str, Any] = {
    "max_prompt_tokens": 1,
    "default_prompt": WORD,
}
