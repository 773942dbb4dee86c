"""Read the command lines and the programs that a page of the documentation tells the reader to type."""

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
        *sorted((ROOT / "docs").glob("*.md")),  # research/log describes the past, so it is left out
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
DATA = frozenset(
    ("json", "toml", "yaml", "ini", "text", "js")
)  # languages of blocks that contain no commands
SHELL = frozenset(("", "bash", "sh", "console"))
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The page.
        first: Number of its first line on the page.
        language: Language of the block.
        text: Its text.
    """

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
    """Return the command lines of a page, without comments and prompts. Continued lines are joined.

    A block without a language is a shell block if its first line begins with one of ``COMMANDS``.

    Raises:
        AssertionError: A block is neither a shell block nor a program nor data.
    """
    return [line for block in blocks(page) for line in typed(block)]


def typed(block: Block) -> list[str]:
    """Return the command lines of one block."""
    if block.language not in SHELL:
        assert block.language in DATA | {"python"}, (
            f"{block}: unknown language {block.language}; add it to pages.py"
        )
        return []
    joined = [
        without_comment(line) for line in re.sub(r" *\\\n *", " ", block.text).splitlines() if line.strip()
    ]
    if block.language == "console":  # the outputs are between the command lines
        return [line.removeprefix("$ ") for line in joined if line.startswith("$ ")]
    found = [line for line in joined if line]
    if not found or found[0].split()[0] not in COMMANDS:
        return []
    for line in found:
        assert line.split()[0] in COMMANDS, f"{block}: {line}: unknown command; add it to COMMANDS"
    return found


def without_comment(line: str) -> str:
    """Return a line without its comment, which follows two blanks or begins the line."""
    return re.sub(r"(^|\s)#( .*|$)", "", line).strip()


def programs(page: str, language: str = "python") -> list[str]:
    """Return the Python programs of a page, or its blocks in another language."""
    return [block.text for block in blocks(page) if block.language == language]
