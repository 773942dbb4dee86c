"""Write the card of a policy on the hub: its inputs and outputs, its origin, and its measurements.

Every entry is from the bundle, or from records of `sinew validate` and `sinew eval` that were made with the same file.
The records of `sinew validate` contain the file's fingerprint, the records of `sinew eval` its SHA-256.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sinew_client.untrusted import named, read_json, shown

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest
from sinew.core import SinewError, VectorSpec
from sinew.core.statistics import wilson
from sinew.engine import proofs
from sinew.engine.fingerprint import fingerprint

MAX_BYTES = 1 << 28  # largest record in bytes, including a report's videos
MAX_VALUES = 1 << 23  # a record may have at most this many values
VALIDATION, EVALUATION = "sinew.validate/1", "sinew.eval/1"


def records_of(bundle: Path, files: Sequence[Path], digest: str) -> list[dict[str, Any]]:
    """Return the records of this machine's validations of a bundle, and the reports in ``files``.

    Args:
        bundle: The bundle.
        files: Reports of `sinew validate` or `sinew eval`.
        digest: The bundle's SHA-256.

    Raises:
        SinewError: A file is not such a report, or is a report of another bundle.
    """
    records = proofs.records(bundle)
    for path in files:
        try:
            record = read_json(path, MAX_BYTES, max_values=MAX_VALUES)
            schema = record["schema"]
            if schema == VALIDATION:
                expected, got = fingerprint(bundle), record["fingerprint"]
            elif schema == EVALUATION:
                expected, got = digest, record["variants"][0]["policy"]["id"]
            else:
                raise SinewError(f"{path}: expected schema {VALIDATION} or {EVALUATION}, got {shown(schema)}")
            # Compute the lines of the card now, because a missing entry raises an error here.
            list(_measured([record]))
        except OSError as error:
            raise SinewError(f"{path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
            got = named(f"{type(error).__name__}: {error}", 300)
            raise SinewError(
                f"{path}: expected report.json of `sinew validate` or `sinew eval`, got {got}"
            ) from None
        if got != expected:
            raise SinewError(
                f"{path}: expected a report of {bundle}, got one of another bundle ({str(got)[:16]}); run"
                " `sinew validate` or `sinew eval` with this bundle"
            )
        if record not in records:
            records.append(record)
    return records


def card(
    bundle: Bundle,
    digest: str,
    records: Sequence[Mapping[str, Any]],
    repository: str,
    facts: Mapping[str, str],
) -> str:
    """Return the card of a bundle as markdown with the hub's header.

    Args:
        bundle: The bundle.
        digest: The bundle's SHA-256.
        records: Records of validations and evaluations of the bundle.
        repository: The bundle's repository on the hub.
        facts: Further entries of the header (license, base_model).
    """
    manifest = bundle.manifest
    parts = [
        *_header(manifest, facts),
        f"# {_cell(manifest.name)}",
        "",
        f"A {_cell(manifest.architecture)} policy for Sinew (`sinew-vla`), in one file with all that it needs.",
        "",
        *_use(manifest, repository),
        *_expects(manifest),
        *_origin(bundle, digest),
        *_precision(manifest),
        *_measured(records),
    ]
    return "\n".join(parts) + "\n"


def _header(manifest: Manifest, facts: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of the header that the hub reads. The header is YAML, and JSON strings are valid YAML."""
    yield "---"
    yield "library_name: sinew"
    yield "pipeline_tag: robotics"
    yield f"tags: {json.dumps(['sinew', 'robotics', 'vla', manifest.architecture])}"
    yield from (f"{name}: {json.dumps(value)}" for name, value in facts.items() if value)
    yield "---"
    yield ""


def _use(manifest: Manifest, repository: str) -> Iterator[str]:
    spec = manifest.spec
    frames = ", ".join(
        f"{json.dumps(camera.name)}: {re.sub(r'[^A-Za-z0-9]', '_', camera.name)}" for camera in spec.cameras
    )
    yield from ("```", f"sinew serve hf://{repository}", "```", "", "```python")
    yield "from sinew_client import Client"
    yield ""
    yield 'with Client("tcp://127.0.0.1:5555") as policy:'
    yield f'    chunk = policy.infer({{"images": {{{frames}}}, "state": state, "prompt": "..."}})'
    yield f"    chunk.actions  # float32 [{spec.chunk_size}, {spec.action.dim}]"
    yield from ("```", "")


def _expects(manifest: Manifest) -> Iterator[str]:
    spec = manifest.spec
    yield from ("## Inputs and outputs", "", "| | |", "|---|---|")
    for camera in spec.cameras:
        yield f"| camera `{_cell(camera.name)}` | uint8 [{camera.height}, {camera.width}, 3] RGB |"
    yield f"| state | {_vector(spec.state)} |"
    yield f"| action | {_vector(spec.action)} |"
    rate = f", {spec.control_hz:g} actions per second" if spec.control_hz else ""
    yield f"| chunk | {spec.chunk_size} actions{rate}; {spec.solver_steps} solver steps |"
    yield ""


