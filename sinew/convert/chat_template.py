"""Fill in the chat template (Jinja) of a checkpoint's processor once, during the conversion. The bundle stores the
result.

In the prompts of a policy only the instruction changes, so the template is filled in with a placeholder for it.
Templates are untrusted, so they run in the sandbox that transformers uses too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinew.convert.read.files import read_json, read_text
from sinew.core import ConvertError

MARK = "\u0001instruction\u0001"  # the placeholder for the instruction; no template contains this text
MAX_TEXT = 1 << 16


def find_chat_template(directory: Path) -> tuple[str, Path]:
    """Return the chat template in a processor's directory, and the file that contains the template.

    Raises:
        ConvertError: No file of the directory contains a chat template.
    """
    if (path := directory / "chat_template.jinja").is_file():
        return read_text(path), path
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = directory / name
        template = read_json(path).get("chat_template") if path.is_file() else None
        if isinstance(template, str):
            return template, path
    raise ConvertError(
        f"{directory}: no chat template; copy chat_template.jinja, chat_template.json or tokenizer_config.json of the"
        " original model into this folder"
    )


def render(template: str, content: Sequence[str], generate: bool, where: Path) -> str:
    """Return the text of one message of the user in the chat, with :data:`MARK` in place of the instruction.

    Args:
        template: A Jinja chat template.
        content: The parts of the message in their order: "image" for each image, "text" for the instruction.
        generate: True to append the text with which the model's answer begins.
        where: The template's file, for messages.

    Raises:
        ConvertError: The template cannot be rendered, or does not contain the instruction exactly once.
    """
    # jinja2 is a dependency of torch. Import it late, because other conversions do not need it.
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    parts: list[dict[str, Any]] = [
        {"type": "text", "text": MARK} if kind == "text" else {"type": "image", "image": "frame"}
        for kind in content
    ]

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        text = environment.from_string(template).render(
            messages=[{"role": "user", "content": parts}], add_generation_prompt=generate
        )
    except Exception as error:  # noqa: BLE001 - a template may fail in any way
        raise ConvertError(
            f"{where}: the chat template cannot be rendered ({type(error).__name__}: {error}); use the original file of"
            " the model"
        ) from None
    if text.count(MARK) != 1 or len(text) > MAX_TEXT:
        raise ConvertError(
            f"{where}: expected a chat template that repeats the instruction once in at most {MAX_TEXT} characters, got"
            f" {text.count(MARK)} times in {len(text)} characters"
        )
    return text
