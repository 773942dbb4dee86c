"""Time every policy family at its published size on one CPU: all engines, with memory, and what `sinew perf` predicts.

    python -m benchmarks.every_family OUT [--only smolvla] [--rows eager --rows int8] [--threads 1] [--cpu "a name"]
    python -m benchmarks.every_family OUT --peer PYTHON --rows lerobot
    python -m benchmarks.every_family benchmarks/results/every_family --page docs/speed-by-family.md

The weights are random, so the actions mean nothing, but every product is computed. A bundle is made from the family's
``published.json``: weights of its published type, identity normalisation and a tokenizer of one word. Each row runs in
its own process: it loads the bundle, computes a first chunk, then ``--runs`` more, and reports the processor seconds of
one chunk, the peak memory and the seconds from the start of its process to the first chunk.

``--peer`` also times LeRobot's own policy of the same size, for the families that benchmarks/lerobot_alone.py knows.
``python -m benchmarks.peers --how`` states how to make its environment.

Results are written to OUT/every_family.json after each row. A second call measures only the missing rows. ``--page``
measures nothing and writes the page from all JSON files in OUT, one for each CPU. The repository has them in
benchmarks/results/every_family.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from cyclopts import run
from gguf import GGMLQuantizationType
from sinew_client.types import CameraSpec, VectorSpec
from sinew_perf.program import PublishedProgram

from benchmarks.lerobot_alone import POLICIES
from benchmarks.peers import ROOT, environment
from sinew.bundle import Bundle, TensorSource, write_bundle
from sinew.bundle.quant import pack_ternary
from sinew.bundle.schema import Manifest, Normalization, Processing, PromptRecipe, Provenance
from sinew.bundle.writer import ArraySlice
from sinew.core import PolicySpec, SinewError, machine
from sinew.core.registry import presets
from sinew.families.published import Published, published
from sinew.layers.stores.codes import codes_of
from sinew.lowbit.sources import lowbit_sources, plan_formats
from sinew.models import build_on_meta
from sinew.models.base import Model
from sinew.steps.image.base import ImageRecipe
from sinew.steps.prompt.text import Text

# On a CPU without bfloat16 instructions, PyTorch multiplies bfloat16 far slower than float32 (1 to 8 GFLOP/s instead of
# 60 on a Zen 3). These rows then compute in float32.
NATIVE = "native" if machine.half_units("bf16") else "fp32"
ROWS = {  # row -> (precision of all components, engine, compute type)
    "eager": ("", "eager", NATIVE),
    "plan": ("", "plan", NATIVE),
    "onnx": ("", "onnx", "fp32"),
    "int8": ("int8", "cpu", "fp32"),
    "4bit": ("q4_0", "cpu", "fp32"),
}
PEER = "lerobot"  # the row of LeRobot's own policy
# Observation steps of the presets whose views are those of several steps.
HISTORY = {"vqbet": 5, "diffusion": 2, "multi_task_dit": 2, "omnivla-edge": 6}
SAME = ("cogact-small", "cogact-large")  # differ from cogact in the head only
# Presets whose checkpoints are published in float32. All others are bfloat16.
FLOAT32 = ("act", "diffusion", "vqbet", "multi_task_dit", "omnivla-edge", "turbovla", "xvla")
LABELS = {
    PEER: "LeRobot",
    "eager": "eager",
    "plan": "plan",
    "onnx": "onnx",
    "int8": "cpu, int8",
    "4bit": "cpu, 4 bits",
}
PAGE = """# Speed by policy family

On this page you choose an engine and a precision for your policy family before you download a checkpoint. The tables
show what one action chunk costs on a CPU, at the published sizes. The weights are random, so the tables show nothing
about success. `python -m benchmarks.every_family OUT` measures one CPU, and
`python -m benchmarks.every_family benchmarks/results/every_family --page docs/speed-by-family.md` writes this page.

There is one section for each kind of CPU, with up to three tables.

**Processor seconds for one chunk:**

* **GFLOP**: the number of operations of a chunk, as `sinew perf` counts them.
* **at product rate**: the processor seconds of these operations at the highest rate of a large PyTorch product in the
  type in which `eager` computes.
* **eager**, **plan**: these engines compute in the type of the checkpoint, which is bfloat16 for most policies. On a
  CPU without bfloat16 instructions, they compute in float32.
