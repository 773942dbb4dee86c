"""``sinew --completion``: print a script that completes commands, flags and choices in a shell."""

from __future__ import annotations

import re
import sys
from typing import Literal

from sinew.cli.verbs import commands

# Flags that every command accepts, and their help. The program removes them before it parses the command's own flags.
EVERYWHERE = {
    "json": "the result as JSON",
    "debug": "the traceback of an error",
    "config": "a file with flags",
}
HELP = "Display this message and exit."
# The script is used in two ways. If zsh loads it as an autoload function, the script is the function. If the user's
# .zshrc reads it, the script must register the function.
ZSH = """
if [ "$funcstack[1]" = "_sinew" ]; then
  _cyclopts_sinew "$@"
else
  compdef _cyclopts_sinew sinew
fi
"""
# A value without choices may be a file name. In bash, an option of `complete` adds file names. In zsh, an action adds
# them. Without this action, zsh would also not complete flags before an argument.
BASH = ("complete -F", "complete -o default -F")
TEXT = r"(?:\\.|'\\''|[^':\\])*"
BARE = re.compile(rf"^( +'(?:\d+|\*|\*?--[\w-]+\[{TEXT}\]):{TEXT})('(?: \\)?)$", re.MULTILINE)
# After `sinew` and after a group, the next word is a command and not a file.
FISH = 'complete -c sinew -f -n "contains -- (commandline -poc)[-1] sinew {groups}"\n'


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print a script that completes commands, flags and their choices.

    Args:
        shell: Shell to print the script for. Printing takes a second or two, so save the script in a file.
    """
    from sinew.cli import build_app

    app = build_app()
    app.help_flags = ("--help", "-h", *(f"--{flag}" for flag in EVERYWHERE))
    text = app.generate_completion(shell=shell)
    for flag, words in EVERYWHERE.items():
        text = re.sub(rf"(--{flag}\[|-l {flag} -d '){re.escape(HELP)}", rf"\g<1>{words}", text)
    if shell == "bash":
        text = text.replace(*BASH)
    if shell == "zsh":
        text = BARE.sub(r"\1:_files\2", text) + ZSH
    if shell == "fish":
        text += FISH.format(groups=" ".join({word: None for words, _ in commands() for word in words[:-1]}))
    sys.stdout.write(text)
    return 0
