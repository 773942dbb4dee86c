"""``sinew inspect``: everything a bundle says about itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sinew.bundle.facts import describe, words
from sinew.cli import terminal
from sinew.cli.options import Flag
from sinew.core import providers

if TYPE_CHECKING:
    from sinew.bundle import Bundle


def inspect(
    bundle: Path,
    /,
    *,
    tensors: Flag = False,
    plan: Flag = False,
    flops: Flag = False,
    dtype: str | None = None,
) -> int:
    """Print what a bundle holds. Reads the header alone, so it is fast for any size. --json has every tensor too.

    Args:
        bundle: a bundle, a folder of `sinew export`, a checkpoint or training run, or a name of the hub.
        tensors: list every tensor, not only the totals per component.
        plan: list instead what the rewrites of the plan do to this model, and what they save.
        flops: add parameters, bytes and FLOPs of an observation by stage, as `sinew perf` traces them; needs PyTorch.
        dtype: compute type that the plan is for; the CPU's default if absent.
    """
    from sinew.policy import open_bundle

    opened = open_bundle(bundle)
    if plan:
        from sinew.cli.inspect_tables import show_plan

        record = providers.required("sinew.estimates", "sinew inspect --plan").plan(opened, dtype)
        show_plan(record)
        terminal.emit(record)
    else:
        show(opened, tensors)
        record = describe(opened)
        if flops:
            from sinew.cli.inspect_tables import show_cost

            record["cost"] = providers.required("sinew.estimates", "sinew inspect --flops").cost(opened)
            show_cost(record["cost"])
        terminal.emit(record)
    return 0


def show(bundle: Bundle, all_tensors: bool) -> None:
    """Print what a bundle holds, its configuration and its tensors."""
    from sinew.cli.inspect_tables import config_table, tensor_table

    console = terminal.console()
    console.print(terminal.facts(words(bundle).items()))
    console.print(config_table(bundle.manifest.config))
    console.print(tensor_table(bundle, all_tensors))