* **onnx**: this engine computes in float32 with its own products, which can be faster than those of PyTorch.
* **cpu**: this engine multiplies weights of 8 or 4 bits.
* **LeRobot**: LeRobot 0.6.1's own policy of the same size, without the processing of the observation. SmolVLA computes
  in bfloat16 there, pi0 and pi0.5 in the type of `eager`, and the others in float32.

**Parts of a chunk:** the share of the vision encoder, of the prefix (the language model) and of the action head in the
time of one chunk with int8 weights, or with `eager` if `cpu` did not run.

**Memory and the first chunk:** the columns of the engines show the peak memory of the process in MiB. The last two
columns show the seconds from the start of the process to the first chunk, for `eager`, and for `cpu` with int8 weights.
"""
SECTION = """## {cpu}

The CPU has the instructions `{instructions}`, and each process has {threads} compute thread. Other programs used the
machine during the measurement (load {low:.0f} to {high:.0f}). Processor time changes little with the load, but the
seconds until the first chunk do. A large PyTorch product reaches {float32:.0f} GFLOP/s in float32 and
{bfloat16:.0f} GFLOP/s in bfloat16."""
PARTS = ("vision", "prefix", "head")
WORD = "w"
MOST_RATE_S = 3.0  # a CPU without products in bfloat16 takes five seconds for each
GIB = 1 << 30
NOISE = (
    np.random.default_rng(0).standard_normal(4_194_301).astype(np.float32)
)  # a prime length, see sinew.presets


@dataclass(frozen=True)
class RandomWeights:
    """The bytes of a tensor of noise, computed when they are written.

    Attributes:
        shape: Shape of the tensor.
        scale: Standard deviation of the values.
        mean: Mean of the values.
        dtype: Type of the values.
    """

    shape: tuple[int, ...]
    scale: float
    mean: float
    dtype: torch.dtype

    def blocks(self) -> Iterable[memoryview]:
        missing, start = math.prod(self.shape), math.prod(self.shape) % 1_000_003
        while missing:
            values = torch.from_numpy(NOISE[start : start + missing] * self.scale + self.mean).to(self.dtype)
            yield values.view(torch.uint8).numpy().data
            missing, start = missing - len(values), 0


def weights(model: Model, half: bool) -> Iterator[TensorSource]:
    """Yield the tensors of a model with random values, in bfloat16 if ``half``, otherwise in float32.

    Weights that a family stores in two bits become random codes. Buffers, such as masks and positions, become ones.
    """
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        module, _, part = name.rpartition(".")
        if part == "weight" and tensor.dtype == torch.uint8:
            values = np.random.default_rng(0).integers(-1, 2, (shape[0], 4 * shape[1]), np.int8)
            packed = pack_ternary(values).view(np.int32)
            yield TensorSource(
                name, packed.shape, GGMLQuantizationType.I32, packed.nbytes, ArraySlice(packed)
            )
            continue
        in_half = half and name not in buffers and name.partition(".")[0] not in model.float32_modules
        in_half = in_half and tensor.dtype != torch.uint8 and part != "scale"
        dtype = torch.bfloat16 if in_half else torch.float32
        spread, mean = (0.0, 1.0) if name in buffers else (0.1, float("norm" in name))
        if part == "scale" and codes_of(model.get_submodule(module)):
            spread, mean = 0.0, 0.02
        elif len(shape) > 1 and name not in buffers:
            spread, mean = math.prod(shape[1:]) ** -0.5, 0.0
        data = RandomWeights(shape, spread, mean, dtype)
        kind = GGMLQuantizationType.BF16 if in_half else GGMLQuantizationType.F32
        yield TensorSource(name, shape, kind, math.prod(shape) * dtype.itemsize, data)


def manifest(name: str, size: Published, model: Model) -> Manifest:
    """Return the manifest of a random bundle: identity normalisation and frames that already have the model's size."""
    history = HISTORY.get(name, 1)
    cameras = (model.views or size.views) // history
    width = size.width or size.side
    rows, dim = model.noise_shape
    same = Normalization("identity")
    recipe = ImageRecipe(
        size.side, width, mean=(0.5,) * model.channels, std=(0.5,) * model.channels, sizes=model.frames
    )
    spec = PolicySpec(
        size.architecture,
        name,
        tuple(CameraSpec(f"camera{number}", size.side, width) for number in range(cameras)),
        VectorSpec(model.state_size // history),
        VectorSpec(dim),
        chunk_size=rows,
        noise_dim=0 if model.solver.noise == "zeros" else dim,
        solver_steps=size.steps,
        max_prompt_tokens=size.tokens,
        resizes_frames=False,
        solver=model.solver,
        history=history,
    )
    prompt = PromptRecipe(size.tokens, getattr(model.config, "vocab_size", 2), 0, add_special_tokens=False)
    if size.tokens == 1:  # the family reads no instruction
        prompt = replace(prompt, steps=(Text(WORD),))
    processing = Processing(recipe, prompt, same, same, model.state_size, dim, all_cameras=True)
    vocabulary = {"model": {"type": "WordLevel", "vocab": {WORD: 0}, "unk_token": WORD}}
    tokenizer = json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, **vocabulary})
    return Manifest(
        size.architecture,
        name,
        msgspec.to_builtins(size.config),
        spec,
        processing,
        Provenance("random", "benchmarks.every_family"),
        tokenizer,
    )


