"""One line of `sinew doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """``advice`` says what to do; empty where nothing needs doing."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def gib(count: int) -> str:
    """Return bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
