"""Write the document of ``make gpu`` as Markdown: targets, ladder, stages against the roofline, and checks.

``python -m benchmarks.gpu.table FILE...`` prints one table for several documents. The facts about the machine come
from the first document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sinew_perf.trace import STAGES

from benchmarks.gpu.roofline import Ceilings, bound, least

Record = dict[str, Any]
NARROW = {"fp8": ("language",)}
# Rungs without a roofline, because it counts the products of whole components in bfloat16 or e4m3.
UNBOUNDED = ("fp8-mlp", "w8", "w4")
PROFILED = ("host", "copying", "launching", "waiting", "rest", "before", "after")
FULL = ("engine", "fp8", *UNBOUNDED)  # the rungs that count for a target


def markdown(document: Record) -> str:
    sections = document.get("sections", {})
    parts = [_head(document), _statuses(sections)]
    ladder = [row for section in sections.values() for row in _rungs(section["rows"])]
    ceilings = ceilings_of(sections)
    products = {row["case"]: row["work"] for row in _rows(sections, "bounds") if "work" in row}
    parts += [_ceilings(ceilings), _targets(ladder), _ladder(ladder), _stages(ladder, ceilings, products)]
    parts += [
        _memory(ladder),
        _hosts(ladder),
        _profiled(sections),
        _libraries(sections),
        _streams(sections),
        _compared(sections),
        _clocks(sections),
        _launches(sections, ceilings),
        _checks(_rows(sections, "checks")),
    ]
    return "\n\n".join(part for part in parts if part)


def joined(documents: Sequence[Record]) -> Record:
    """Return the first document with the sections of all documents. If several documents have a section, the last one
    counts."""
    sections = {name: section for each in documents for name, section in each["sections"].items()}
    return {**documents[0], "sections": sections}


def ceilings_of(sections: Record) -> Ceilings | None:
    found = {row["what"]: row for row in _rows(sections, "machine") if "what" in row}
    if "product, bfloat16" not in found or "copy" not in found:
        return None
    narrow = found.get("product, e4m3", {}).get("flops")
    return Ceilings(found["product, bfloat16"]["flops"], found["copy"]["bandwidth"], narrow)


def _head(document: Record) -> str:
    versions = ", ".join(f"{name} {document.get(name)}" for name in ("python", "torch", "triton", "cuda"))
    command = " ".join(map(str, document.get("command", [])))
    run = f"`{command}` at {document.get('commit')}; {versions}; {document.get('seconds', 0)} s in all."
    tiny = "**Small models, to show that the suite runs. These numbers measure nothing.**"
    title = f"# {document['gpu']}, {document['date'][:10]}"
    return "\n\n".join([title, *([tiny] if document.get("tiny") else []), run])


def _statuses(sections: Record) -> str:
    rows = [
        (name, s["status"], f"{s.get('seconds', 0)}", len(s["rows"]), s.get("reason", "") or "-")
        for name, s in sections.items()
    ]
    return table(("section", "status", "s", "rows", "why"), rows)


def _ceilings(ceilings: Ceilings | None) -> str:
    if ceilings is None:
        return "The limits of the device were not measured, so there is no roofline below."
    narrow = "-" if ceilings.fp8_flops is None else f"{ceilings.fp8_flops / 1e12:.0f}"
    return (
        f"Ceilings measured here: bfloat16 product {ceilings.flops / 1e12:.0f} TFLOP/s, e4m3 product {narrow} TFLOP/s, "
        f"device copy {ceilings.bandwidth / 1e12:.2f} TB/s."
    )


def _targets(ladder: list[Record]) -> str:
    rows = []
    asked = [row for row in ladder if row.get("target_ms") and "p50_ms" in row]
    for case in dict.fromkeys(row["case"] for row in asked):
        full = [row for row in asked if row["case"] == case and row["rung"] in FULL]
        for row in full:
            met = "yes" if row["p50_ms"] <= row["target_ms"] else "no"
            tail = "-" if row["p99_ms"] is None else f"{100 * (row['p99_ms'] / row['p50_ms'] - 1):.0f} %"
            rows.append(
                (
                    case,
                    row["rung"],
                    row["target_ms"],
                    _ms(row["p50_ms"]),
                    f"{1e3 / row['p50_ms']:.0f}",
                    tail,
                    met,
                    _l2(row),
                )
            )
    heads = (
        "target",
        "rung",
        "asked, ms",
        "p50, ms",
        "chunks a second",
        "p99 over p50",
        "met",
        "relative L2",
    )
    return _titled("Targets, end to end", table(heads, rows))


def _ladder(ladder: list[Record]) -> str:
    rows = [
        (
            row["case"],
            row["rung"],
            *(_ms(row.get(f"{name}_ms")) for name in ("p50", "p95", "p99")),
            _ms(row.get("frames_ms") or None),
            row.get("calls", "-"),
            _l2(row),
            "-" if "drift" not in row else f"{row['drift']:.1e}",
            row.get("error", ""),
        )
        for row in ladder
    ]
    heads = (
        "case",
        "rung",
        "p50, ms",
        "p95",
        "p99",
        "frames on the host",
        "calls",
        "relative L2",
        "drift",
        "error",
    )
    text = table(heads, rows)
    note = (
        "From uint8 frames in host memory to actions in host memory, inputs rotating. Relative L2: the chunk against "
        "float32 eager with the same noise, the worst input. Frames: of p50, where no kernel resizes them. Drift: "
        "largest change of an answer to the same input."
    )
    left = [
        f"* {row['case']}, {row['rung']}: torch's operators, one by one: {', '.join(row['left'])}"
        for row in ladder
        if row.get("left")
    ]
    return _titled("Ladder", "\n\n".join([note, text, *(["\n".join(left)] if left else [])]) if text else "")


def _stages(ladder: list[Record], ceilings: Ceilings | None, products: Record) -> str:
    rows = []
    for row in ladder:
        if "vision_ms" not in row and "p50_ms" not in row:
            continue
        floor = None
        if ceilings is not None and row["case"] in products and row["rung"] not in UNBOUNDED:
            floor = bound(products[row["case"]], ceilings, NARROW.get(row["rung"], ()))
        cells = [_of(row.get(f"{stage}_ms"), floor and floor[f"{stage}_ms"]) for stage in STAGES]
        if floor is None and cells == ["-"] * len(STAGES):
            continue
        rows.append((row["case"], row["rung"], *cells, _of(row.get("p50_ms"), floor and floor["total_ms"])))
    heads = ("case", "rung", *STAGES, "end to end")
    note = "Milliseconds, and in brackets the roofline's part of them: 100 % could not be faster."
    text = table(heads, rows)
    return _titled("Stages against the roofline", f"{note}\n\n{text}" if text else "")


def _memory(ladder: list[Record]) -> str:
    names = ("weights", "held", "peak", "reserved", "device")
    rows = [
        (row["case"], row["rung"], *(f"{row[f'{name}_bytes'] / 2**30:.2f}" for name in names))
        for row in ladder
        if "peak_bytes" in row
    ]
    heads = (
        "case",
        "rung",
        "weights, GiB",
        "held before",
        "peak of tensors",
        "peak reserved",
        "the driver's",
    )
    note = (
        "Held before: the model and its plan, whose weights a rung may share. Peaks are of PyTorch's allocator, with "
        "what was held. The driver's counts the whole device, with CUDA's own."
    )
    return _titled("Memory of the device", f"{note}\n\n{table(heads, rows)}" if rows else "")


def _hosts(ladder: list[Record]) -> str:
    rows = [
        (row["case"], row["rung"], *(f"{us:.0f}" for us in row["host"].values()))
        for row in ladder
        if "host" in row
    ]
    if not rows:
        return ""
    heads = (
        "case",
        "rung",
        *(name.removesuffix("_us") for name in next(r["host"] for r in ladder if "host" in r)),
    )
    note = "Microseconds between time stamps in the loop of calls, without a profiler: median of each part."
    return _titled("A chunk on the host", f"{note}\n\n{table(heads, rows)}")


def _libraries(sections: Record) -> str:
    """Return the products of every section ``library``, with one column for each way."""
    found = [row for name in sections for row in _rows(sections, name) if "product" in row]
    ways = dict.fromkeys(way for row in found for way in row if way.endswith("_us"))
    facts = ("case", "product", "M", "N", "K", "runs", "kernel")
    rows = [
        (
            *(row[name] for name in facts),
            *("-" if row.get(way) is None else f"{row[way]:.1f}" for way in ways),
        )
        for row in found
    ]
    note = (
        "Microseconds of one product with weights that are not in the cache. ours: the kernel of the engine, with all "
        "that it computes besides the product."
    )
    text = table((*facts, *(way.removesuffix("_us") for way in ways)), rows)
    return _titled("Products beside the library's", f"{note}\n\n{text}" if text else "")


def _streams(sections: Record) -> str:
    """Return the rows of every section ``streams``: the rate, and the latency of a head or of an answer."""
    rows = [
        (
            name.partition(" ")[2],
            row["what"],
            *(f"{row[rate]:.1f}" if rate in row else "-" for rate in ("prefix_hz", "head_hz", "answers_hz")),
            *(_ms(row[latency]) for latency in ("p50_ms", "p95_ms", "p99_ms", "max_ms")),
            row.get("late_heads", "-"),
        )
        for name in sections
        if name.startswith("streams ")
        for row in _rows(sections, name)
        if "p50_ms" in row
    ]
    heads = ("model", "what", "prefixes a second", "heads a second", "answers a second")
    heads = (*heads, "p50, ms", "p95, ms", "p99, ms", "max, ms", "late heads")
    return _titled("Two CUDA streams", table(heads, rows))


def _compared(sections: Record) -> str:
    rows = [
        (
            row["case"],
            row["rung"],
            row["pairs"],
            *(_ms(row[name]) for name in ("base_ms", "new_ms")),
            f"{row['difference_ms']:+.3f} ({row['low_ms']:+.3f} to {row['high_ms']:+.3f})",
            _l2(row),
        )
        for name in sections
        for row in _rows(sections, name)
        if "difference_ms" in row
    ]
    heads = ("case", "rung", "pairs", "base, ms", "new, ms", "new minus base, ms (95 %)", "L2 between them")
    return _titled("Two trees in turns", table(heads, rows))


def _clocks(sections: Record) -> str:
    rows = [
        (name, clocks["count"], *(_range(clocks.get(field)) for field in ("sm_mhz", "power_w", "celsius")))
        for name, section in sections.items()
        if (clocks := section.get("clocks"))
    ]
    heads = ("section", "samples", "SM clock, MHz", "power, W", "temperature, C")
    text = table(heads, rows)
    return _titled("Clocks", f"Least, median and largest value.\n\n{text}" if text else "")


def _range(values: list[float] | None) -> str:
    return "-" if values is None else ", ".join(f"{value:.0f}" for value in values)


def _profiled(sections: Record) -> str:
    rows = [
        (
            row["case"],
            row["variant"],
            row["graph_launches"],
            row["kernel_launches"],
            " and ".join(f"{count} {way}, {size} bytes" for way, (count, size) in row["copies"].items()),
            *("-" if row[f"{name}_us"] is None else f"{row[f'{name}_us']:.0f}" for name in PROFILED),
        )
        for section in sections.values()
        for row in section["rows"]
        if row.get("what") == "host"
    ]
    heads = ("case", "variant", "graph launches", "kernel launches", "copies", *PROFILED)
    note = (
        "One chunk, as the host makes it, from the profiler's trace; microseconds. Launches are calls of the CUDA "
        "runtime. Before and after: without the device."
    )
    text = table(heads, rows)
    return _titled("A chunk on the host, with the profiler", f"{note}\n\n{text}" if text else "")


def _launches(sections: Record, ceilings: Ceilings | None) -> str:
    rows = [row for name in sections for row in _rows(sections, name) if "work" in row and "us" in row]
    if ceilings is None or not rows:
        return ""
    cells, read = [], dict[tuple[str, str], float]()
    for row in rows:
        parts = [(*least(*each, False, ceilings), each[1]) for each in row["work"]]
        floor = 1e6 * sum(seconds for seconds, _, _ in parts)
        of_memory = 1e6 * sum(seconds for seconds, limit, _ in parts if limit == "memory")
        limit = "memory" if 2 * of_memory > floor else "arithmetic"
        key = row["case"], row["variant"]
        read[key] = read.get(key, 0.0) + sum(nbytes for _, _, nbytes in parts)
        share = f"{100 * floor / row['us']:.0f} %"
        cells.append(
            (
                *key,
                row["what"],
                row["grid"],
                row["launches"],
                f"{row['us']:.0f}",
                f"{floor:.0f}",
                limit,
                share,
            )
        )
    heads = ("case", "variant", "kernel", "grid", "launches", "us", "at least", "by", "share of it")
    spans = {
        (row["case"], row["variant"]): row["span_us"]
        for name in sections
        for row in _rows(sections, name)
        if row.get("what") == "replay"
    }
    rates = [
        f"* {case}, {variant}: weights of these read at {rate / 1e6:.2f} TB/s over the whole replay, "
        f"{1e8 * rate / ceilings.bandwidth:.0f} % of a copy's rate"
        for (case, variant), nbytes in read.items()
        for rate in [nbytes / spans[case, variant]]  # bytes per microsecond
    ]
    note = (
        "Products that this program launches itself: the longer of their arithmetic and of reading their weights, on "
        "the ceilings above."
    )
    return _titled(
        "Launches against their limits", "\n\n".join([note, table(heads, cells), "\n".join(rates)])
    )


def _checks(rows: list[Record]) -> str:
    if not rows:
        return ""
    bad = [row for row in rows if row.get("error")]
    skipped = [row for row in rows if row.get("skipped")]
    text = f"{len(rows) - len(bad) - len(skipped)} of {len(rows)} kernel checks hold, {len(skipped)} do not apply."
    cells = [(row["kernel"], row["dtype"], row["sizes"], row["error"]) for row in bad]
    return _titled(
        "Checks", "\n\n".join(filter(None, [text, table(("kernel", "dtype", "sizes", "error"), cells)]))
    )


# ----------------------------------------------------------------------------- cells


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table, or "" if there are no rows. Replaces bars and line ends in cells."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return " ".join(str(value).replace("|", "/").split())


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _l2(row: Record) -> str:
    return "-" if "l2" not in row else f"{row['l2']:.1e}"


def _of(measured: float | None, floor: float | None) -> str:
    if not measured:
        return "-"
    return f"{measured:.3f}" + ("" if floor is None else f" ({100 * floor / measured:.0f} %)")


def _tile(tile: Record | None) -> str:
    return "-" if not tile else ", ".join(f"{name} {size}" for name, size in tile.items())


def _titled(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _rows(sections: Record, name: str) -> list[Record]:
    return sections.get(name, {}).get("rows", [])


def _rungs(rows: list[Record]) -> list[Record]:
    """Return one row for each case and rung. Joins the records with its latency, its stages and its error."""
    merged: dict[tuple[str, str], Record] = {}
    for row in rows:
        if "rung" in row:
            merged.setdefault((row["case"], row["rung"]), {}).update(row)
    return [row for row in merged.values() if "p50_ms" in row or "error" in row]


if __name__ == "__main__":
    print(markdown(joined([json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]])))