def write(name: str, path: Path) -> None:
    """Write a random bundle of a preset at its published size."""
    size = published(name)
    model = build_on_meta(size.architecture, size.config)
    record = manifest(name, size, model)
    write_bundle(path, lambda: record, list(weights(model, name not in FLOAT32)))


def measure(bundle: Path, row: str, threads: int, runs: int, began: float) -> dict[str, Any]:
    """Load a bundle and time its chunks. Runs in its own process.

    Args:
        bundle: The bundle.
        row: Key of ``ROWS``.
        threads: Compute threads.
        runs: Number of chunks after the first one.
        began: ``time.time()`` before the process started.

    Returns:
        cpu_s (one chunk), clock_s, ready_s (from the start of the process to the first chunk), peak_mib, about, load
        (average of the machine during the run), and the stages in ms.
    """
    from sinew.policy import load

    _, engine, dtype = ROWS[row]
    policy = load(bundle, "cpu", dtype, engine, threads=threads)
    observation = policy.dummy_observation()
    policy.infer(observation)
    ready = time.time() - began
    cpu, clock, timing = time.process_time(), time.perf_counter(), None
    for _ in range(runs):
        timing = policy.infer(observation).timing
    return {
        "cpu_s": round((time.process_time() - cpu) / runs, 4),
        "clock_s": round((time.perf_counter() - clock) / runs, 4),
        "ready_s": round(ready, 2),
        "peak_mib": machine.resident_bytes()["peak"] >> 20,
        "about": policy.precision_text,
        "stages_ms": [round(getattr(timing, stage), 1) for stage in ("vision_ms", "prefix_ms", "head_ms")],
        "load": round(os.getloadavg()[0], 1),
    }


def alone(call: Any, *arguments: Any) -> dict[str, Any]:
    """Run a call in its own process; return its result, or the reason why there is none."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            return pool.submit(call, *arguments).result()  # type: ignore[no-any-return]
    except SinewError as error:
        return {"reason": str(error)}
    except BrokenProcessPool:
        return {"reason": "the system ended the process, perhaps because memory ran out"}


def alone_in_lerobot(name: str, threads: int, runs: int, peer: Path, lerobot: Path) -> dict[str, Any]:
    """Time LeRobot's own policy in a process of another environment. Return its result, or why it failed."""
    dtype = "bfloat16" if NATIVE == "native" else "float32"
    command = [peer, "-m", "benchmarks.lerobot_alone", name, str(threads), str(runs), dtype]
    ended = subprocess.run(
        command, check=False, cwd=ROOT, env=environment(lerobot), capture_output=True, text=True
    )
    if ended.returncode:
        return {"reason": f"LeRobot ended with status {ended.returncode}: {ended.stderr.strip()[-200:]}"}
    return {**json.loads(ended.stdout.splitlines()[-1]), "load": round(os.getloadavg()[0], 1)}


def quantise(bundle: Path, precision: str, out: Path) -> None:
    """Write a copy of a bundle whose components all have one precision."""
    opened = Bundle(bundle)
    formats = plan_formats(opened, dict.fromkeys(("vision", "language", "head"), precision))
    write_bundle(out, lambda: opened.manifest, lowbit_sources(opened, formats))


