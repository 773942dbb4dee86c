"""What the commands of ``sinew perf`` share."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter, validators

from sinew.core import SinewError

Positive = Annotated[int | None, Parameter(validator=validators.Number(gte=1))]
Rate = Annotated[float, Parameter(validator=validators.Number(gt=0))]


def dtypes(text: str | None) -> Any:
    """ "vision=float8,language=float8" -> a mapping; anything else is one format for all stages."""
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(separator and value for _, separator, value in pairs):
        raise SinewError(f"--dtype {text}: expected STAGE=FORMAT, comma-separated")
    return {stage: value for stage, _, value in pairs}
