"""References to pages of the documentation, for messages and help texts.

An installed package contains only a few of the pages, so a message names the title of a page and not its file.
"""

from __future__ import annotations

SITE = ""  # address of the published pages with a slash at its end; "" until the documentation has an address
TITLES = {  # file in docs/ without its ending -> heading of the page
    "adding-a-model": "Add a model",
    "commands": "Commands",
    "eval": "Evaluate a policy",
    "families": "Supported policies",
    "install": "Install",
    "late-answers": "Late answers",
    "plan": "Model rewrites",
    "recordings": "Record and replay requests",
    "tutorial-openpi": "From openpi to a robot",
    "wiring": "Check the wiring",
}


def page(name: str) -> str:
    """Return a reference to a page: its address, or its title while the documentation has no address.

    Args:
        name: Key of TITLES.
    """
    title = f'the page "{TITLES[name]}" of the documentation'
    return f"{title} ({SITE}{name}.html)" if SITE else title
