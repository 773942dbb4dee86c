"""``sinew completion``: what completes verbs, flags and choices in a shell."""

from __future__ import annotations

import sys
from typing import Literal

# A file that zsh loads for a completion is its function; one that is read at the start has to tell of it.
ZSH = """
if [ "$funcstack[1]" = "_sinew" ]; then
  _cyclopts_sinew "$@"
else
  compdef _cyclopts_sinew sinew
fi
"""


def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
    """Print a script that completes verbs, flags and their choices.

    Args:
        shell: whose script to print. It takes a second or two to make, so keep it in a file (docs/commands.md).
    """
    from sinew.cli import build_app

    sys.stdout.write(build_app().generate_completion(shell=shell) + (ZSH if shell == "zsh" else ""))
    return 0
