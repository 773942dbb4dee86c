"""What the commands of ``sinew perf`` share."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter
from sinew.core import SinewError

from sinew_perf.request import TracedRequest

Asked = Annotated[TracedRequest, Parameter(name="*", group="Request")]


def dtypes(text: str | None) -> Any:
    """ "vision=fp8,language=fp8" -> a mapping; anything else is one format for all."""
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(separator and value for _, separator, value in pairs):
        raise SinewError(f"--dtype {text}: expected COMPONENT=FORMAT, comma-separated")
    return {component: value for component, _, value in pairs}