def operations(name: str) -> float:
    """Return the GFLOP of one chunk, counted by ``sinew perf`` on a model without memory."""
    program = PublishedProgram.load(name)
    steps = program.model.head_runs(program.shapes.steps)
    counts = {"vision": 1, "prefix": 1, "head": steps}
    return sum(count * program.trace.flops(stage) for stage, count in counts.items()) / 1e9


def too_large(name: str, row: str) -> str:
    """Return the reason why this machine has too little memory for a row; "" if it has enough.

    An export to ONNX Runtime needs the weights in float32 twice: once read and once written.
    """
    size = published(name)
    numbers = sum(each.numel() for each in build_on_meta(size.architecture, size.config).parameters())
    floats = 4 * numbers / GIB
    if row == "onnx" and 2 * floats > machine.memory()[0] / GIB:
        return f"the export needs about {2 * floats:.0f} GiB of memory, because its graphs are float32"
    if ROWS[row][2] == "fp32" and not ROWS[row][0] and floats > machine.memory()[0] / GIB:
        return f"the weights need about {floats:.0f} GiB of memory, because this CPU has no bfloat16 instructions"
    return ""


def product_rate(dtype: torch.dtype) -> float:
    """Return the GFLOP per processor second of a large product in one thread: the most that an engine could reach."""
    torch.set_num_threads(1)
    left, right = (torch.randn(1536, 1536).to(dtype) for _ in range(2))
    best, began = 0.0, time.process_time()
    for _ in range(12):
        start = time.process_time()
        left @ right
        best = max(best, 2 * 1536**3 / (time.process_time() - start) / 1e9)
        if time.process_time() - began > MOST_RATE_S:
            break
    return best


