"""The tables of ``sinew inspect``: configuration, tensors, savings of the plan's rewrites, and costs of the stages."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from sinew_client.documentation import page

from sinew.cli import terminal

if TYPE_CHECKING:
    from sinew.bundle import Bundle

LONG = 200  # a longer text in the configuration is replaced by its size


def config_table(config: dict[str, Any]) -> Table:
    table = terminal.plain("config", "")
    for key, value in config.items():
        each = value.items() if isinstance(value, dict) else [("", value)]
        table.add_row(escape(key), escape(", ".join(f"{k} {shown(v)}".lstrip() for k, v in each)))
    return table


def shown(value: Any) -> str:
    """Return a value of a configuration as text. For a long text, such as a tokenizer, return its size."""
    text = str(value)
    return text if not isinstance(value, str) or len(text) <= LONG else f"a text of {len(text)} characters"


def tensor_table(bundle: Bundle, all_tensors: bool) -> Table:
    if all_tensors:
        infos = bundle.infos.values()
        rows = ((escape(t.name), "x".join(map(str, t.shape)), t.type.name, str(t.nbytes)) for t in infos)
        return terminal.plain("tensor", "shape", "type", "bytes", rows=rows)
    table = terminal.plain("module", "tensors", "parameters", "MB", "stored as", "weight error")
    quantization = bundle.manifest.quantization
    errors = {} if quantization is None else quantization.weight_error
    groups: dict[str, list] = defaultdict(list)
    for t in bundle.infos.values():
        groups[t.name.split(".")[0]].append(t)
    groups["total"] = list(bundle.infos.values())
    for component, members in groups.items():
        parameters = sum(bundle.parameters(t) for t in members)
        types = "+".join(sorted({t.type.name for t in members}))
        megabytes = f"{sum(t.nbytes for t in members) / 1e6:.1f}"
        shown = f"{errors[component]:.1e}" if component in errors else ""
        table.add_row(escape(component), str(len(members)), f"{parameters:,}", megabytes, types, shown)
    return table


def show_plan(record: dict[str, Any]) -> None:
    console, shapes = terminal.console(), record["shapes"]
    table = terminal.plain("rewrite", "status", ">GFLOP", ">MB moved", ">MB weights")
    table.add_column("why, and where", overflow="fold")
    for row in record["rewrites"]:
        numbers = [row.get(f"{key}_saved") for key in ("flops", "bytes", "weights")]
        cells = [
            "" if n is None else f"{-n / unit:+.{digits}f}"
            for n, unit, digits in zip(numbers, (1e9, 1e6, 1e6), (3, 1, 1), strict=True)
        ]
        where = ", ".join(row["where"])
        table.add_row(row["name"], row["status"], *cells, row["reason"] + (f" [{where}]" if where else ""))
    table.add_section()
    for name in ("eager", "planned"):
        total = record[name]
        cells = [
            f"{total['flops'] / 1e9:.3f}",
            f"{total['bytes'] / 1e6:.1f}",
            f"{total['weights'] / 1e6:.1f}",
        ]
        table.add_row(name, "", *cells, f"{total['mapped'] / 1e6:.1f} MB of the weights stay in the file")
    console.print(
        f"{record['architecture']} in {record['dtype']} ({record['dtype_reason']}), per observation:"
        f" {shapes['views']} views of {shapes['height']}x{shapes['width']}, {shapes['tokens']} prompt tokens,"
        f" {shapes['steps']} solver steps"
    )
    console.print(table)
    left_out = ", ".join(record["left_out_on_cpu"])
    console.print(
        f"Under PyTorch on a CPU, the engine does not apply {left_out or 'none of these'}; see {page('plan')}."
    )


def show_cost(record: dict[str, Any]) -> None:
    """Print the parameters, bytes and FLOPs of each stage."""
    console = terminal.console(markup=False)
    table = terminal.plain("stage", "parameters", "MB", "runs", "GFLOP a chunk")
    for name, stage in record["stages"].items():
        megabytes, flops = f"{stage['bytes'] / 1e6:.1f}", f"{stage['flops'] / 1e9:.3f}"
        table.add_row(name, f"{stage['parameters']:,}", megabytes, str(stage["runs"]), flops)
    table.add_row("total", "", "", "", f"{record['flops'] / 1e9:.3f}")
    console.print(table)
    console.print(
        f"for {record['views']} views, {record['prompt_tokens']} prompt tokens and {record['solver_steps']} solver"
        " steps on the eager engine, as `sinew perf` counts them"
    )
