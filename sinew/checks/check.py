"""The record of one line of `sinew doctor`: a check and its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One check of `sinew doctor` with its result, which is printed as one line.

    Attributes:
        name: Subject of the check, such as "torch".
        status: "ok", "warn" or "fail".
        detail: The result as a sentence.
        advice: The next step for the user; "" if no step is needed.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def gib(count: int) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
