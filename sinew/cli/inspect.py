"""``sinew inspect``: everything a bundle says about itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from sinew_client.control import choose

from sinew.cli import terminal

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.bundle.adapter import AdapterBase
    from sinew.bundle.prompt_recipe import TextRecipe
    from sinew.bundle.schema import Quantization, VectorPart
    from sinew.bundle.seen import Seen


def inspect(
    bundle: Path,
    /,
    *,
    tensors: Annotated[bool, Parameter(negative="")] = False,
    plan: Annotated[bool, Parameter(negative="")] = False,
    flops: Annotated[bool, Parameter(negative="")] = False,
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
        from sinew.engine.plan.report import plan_record

        record = plan_record(opened, dtype)
        show_plan(record)
        terminal.emit(record)
    else:
        show(opened, tensors)
        record = describe(opened)
        if flops:
            from sinew.cli.inspect_tables import show_cost
            from sinew.perf.cost import cost_record

            record["cost"] = cost_record(opened)
            show_cost(record["cost"])
        terminal.emit(record)
    return 0


def describe(bundle: Bundle) -> dict[str, Any]:
    """The whole manifest (the tokenizer by size only) and the tensor table, as plain containers."""
    record = asdict(bundle.manifest)
    record["tokenizer"] = tokenizer_facts(bundle.manifest.tokenizer)
    record["file_bytes"] = bundle.path.stat().st_size
    record["tensors"] = [
        {"name": t.name, "shape": list(t.shape), "type": t.type.name, "bytes": t.nbytes, "offset": t.offset}
        for t in bundle.infos.values()
    ]
    return record


def tokenizer_facts(text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    model = record.get("model") if isinstance(record, dict) else None
    facts = model if isinstance(model, dict) else {}
    vocabulary = facts.get("vocab")
    return {
        "bytes": len(text.encode()),
        "type": str(facts.get("type")),
        "vocabulary": len(vocabulary) if isinstance(vocabulary, dict | list) else 0,
    }


def show(bundle: Bundle, all_tensors: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from sinew.cli.inspect_tables import config_table, tensor_table

    console, manifest, spec = terminal.console(), bundle.manifest, bundle.manifest.spec
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")

    def vector(what: Any, recipe: Any, parts: Any, steps: Any) -> str:
        named = f": {', '.join(what.labels)}" if what.labels else ""
        if parts:
            modes = ", ".join(f"{part.name} {_form(part)}" for part in parts)
            words = f"{what.dim} values{named}; {modes}"
        else:
            stats = f" ({', '.join(recipe.stats)})" if recipe.stats else ""
            words = f"{what.dim} values{named}, {recipe.mode}{stats}"
        return words + "".join(f"; {step}" for step in steps)

    recipe, source = manifest.processing, manifest.provenance
    image, prompt = recipe.image, recipe.prompt
    padding = f"to {prompt.max_tokens}" if prompt.padding == "max_length" else "none"
    tokenizer = tokenizer_facts(manifest.tokenizer)
    rows = {
        "file": f"{bundle.path} ({bundle.path.stat().st_size / 1e6:.1f} MB)",
        "policy": f"{manifest.name} ({manifest.architecture})",
        **({} if manifest.base is None else {"adapter of": _base(manifest.base)}),
        "cameras": ", ".join(f"{c.name} {c.height}x{c.width}" for c in spec.cameras)
        + (f" (+{manifest.processing.empty_cameras} empty)" if manifest.processing.empty_cameras else "")
        + (f"; {spec.history} moments" if spec.history > 1 else "")
        + (f", {spec.history_stride} control steps apart" if spec.history_stride > 1 else ""),
        "images": str(image),
        "state": vector(spec.state, recipe.state, recipe.state_parts, recipe.state_steps),
        "action": vector(spec.action, recipe.action, recipe.action_parts, recipe.action_steps),
        "chunk": f"{spec.chunk_size} actions, {spec.solver_steps} solver steps, noise {list(spec.noises())}"
        + (f", {spec.control_hz:g} actions/s" if spec.control_hz else ""),
        "hand-over": str(choose(policy=spec.to_dict())).removeprefix("hand-over "),
        "prompt": f"{json.dumps(prompt.template)}, at most {prompt.max_tokens} tokens, padding {padding}"
        + (f"; {prompt}" if str(prompt) else ""),
        "language head": _lm_head(bundle),
        "words": _words(prompt.text),
        "tokenizer": "the base's"
        if manifest.base is not None
        else f"{tokenizer['type']}, {tokenizer['vocabulary']} entries, {tokenizer['bytes'] / 1e3:.0f} kB",
        "quantised": _quantised(manifest.quantization),
        "seen": _seen(manifest.seen),
        "hashes": _hashes(bundle.hashes),
        "compat": manifest.processing.compat or "-",
        "converted": f"by {source.converter} from {source.format}",
        **{f"  {s.name}": f"{s.bytes} bytes, sha256 {s.sha256}" for s in source.sources},
        "left out": ", ".join(source.dropped) or "nothing",
        "notes": "; ".join(source.notes) or "-",
    }
    for key, value in rows.items():
        facts.add_row(escape(key), escape(value))
    console.print(facts)
    console.print(config_table(manifest.config))
    console.print(tensor_table(bundle, all_tensors))


def _lm_head(bundle: Bundle) -> str:
    """Return whether the bundle can say a text, and what that takes of the file."""
    kept = bundle.manifest.config.get("lm_head", "")
    if kept == "tied":
        return "the token table once more, no bytes of its own"
    nbytes = sum(t.nbytes for t in bundle.infos.values() if t.name.startswith("lm_head."))
    if kept != "own":
        return f"{nbytes / 1e6:.1f} MB, which says actions" if nbytes else "not kept"
    return f"{nbytes / 1e6:.1f} MB, for subtasks, answers and the text of streams"


def _words(text: TextRecipe | None) -> str:
    """Return what a language head is asked with."""
    from sinew.bundle.prompt_recipe import template

    if text is None:
        return "-"
    asked = [
        f"a {name} behind {json.dumps(template(steps))}"
        for name, steps in (("subtask", text.subtask), ("question's answer", text.question))
        if steps
    ]
    if text.subtask:
        asked.insert(1, f"actions behind {json.dumps(text.action)}")
    return f"{', '.join(asked)}; at most {text.most} tokens where a request says no number"


def _hashes(found: dict[str, str] | None) -> str:
    return "none" if found is None else f"SHA-256 of the header (checked) and of {len(found)} tensors"


def _seen(found: Seen | None) -> str:
    if found is None:
        return "nothing of how its cameras and joints look"
    parts = [*(f"camera {name}" for name in found.cameras), *(["state"] if found.state else [])]
    return f"{', '.join(parts)} in {found.frames} frames: {found.source}"


def _base(base: AdapterBase) -> str:
    return f"{base.name}, whose weights are {base.weights[:16]}...; `sinew serve BASE --adapter NAME=FILE` serves it"


def _quantised(found: Quantization | None) -> str:
    if found is None:
        return "-"
    recipe = ", ".join(f"{component} {kind}" for component, kind in found.recipe.items())
    return (
        f"{recipe}; chunk error {found.error:.1e} median, {found.error_max:.1e}"
        f" largest over {found.observations} observations from {found.source} ({found.engine}){_success(found)}"
    )


def _success(found: Quantization) -> str:
    won = found.success
    if won is None:
        return ""
    return f"; {won.wins} of {won.episodes} episodes of {won.env} won, {won.recorded_wins} on record"


def _form(part: VectorPart) -> str:
    """Return how the model has a part of a vector."""
    return "rotation" if part.rotation else "sin_cos" if part.sin_cos else part.normalization.mode
