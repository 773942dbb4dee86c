"""``sinew doctor``: is this installation able to run a policy, and how well?

Every check says why it passed or what to do. Exit code 1 if one failed; warnings do not fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sinew.cli.options import Engine, Providers

MARKS = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[bold red]fail[/]"}


def doctor(
    bundle: Path | None = None,
    /,
    *,
    engine: Engine | None = None,
    provider: Providers = (),
    device: str = "cpu",
    json_output: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Check the installation and this machine.

    Args:
        bundle: also load this bundle, or folder that `sinew export` wrote, and run it once.
        engine: eager, plan, onnx or cuda; onnx for an exported folder, else eager.
        provider: of ONNX Runtime, in order of preference: cpu, cuda, tensorrt, openvino, coreml, qnn.
        device: of the bundle: cpu, or cuda:N.
        json_output: print one JSON object instead of a table.
    """
    from sinew import checks

    graphs_alone = bundle is not None and bundle.is_dir()  # which the onnx engine runs
    results = checks.installation("onnx" if engine is None and graphs_alone else engine)
    if bundle is not None:
        results += checks.bundle(bundle, engine, provider, device)
    failed = [check for check in results if check.status == "fail"]
    if json_output:
        print(json.dumps({"ok": not failed, "checks": [check.to_dict() for check in results]}))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column("status", no_wrap=True)
        table.add_column("check", no_wrap=True, style="bold")
        table.add_column("detail", overflow="fold")
        for check in results:
            advice = f"\n→ {escape(check.advice)}" if check.advice else ""
            table.add_row(MARKS[check.status], check.name, escape(check.detail) + advice)
        console = Console()
        console.print(table)
        warned = sum(check.status == "warn" for check in results)
        console.print(
            f"{len(results)} checks, {len(failed)} failed, {warned} with a warning", highlight=False
        )
    return 1 if failed else 0
