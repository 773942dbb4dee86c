"""``sinew skip``: leaves layers out of a policy, and measures by how much its actions change."""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape

from sinew.cli import terminal
from sinew.cli.options import Count
from sinew.core import SinewError, progress


def skip(
    bundle: Path,
    /,
    *,
    layers: str = "",
    out: Path | None = None,
    observations: Count = 8,
    records: Path | None = None,
) -> int:
    """Leave layers out of a policy, so that every engine computes it faster, and measure the effect on the actions.

    Without --layers, Sinew tries each layer and prints the change of the actions, the smallest first. A policy that was
    not trained with fewer layers can lose its success. Play it before you use it: `sinew eval POLICY --compare OUT`.

    Args:
        bundle: Policy to shorten, as for `sinew infer`.
        layers: Layers to leave out, counted from 0, as STACK=INDEX+INDEX,..., for example vision=1. Stacks
            that read each other must lose the same layers: language=2+3,expert=2+3.
        out: Bundle to write, with --layers.
        observations: Number of observations over which the change is measured.
        records: Folder of `sinew serve --record` that provides the observations. Default: episodes of a
            built-in task that fits the policy, otherwise random frames.
    """
    from sinew.convert.skip import candidates, parse_layers, stacks_of, text_of, without_layers
    from sinew.lowbit.quantization import Samples
    from sinew.policy import Policy, open_bundle

    if bool(layers) != (out is not None):
        raise SinewError(
            "--layers and --out: expected both or neither; without them, each layer is tried and nothing is written"
        )
    if out is not None and out.exists():
        raise SinewError(f"--out {out}: the file already exists; choose another name")
    opened = open_bundle(bundle)
    tried = [parse_layers(layers)] if layers else candidates(opened)
    if not tried:
        raise SinewError(
            f"{bundle}: has no stack of layers from which one can be left out; use the bundle as it is"
        )
    reference = Policy(opened, "cpu", "fp32", "eager")
    origin, stream = Samples(observations, 0, records).to(reference)
    inputs = list(islice(stream, observations))
    rows = []
    with (
        progress.task(f"leaving out {len(tried)} times", len(tried)) as advance,
        tempfile.TemporaryDirectory() as folder,
    ):
        # Without --out, each short bundle replaces the one before, so one copy of the weights needs space at a time.
        place = out if out is not None else Path(folder) / "short.gguf"
        for skipped in tried:
            without_layers(opened, skipped, place)
            rows.append(_measured(place, reference, inputs, text_of(skipped)))
            advance("")
    rows.sort(key=lambda row: row["change"])
    stacks = ", ".join(f"{name} {count} layers" for name, count in stacks_of(opened).items())
    columns = ("left out", ">change of the actions, median", ">largest", ">weights, MB")
    table = terminal.table(escape(f"{bundle}: {stacks}"), *columns)
    for row in rows:
        megabytes = f"{row['nbytes'] / 1e6:.1f}"
        table.add_row(escape(row["layers"]), f"{row['change']:.3f}", f"{row['change_max']:.3f}", megabytes)
    console = terminal.console()
    console.print(table)
    console.print(
        f"relative L2 of the chunk over {len(inputs)} observations from {origin}; measure the"
        " success with `sinew eval POLICY --compare OUT`",
        markup=False,
    )
    terminal.emit({"schema": "sinew.skip/1", "origin": origin, "rows": rows})
    return 0


def _measured(place: Path, reference: Any, inputs: list[Any], text: str) -> dict[str, Any]:
    """Return how much the actions of a shorter policy differ from the actions of the whole policy, and the size of
    the shorter policy's weights.
    """
    from sinew.bundle import Bundle
    from sinew.lowbit.quantization import measure
    from sinew.policy import Policy

    bundle = Bundle(place)
    short = Policy(bundle, "cpu", "fp32", "eager")
    try:
        errors = measure(reference, short.engine, inputs)
    finally:
        short.close()
    return {
        "layers": text,
        "change": float(np.median(errors)),
        "change_max": float(np.max(errors)),
        "nbytes": bundle.weights_nbytes,
    }
