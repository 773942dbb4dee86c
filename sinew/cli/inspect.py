"""``sinew inspect``: print the content of a bundle's header."""

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
    """Print the content of a bundle: cameras, state, actions, settings and sizes.

    It reads the header only, so it is fast for any size. --json includes every tensor.

    Args:
        bundle: Policy to show: a bundle, a folder of `sinew export`, a checkpoint or training run, or a hub
            name.
        tensors: List every tensor instead of the totals for each component.
        plan: List the rewrites that engine plan applies to this model, and what they save.
        flops: Add parameters, bytes and FLOPs of one observation by stage. This needs PyTorch.
        dtype: Compute type for --plan. Default: the CPU's default.
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
    """Print the facts about a bundle, its configuration and its tensors.

    Args:
        bundle: The bundle.
        all_tensors: List every tensor instead of the totals for each component.
    """
    from sinew.cli.inspect_tables import config_table, tensor_table

    console = terminal.console()
    console.print(terminal.facts(words(bundle).items()))
    console.print(config_table(bundle.manifest.config))
    console.print(tensor_table(bundle, all_tensors))