def cell(row: dict[str, Any], key: str, digits: int = 3) -> str:
    """Return a number of a row for the table; a dash if the engine did not run."""
    return (
        "-"
        if key not in row
        else f"{row[key]:.{digits}g}"
        if row[key] < 10 ** (digits - 1)
        else f"{row[key]:.0f}"
    )


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Return the lines of a table of numbers with an empty line before it."""
    marks = "|".join(["---", *["--:"] * (len(head) - 1)])
    return ["", f"| {' | '.join(head)} |", f"|{marks}|", *(f"| {' | '.join(row)} |" for row in rows)]


def shares(rows: dict[str, Any]) -> list[str]:
    """Return the percentages of the parts of a chunk and the row that they come from; [] if no row has parts."""
    for row in ("int8", "eager"):
        parts = rows.get(row, {}).get("stages_ms", ())
        if sum(parts):
            return [*(f"{100 * part / sum(parts):.0f} %" for part in parts), LABELS[row]]
    return []


def section(results: dict[str, Any]) -> str:
    """Return the section of one CPU: its tables, and the reasons of the rows that did not run."""
    results = {name: results[name] for name in presets() if name in results}
    some = next(iter(results.values()))
    every = list(results.values())
    loads = [row["load"] for result in every for row in result["rows"].values() if "load" in row]
    rates = {kind: max(result["rates"][kind] for result in every) for kind in ("float32", "bfloat16")}
    about = {key: some[key] for key in ("cpu", "instructions", "threads")}
    lines = [SECTION.format(**about, low=min(loads), high=max(loads), **rates)]
    times = []
    for name, result in results.items():
        half = name not in FLOAT32 and "bf16" in result["rows"].get("eager", {}).get("about", "bf16")
        bound = result["gflop"] / rates["bfloat16" if half else "float32"]
        cells = [cell(result["rows"].get(row, {}), "cpu_s") for row in LABELS]
        times.append([result["title"], f"{result['gflop']:.0f}", f"{bound:.2g}", *cells])
    lines += ["", "### Processor seconds for one chunk"]
    lines += table(["policy", "GFLOP", "at product rate", *LABELS.values()], times)
    lines += ["", "### Parts of a chunk"]
    parts = [[result["title"], *found] for result in every if (found := shares(result["rows"]))]
    lines += table(["policy", *PARTS, "engine"], parts)
    lines += ["", "### Memory and the first chunk"]
    memory = []
    for result in every:
        rows = result["rows"]
        cells = [cell(rows.get(row, {}), "peak_mib") for row in LABELS]
        cells += [cell(rows.get(row, {}), "ready_s", 2) for row in ("eager", "int8")]
        memory.append([result["title"], str(result["bundle_mib"]), *cells])
    lines += table(["policy", "bundle, MiB", *LABELS.values(), "first chunk, eager", "int8"], memory)
    reasons: dict[str, list[str]] = {}
    for result in every:
        for row, measured in result["rows"].items():
            if "reason" in measured:
                reasons.setdefault(measured["reason"], []).append(f"{result['title']} ({LABELS[row]})")
    if absent := [published(name).title for name in presets() if name not in (*results, *SAME)]:
        lines += ["", f"Not measured yet: {', '.join(absent)}."]
    if reasons:
        lines += ["", "These engines did not run:", ""]
        # Behind a semicolon, an engine's message says what the user can do instead.
        lines += [f"* {', '.join(who)}: {reason.partition(';')[0]}" for reason, who in reasons.items()]
    return "\n".join(lines) + "\n"


def written(folder: Path) -> str:
    """Return the page from all result files of a folder, one for each CPU."""
    files = sorted(folder.glob("*.json"), key=lambda file: (-len(json.loads(file.read_text())), file.name))
    if not files:
        raise SystemExit(f"{folder}: no results (*.json) in this folder; measure first, without --page")
    return "\n".join([PAGE, *(section(json.loads(file.read_text())) for file in files)])


def main(
    out: Path,
    /,
    *,
    only: list[str] | None = None,
    rows: list[str] | None = None,
    threads: int = 1,
    runs: int = 1,
    page: Path | None = None,
    cpu: str = "",
    peer: Path | None = None,
    lerobot: Path = ROOT / ".venv-clients" / "lerobot-0.6.1",
) -> None:
    """Measure the families, or write the page.

    Args:
        out: Folder of the results and of the bundles, which are deleted after use.
        only: Presets to measure. Default: all.
        rows: Keys of ``ROWS``. Default: all.
        threads: Compute threads of each process.
        runs: Number of timed chunks.
        page: Write this page from the results and measure nothing.
        cpu: Name of the CPU on the page. Default: its model, as the system names it.
        peer: Python of an environment with LeRobot and transformers. None measures no row ``lerobot``.
        lerobot: Folder of LeRobot's package.
    """
    if page is not None:
        page.write_text(written(out))
        return
    store = out / "every_family.json"
    results: dict[str, Any] = json.loads(store.read_text()) if store.exists() else {}
    out.mkdir(parents=True, exist_ok=True)
    for name in only or [name for name in presets() if name not in SAME]:
        result = results.setdefault(name, {"title": published(name).title, "rows": {}})
        missing = [row for row in rows or (*ROWS, PEER) if row not in result["rows"]]
        if PEER in missing:
            missing.remove(PEER)
            if peer is not None and name in POLICIES:
                result["rows"][PEER] = alone_in_lerobot(name, threads, runs, peer, lerobot)
                print(name, PEER, result["rows"][PEER], flush=True)
                store.write_text(json.dumps(results, indent=1))
        if not missing:
            continue
        bundle = out / f"{name}.gguf"
        write(name, bundle)
        rates = {str(dtype)[6:]: round(product_rate(dtype), 1) for dtype in (torch.float32, torch.bfloat16)}
        result |= {"gflop": round(operations(name), 1), "rates": rates}
        result |= {"bundle_mib": bundle.stat().st_size >> 20, "threads": threads}
        result |= {"cpu": cpu or machine.cpu_model(), "instructions": machine.instructions()}
        for row in missing:
            precision, path = ROWS[row][0], bundle
            if reason := too_large(name, row):
                result["rows"][row] = {"reason": reason}
                continue
            if precision and Bundle(bundle).lowbit:  # BitVLA: `cpu` computes with its own ternary weights
                if row != "int8":
                    result["rows"][row] = {"reason": "its weights are ternary; column int8 has engine cpu"}
                    continue
            elif precision:
                path = out / f"{name}-{row}.gguf"
                quantise(bundle, precision, path)
            result["rows"][row] = alone(measure, path, row, threads, runs, time.time())
            if path != bundle:
                result["rows"][row]["bundle_mib"] = path.stat().st_size >> 20
                path.unlink()
            print(name, row, result["rows"][row], flush=True)
            store.write_text(json.dumps(results, indent=1))
        bundle.unlink()
        for exported in out.glob(
            f"{name}*.onnx-*"
        ):  # the graphs of engine onnx, gigabytes for a large policy
            shutil.rmtree(exported)


if __name__ == "__main__":
    run(main)
