"""The instructions of the blocks task.

The phrasing is part of the test: a policy that relies on the order of words instead of their meaning fails with the
phrasing that training does not use.
"""

from __future__ import annotations

COLORS = ("red", "green", "blue")
SIDES = ("left", "right")

PHRASINGS = (
    "put the {color} block into the {side} bin",
    "place the {color} block in the {side} bin",
    "pick up the {color} block and drop it into the {side} bin",
    "move the {color} cube to the {side} bin",
    "the {color} block goes into the bin on the {side}",
    "grab the {color} cube and put it in the {side} bin",
    "into the {side} bin goes the {color} cube",
)
HELD_OUT = "pick up the {color} cube and place it in the bin on the {side}"
"""Never used in training; its words are, in other places."""


def instruction(color: str, side: str, phrasing: str = PHRASINGS[0]) -> str:
    return phrasing.format(color=color, side=side)


def vocabulary() -> tuple[str, ...]:
    """Return every word that an instruction can contain, in alphabetical order."""
    words = {w for p in (*PHRASINGS, HELD_OUT) for w in p.split() if "{" not in w}
    return tuple(sorted(words | set(COLORS) | set(SIDES)))
