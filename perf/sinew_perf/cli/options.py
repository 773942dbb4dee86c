"""Options and outputs that the commands of ``sinew perf`` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators
from sinew.cli import terminal
from sinew.core import SinewError

from sinew_perf.request import TracedRequest

if TYPE_CHECKING:
    from sinew_perf.shares import UsedShare

Asked = Annotated[TracedRequest, Parameter(name="*", group="Request")]
EfficiencyIfAny = Annotated[float | None, Parameter(validator=validators.Number(gt=0, lte=1))]


def dtypes(text: str | None) -> Any:
    """Convert "vision=fp8,language=fp8" to a mapping. Any other text is one format for all components and stays
    unchanged.
    """
    if text is None or "=" not in text:
        return text
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(separator and value for _, separator, value in pairs):
        raise SinewError(f"--dtype {text}: expected COMPONENT=FORMAT, comma-separated")
    return {component: value for component, _, value in pairs}


def print_sources(shares: Iterable[UsedShare]) -> None:
    """Print the measurements behind shares of the roofline, and the rule that chose them."""
    from sinew_perf.shares import RULE

    console = terminal.console()
    chosen = list(shares)
    for row in dict.fromkeys(row for share in chosen for row in share.rows):
        reached = f"{row}: {row.ms:g} ms, {row.share:.1%} of the roofline"
        console.print(f"{reached}; {row.source}", soft_wrap=True, markup=False)
    if chosen:
        console.print(f"rule: {RULE}", soft_wrap=True, markup=False)
