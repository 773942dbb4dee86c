"""Fit the calibrated roofline to some requests, and compare its predictions with measured times of other requests.

    python benchmarks/stage_prediction.py OUT.json [--models smolvla pi0] [--threads 1] [--runs 3]

The models have random weights at full size in fp32. The measured times are those of the stages of engine eager. The
last line of standard output is one JSON document. OUT.json stores the measurements. With --reuse, the program reads
them from OUT.json and measures nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sinew.core import machine  # import this module before torch, so that idle threads of torch sleep

# isort: split

import torch
from sinew_perf.machine import fit as calibration
from sinew_perf.machine.calibrate import loaded, measure_samples, with_work
from sinew_perf.machine.fit import Sample
from sinew_perf.machine.measure import MeasuredSizes, Speeds, StageTime, measure_speeds
from sinew_perf.program import preset

# The model is fitted to the first requests and checked on the others. A checked request has no stage in common with a
# fitted request.
FITTED = [MeasuredSizes(1, 8, 12), MeasuredSizes(3, 48, 200)]
CHECKED = [MeasuredSizes(2, 24, 50)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", nargs="+", default=["smolvla", "pi0"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--reuse", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.reuse:
        record = json.loads(options.out.read_text())
        speeds = msgspec.convert(record["speeds"], Speeds)
        samples = []
        for name in options.models:
            times = [t for t in msgspec.convert(record["times"], list[StageTime]) if t.model == name]
            samples += with_work(times, preset(name).cast("fp32"))
    else:
        speeds, samples = measured(options.models, options.runs)
        document = {"speeds": asdict(speeds), "times": [asdict(sample.time) for sample in samples]}
        options.out.write_text(json.dumps(document, indent=1))

    known = [sample for sample in samples if sample.time.request in FITTED]
    unknown = [sample for sample in samples if sample.time.request in CHECKED]
    fitted = calibration.fit(known, speeds)
    print(f"factors { ({name: round(value, 3) for name, value in fitted.factors.items()}) }")
    print(f"band {fitted.band:.1%} (largest leave-one-out error of {len(known)} samples)")
    rows = []
    for label, chosen in (("fitted", known), ("checked", unknown)):
        for sample in chosen:
            seconds = calibration.seconds_of(sample.work, speeds, fitted.factors)
            row = asdict(sample.time) | {"set": label, "predicted": seconds}
            rows.append(row | {"error": seconds / sample.time.seconds - 1})
    for row in rows:
        request = "{views} views {tokens:3} tokens chunk {chunk:3}".format(**row["request"])
        print(
            f"{row['set']:8}{row['model']:9}{row['stage']:9}{request}  {1e3 * row['seconds']:9.1f} ms"
            f"  predicted {1e3 * row['predicted']:9.1f}  {row['error']:+7.1%}  spread {row['spread']:.0%}"
            f"  load {row['load']}"
        )
    worst = {
        label: max(abs(r["error"]) for r in rows if r["set"] == label) for label in ("fitted", "checked")
    }
    print(f"worst { ({label: f'{value:.1%}' for label, value in worst.items()}) }")
    print(
        json.dumps(
            {
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "cpu": machine.cpu_model(),
                "torch": torch.__version__,
                "speeds": asdict(speeds),
                "factors": fitted.factors,
                "band": fitted.band,
                "worst": worst,
                "rows": rows,
            }
        )
    )


def measured(models: list[str], runs: int) -> tuple[Speeds, list[Sample]]:
    samples: list[Sample] = []
    speeds = measure_speeds(runs=9)
    print(f"{speeds}  load {os.getloadavg()}", flush=True)
    for name in models:
        model, program = loaded(name, "fp32")
        samples += measure_samples(model, program, [*FITTED, *CHECKED], runs)
        del model
        gc.collect()
        print(f"{name} measured, load {os.getloadavg()}", flush=True)
    return speeds, samples


if __name__ == "__main__":
    main()
