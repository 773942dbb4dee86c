"""Describe a bundle for ``sinew inspect``, in sentences and as plain dicts and lists."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sinew_client.control.defaults import choose
from sinew_client.untrusted import UntrustedError, parse_json
from sinew_client.untrusted.texts import MAX_TOKENIZER_VALUES

from sinew.bundle.schema import KEY_HEADER

if TYPE_CHECKING:
    from sinew.bundle import Bundle
    from sinew.bundle.schema import AdapterBase, Quantization, Seen, VectorPart
    from sinew.steps.prompt.base import TextRecipe


def describe(bundle: Bundle) -> dict[str, Any]:
    """Return the manifest and the table of tensors as plain dicts and lists.

    The result contains only the type and the sizes of the tokenizer.
    """
    record = asdict(bundle.manifest)
    record["tokenizer"] = _tokenizer(bundle.manifest.tokenizer)
    record["file_bytes"] = bundle.path.stat().st_size
    record["tensors"] = [
        {"name": t.name, "shape": list(t.shape), "type": t.type.name, "bytes": t.nbytes, "offset": t.offset}
        for t in bundle.infos.values()
    ]
    return record


def words(bundle: Bundle) -> dict[str, str]:
    """Return facts about a bundle for people to read, as a dict: topic, such as "prompt" -> a sentence."""
    manifest, spec = bundle.manifest, bundle.manifest.spec
    recipe, source = manifest.processing, manifest.provenance
    image, prompt = recipe.image, recipe.prompt
    padding = f"to {prompt.max_tokens}" if prompt.padding == "max_length" else "none"
    tokenizer = _tokenizer(manifest.tokenizer)
    return {
        "file": f"{bundle.path} ({bundle.path.stat().st_size / 1e6:.1f} MB)",
        "policy": f"{manifest.name} ({manifest.architecture})",
        **({} if manifest.base is None else {"adapter of": _base(manifest.base)}),
        "cameras": ", ".join(f"{c.name} {c.height}x{c.width}" for c in spec.cameras)
        + (f" (+{manifest.processing.empty_cameras} empty)" if manifest.processing.empty_cameras else "")
        + (f"; {spec.history} observation steps" if spec.history > 1 else "")
        + (f", {spec.history_stride} control steps apart" if spec.history_stride > 1 else ""),
        "images": str(image),
        "state": _vector(spec.state, recipe.state, recipe.state_parts, recipe.state_steps),
        "action": _vector(spec.action, recipe.action, recipe.action_parts, recipe.action_steps),
        "chunk": f"{spec.chunk_size} actions, {spec.solver_steps} solver steps, noise {list(spec.noises())}"
        + (f", {spec.control_hz:g} actions/s" if spec.control_hz else ""),
        "hand-over": str(choose(policy=spec.to_dict())).removeprefix("hand-over "),
        "prompt": f"{json.dumps(prompt.template)}, at most {prompt.max_tokens} tokens, padding {padding}"
        + (f"; {prompt}" if str(prompt) else ""),
        "language head": _lm_head(bundle),
        "words": _text(prompt.text),
        "tokenizer": "the base's"
        if manifest.base is not None
        else f"{tokenizer['type']}, {tokenizer['vocabulary']} entries, {tokenizer['bytes'] / 1e3:.0f} kB",
        "quantised": _quantised(manifest.quantization),
        "seen": _seen(manifest.seen),
        "hashes": _hashes(bundle),
        "compat": manifest.processing.compat or "-",
        "converted": f"by {source.converter} from {source.format}",
        "sources": "\n".join(f"{s.name}, {s.bytes:,} bytes, sha256 {s.sha256[:12]}" for s in source.sources)
        or "-",
        "left out": ", ".join(source.dropped) or "nothing",
        "notes": "; ".join(source.notes) or "-",
    }


def _vector(what: Any, recipe: Any, parts: Any, steps: Any) -> str:
    named = f": {', '.join(what.labels)}" if what.labels else ""
    if parts:
        modes = ", ".join(f"{part.name} {_form(part)}" for part in parts)
        words = f"{what.dim} values{named}; {modes}"
    else:
        stats = f" ({', '.join(recipe.stats)})" if recipe.stats else ""
        words = f"{what.dim} values{named}, {recipe.mode}{stats}"
    return words + "".join(f"; {step}" for step in steps)


def _tokenizer(text: str) -> dict[str, Any]:
    try:
        record = parse_json(text, max_values=MAX_TOKENIZER_VALUES, finite=False)
    except UntrustedError:
        record = None
    model = record.get("model") if isinstance(record, dict) else None
    facts = model if isinstance(model, dict) else {}
    vocabulary = facts.get("vocab")
    return {
        "bytes": len(text.encode()),
        "type": str(facts.get("type")),
        "vocabulary": len(vocabulary) if isinstance(vocabulary, dict | list) else 0,
    }


def _lm_head(bundle: Bundle) -> str:
    """Return a sentence that states how the bundle stores its language head, and the head's size in the file."""
    kind = bundle.manifest.config.get("lm_head", "")
    if kind == "tied":
        return "shares the token table, so it adds no bytes"
    nbytes = sum(t.nbytes for t in bundle.infos.values() if t.name.startswith("lm_head."))
    if kind != "own":
        return f"{nbytes / 1e6:.1f} MB, for action tokens" if nbytes else "not stored"
    return f"{nbytes / 1e6:.1f} MB, for subtasks, answers and the text of streams"


def _text(text: TextRecipe | None) -> str:
    """Return a sentence about the prompts of the language head."""
    from sinew.steps.prompt.base import template

    if text is None:
        return "-"
    parts = [
        f"a {name} after {json.dumps(template(steps))}"
        for name, steps in (("subtask", text.subtask), ("question's answer", text.question))
        if steps
    ]
    if text.subtask:
        parts.insert(1, f"actions after {json.dumps(text.action)}")
    return f"{', '.join(parts)}; at most {text.most} tokens if a request does not state a number"


def _hashes(bundle: Bundle) -> str:
    hashes = bundle.hashes
    if hashes is None:
        return "none"
    header = bundle.file.metadata[KEY_HEADER]
    return f"{header} (SHA-256 of the header, checked), and of {len(hashes)} tensors"


def _seen(record: Seen | None) -> str:
    if record is None:
        return "no record of the training frames and states"
    parts = [*(f"camera {name}" for name in record.cameras), *(["state"] if record.state else [])]
    return f"{', '.join(parts)} in {record.frames} frames: {record.source}"


def _base(base: AdapterBase) -> str:
    return f"{base.name}, with weights {base.weights[:16]}...; to serve it, run `sinew serve BASE --adapter NAME=FILE`"


def _quantised(record: Quantization | None) -> str:
    if record is None:
        return "-"
    recipe = ", ".join(f"{component} {kind}" for component, kind in record.recipe.items())
    before = record.validated
    validation = ""
    if before is not None:
        validation = (
            f"; before, {before.engine} within {before.error:.1e} over {before.observations} observations"
        )
    return (
        f"{recipe}; chunk error {record.error:.1e} median, {record.error_max:.1e} largest over {record.observations}"
        f" observations from {record.source} ({record.engine}){_success(record)}{validation}"
    )


def _success(record: Quantization) -> str:
    won = record.success
    if won is None:
        return ""
    return f"; {won.wins} of {won.episodes} episodes of {won.env} won, {won.recorded_wins} on record"


def _form(part: VectorPart) -> str:
    """Return the form in which the model reads a part of a state or action vector: "rotation", "sin_cos" or a
    normalisation mode.
    """
    return "rotation" if part.rotation else "sin_cos" if part.sin_cos else part.normalization.mode