def _origin(bundle: Bundle, digest: str) -> Iterator[str]:
    origin = bundle.manifest.provenance
    yield from (
        "## Origin",
        "",
        f"Converted by {_cell(origin.converter)} from {_cell(origin.format)}.",
    )
    yield from ("", "| file | bytes | SHA-256 |", "|---|---|---|")
    yield f"| **{_cell(bundle.path.name)}** | {bundle.path.stat().st_size} | `{digest}` |"
    yield from (f"| {_cell(file.name)} | {file.bytes} | `{_cell(file.sha256)}` |" for file in origin.sources)
    yield ""
    yield from (
        f"* given to the converter: {_cell(name)} = {_cell(value)}" for name, value in origin.options.items()
    )
    yield from (f"* {_cell(note)}" for note in origin.notes)
    if origin.dropped:
        yield f"* left out, because inference never reads it: {_cell(', '.join(origin.dropped[:8]))}"
        if len(origin.dropped) > 8:
            yield f"* and {len(origin.dropped) - 8} more tensors"
    yield ""


def _precision(manifest: Manifest) -> Iterator[str]:
    yield from ("## Precision", "")
    kinds = sorted(set(manifest.precision.values()))
    parts = ", ".join(f"{_cell(part)} {_cell(kind)}" for part, kind in manifest.precision.items())
    yield f"Stored as {_cell(kinds[0]) if len(kinds) == 1 else parts}."
    if (record := manifest.quantization) is not None:
        recipe = ", ".join(f"{_cell(part)} {_cell(kind)}" for part, kind in record.recipe.items())
        yield (
            f"Quantised: {recipe}; relative L2 of the chunk against float32 {record.error:.1e} median,"
            f" {record.error_max:.1e} largest over {record.observations} observations from {_cell(record.source)}."
        )
        if (outcome := record.success) is not None:
            yield (
                f"{_rate(outcome.wins, outcome.episodes)} of {_cell(outcome.env)};"
                f" unquantised, over the same seeds, {_rate(outcome.recorded_wins, outcome.episodes)}."
            )
    yield ""


def _measured(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    validations = [record for record in records if record["schema"] == VALIDATION]
    evaluations = [record for record in records if record["schema"] == EVALUATION]
    yield from ("## Parity", "")
    if not validations:
        yield from ("Not measured: `sinew validate` was not run with this file.", "")
    for record in validations:
        yield from _parity(record)
    yield from ("## Success", "")
    lines = [line for record in validations for line in _gate(record)]
    lines += [line for record in evaluations for line in _episodes(record)]
    yield from lines or ["Not measured: neither a gate nor `sinew eval` was run with this file."]


def _parity(record: Mapping[str, Any]) -> Iterator[str]:
    parity = record["parity"]
    verdict = "passes" if parity["passed"] else "**FAILS**"
    yield (
        f"Engine {parity['engine']}, {parity['dtype']} on {parity['device']} ({_cell(record['hardware'])},"
        f" sinew {record['sinew']}, {record['date'][:10]}) against eager fp32 over {parity['observations']}"
        f" observations ({_cell(parity['source'])}): {verdict}."
    )
    yield from ("", "| stage | relative L2, worst | bound |", "|---|---|---|")
    yield from (f"| {_cell(s['name'])} | {s['error']:.1e} | {s['bound']:.0e} |" for s in parity["stages"])
    yield from (f"* **{_cell(fault)}**" for fault in parity["faults"])
    yield ""


def _gate(record: Mapping[str, Any]) -> Iterator[str]:
    gate = record.get("gate") or {}
    if "wins" in gate:
        yield (
            f"* gate of {_cell(gate['env'])}, engine {record['parity']['engine']}:"
            f" {_rate(gate['wins'], gate['episodes'])}; {_cell(gate['text'])}"
        )


def _episodes(record: Mapping[str, Any]) -> Iterator[str]:
    for row in record["variants"]:
        yield f"* {_cell(record['task']['env'])}, {_cell(row['label'])}: {_rate(row['wins'], row['episodes'])}"


def _rate(wins: int, count: int) -> str:
    low, high = wilson(wins, count)
    return f"{wins} of {count} episodes (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


def _vector(spec: VectorSpec) -> str:
    names = list(map(_cell, spec.labels))
    return f"{spec.dim} numbers" + (f": {', '.join(names)}" if names else "")


def _cell(text: object) -> str:
    """Return ``text`` in a form for one cell of a markdown table. Control characters are removed and markup is
    escaped."""
    plain = " ".join("".join(sign if sign.isprintable() else " " for sign in str(text)).split())
    return "".join(f"\\{sign}" if sign in r"|<>[]`*_\\" else sign for sign in plain)
