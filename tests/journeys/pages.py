"""What the documents tell a reader to type: the command lines and the programs of every page."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),  # research/log tells of the past
        *sorted((ROOT / "packages").glob("*/README.md")),
        ROOT / "eval" / "README.md",
        ROOT / "perf" / "README.md",
    ]
}
TOOLS = (
    "cp",
    "curl",
    "docker",
    "export",
    "make",
    "pip",
    "python",
    "python3",
    "python3.12",
    "source",
    "sudo",
    "tar",
    "uv",
)
LEROBOT = ("lerobot-eval", "lerobot-record", "lerobot-rollout")
LANGUAGES = ("cargo", "g++", "./ask", "node")
COMMANDS = frozenset((*TOOLS, *LEROBOT, *LANGUAGES, "rerun", "ros2", "sinew", "sinew-ros"))
DATA = frozenset(("json", "toml", "yaml", "ini", "text", "js"))  # languages of blocks that nobody types
SHELL = frozenset(("", "bash", "sh", "console"))
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: the page that it stands on, the number of its first line there, its language and its text."""

    page: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = PAGES[page].read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found["language"], textwrap.dedent(found["body"]))
        for found in BLOCK.finditer(text)
    ]


def lines(page: str) -> list[str]:
    """Return the command lines of a page, without comments and prompts, with continued lines joined.

    A block without a language is a shell's where its first line begins with one of ``COMMANDS``. Raises
    ``AssertionError`` for a block that is neither a shell's, a program nor data.
    """
    return [line for block in blocks(page) for line in typed(block)]


def typed(block: Block) -> list[str]:
    """Return the command lines of one block."""
    if block.language not in SHELL:
        assert block.language in DATA | {"python"}, f"{block}: nobody knows what {block.language} is"
        return []
    joined = [
        without_comment(line) for line in re.sub(r" *\\\n *", " ", block.text).splitlines() if line.strip()
    ]
    if block.language == "console":  # answers stand between the lines
        return [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    found = [line for line in joined if line]
    if not found or found[0].split()[0] not in COMMANDS:
        return []
    for line in found:
        assert line.split()[0] in COMMANDS, f"{block}: {line}: no command that this test knows"
    return found


def without_comment(line: str) -> str:
    """Return a line without its comment, which two blanks or the line's start set apart."""
    return re.sub(r"(^|\s)#( .*|$)", "", line).strip()


def programs(page: str, language: str = "python") -> list[str]:
    """Return the Python programs of a page, or its blocks of another language."""
    return [block.text for block in blocks(page) if block.language == language]
