"""Compare the engines on one policy in float32 and in low-bit formats, by CPU time and elapsed time.

python -m benchmarks.low_bit --make FOLDER [--depth 4] [--rounds 3] [--threads 2]
python -m benchmarks.low_bit BUNDLE LOWBIT... [--rounds 3] [--threads 2] [--onnx QUANTISED] [--nbits FOLDER]

--make writes a random SmolVLA of full width and 1 / DEPTH of its layers to FOLDER (2,048 tokens unless DEPTH is 1). It
also writes bundles in int8 and in 4 bits with an int8 head. It compares six engines: eager, plan, onnx, onnx int8, cpu
int8 and cpu 4 bits. It reuses existing files.

Each round runs each engine once, and each round begins with another engine. A ratio compares an engine with eager in
the same round. CPU seconds are those of the process with all its threads. Other programs on the same cores do not
change CPU seconds, but a program on the second thread of a core does. LOWBIT are bundles that `sinew quantize
--engine cpu` made from BUNDLE.

The peak memory of each engine is measured in its own process, after one and after three inferences. At the first run
of the vision tower, the weights of the language model are not in memory yet. --nbits exports the graphs of BUNDLE to
FOLDER and replaces their products by MatMulNBits of ONNX Runtime: 4 bits in symmetric blocks of 32, and int8
activations. The last line of the output is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sinew.core import machine  # import this module before torch, so that idle threads of torch sleep

# isort: split

import numpy as np

from sinew.bench.measure import PROMPT, make_observation
from sinew.engine.cpu.kernels.library import extension
from sinew.policy import Policy, load


def once(policy: Policy, observation: dict[str, Any]) -> tuple[tuple[float, float], np.ndarray]:
    """Run one inference. Returns (CPU seconds, elapsed seconds), and the chunk."""
    begin = time.process_time(), time.perf_counter()
    actions = policy.infer({**observation, "seed": 0}).actions
    return (time.process_time() - begin[0], time.perf_counter() - begin[1]), actions


def peak(path: Path, engine: str, threads: int) -> list[int]:
    """Load the bundle in a new process. Returns its peaks of resident memory in MiB after one and after three
    inferences."""
    command = [sys.executable, __file__, str(path), "--peak-of", engine, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()[-2:]]


def without_gemm(graph: Any) -> None:
    """Replace every Gemm with a stored weight by MatMul and Add, because the quantizer supports only MatMul."""
    from onnx import helper, numpy_helper

    stored = {tensor.name: tensor for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        plain = given.pop("transB", 0) in (0, 1) and all(value == 1 for value in given.values())
        if node.op_type != "Gemm" or not plain or node.input[1] not in stored:
            nodes.append(node)
            continue
        weight = numpy_helper.to_array(stored[node.input[1]])
        wide = weight.T if any(a.name == "transB" and a.i for a in node.attribute) else weight
        name, out = f"{node.output[0]}.weight", node.output[0]
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(wide), name))
        has_bias = len(node.input) > 2
        product = f"{out}.product" if has_bias else out
        nodes.append(helper.make_node("MatMul", [node.input[0], name], [product], name=f"{node.name}_matmul"))
        if has_bias:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [out]))
    del graph.node[:]
    graph.node.extend(nodes)
    read = {name for node in nodes for name in node.input} | {value.name for value in graph.output}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name not in read:
            del graph.initializer[index]


def four_bits(bundle: Path, folder: Path) -> Path:
    """Write the graphs of a bundle with products of 4 bits to ``folder``. Returns ``folder``."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    from sinew.cli import main as sinew

    if sinew(["export", str(bundle), "--onnx", str(folder)]):
        raise SystemExit("the export failed")
    logging.disable(logging.INFO)  # the quantizer logs a line for each node
    for path in folder.glob("*.onnx"):
        model = onnx.load(str(path))
        without_gemm(model.graph)
        quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True, accuracy_level=4)
        quantizer.process()
        path.unlink()
        (data := path.with_name(f"{path.name}.data")).unlink()
        quantizer.model.save_model_to_file(str(path), use_external_data_format=True)
        print(f"{path.name}: {data.stat().st_size / 1e6:.1f} MB", flush=True)
    return folder


def make(folder: Path, depth: int) -> tuple[Path, Path, Path]:
    """Write the float bundle and its two low-bit bundles to ``folder``, unless they exist. Returns their paths."""
    from benchmarks.checkpoints.smolvla import write_checkpoint
    from benchmarks.checkpoints.smolvla_layout import Widths
    from sinew.cli import main as sinew

    wide, int8, four = (folder / f"{name}.gguf" for name in ("wide", "int8", "q4"))
    if not wide.exists():
        layers = {"vision_layers": 12 // depth, "num_vlm_layers": 16 // depth, "text_layers": 16 // depth}
        sizes = Widths() if depth == 1 else Widths(**layers, vocab_size=2048)
        made = write_checkpoint(folder, widths=sizes)
        if sinew(["convert", str(made.policy), str(wide), "--vlm", str(made.vlm)]):
            raise SystemExit("the conversion failed")
    for path, body in ((int8, "int8"), (four, "q4_0")):
        recipe = f"vision={body},language={body},head=int8"
        options = ["--observations", "1", "--episodes", "0", "--engine", "cpu"]
        if not path.exists() and sinew(
            ["quantize", str(wide), "--recipe", recipe, "--out", str(path), *options]
        ):
            raise SystemExit("the quantisation failed")
    return wide, int8, four


def ratio_to_eager(what: str, taken: list[float], eager: list[float]) -> dict[str, Any]:
    """Return the median, the smallest and the largest ratio to eager, over the rounds.

    Args:
        what: Name of the engine.
        taken: Seconds of the engine in each round.
        eager: Seconds of eager in each round.
    """
    ratios = [mine / theirs for mine, theirs in zip(taken, eager, strict=True)]
    return {
        f"to_eager{what}": round(statistics.median(ratios), 3),
        f"to_eager{what}_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument(
        "--make", type=Path, help="folder for random bundles; the benchmark writes and compares them"
    )
    parser.add_argument(
        "--depth", type=int, default=1, choices=(1, 2, 4), help="--make writes 1 / DEPTH of the layers"
    )
    parser.add_argument("lowbit", type=Path, nargs="*")
    parser.add_argument(
        "--engines", nargs="+", default=["eager", "plan"], help="engines that run BUNDLE, eager first"
    )
    parser.add_argument(
        "--onnx", type=Path, action="append", default=[], help="quantised graphs that engine onnx also runs"
    )
    parser.add_argument("--nbits", type=Path, help="folder for graphs of 4 bits that engine onnx also runs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peak-of", default="", help=argparse.SUPPRESS)
    parser.add_argument("--no-peaks", action="store_true")
    arguments = parser.parse_args()
    if arguments.peak_of:
        policy = load(arguments.bundle, engine=arguments.peak_of, dtype="fp32", threads=arguments.threads)
        observation = make_observation(policy.spec, None, PROMPT, None)
        for times in (1, 2):
            for _ in range(times):
                policy.infer(observation)
            print(machine.resident_bytes()["peak"] >> 20)
        return
    if arguments.make is not None:
        arguments.bundle, int8, four = make(arguments.make, arguments.depth)
        arguments.lowbit, arguments.onnx = [int8, four], [int8]
        arguments.engines = ["eager", "plan", "onnx"]
    elif arguments.bundle is None:
        parser.error("expected BUNDLE or --make FOLDER")
    sides = {name: (arguments.bundle, name) for name in arguments.engines}
    sides |= {f"onnx {path.stem}": (path, "onnx") for path in arguments.onnx}
    if arguments.nbits is not None:
        sides["onnx MatMulNBits"] = (four_bits(arguments.bundle, arguments.nbits), "onnx")
    sides |= {f"cpu {path.stem}": (path, "cpu") for path in arguments.lowbit}
    peaks = {}
    if not arguments.no_peaks:
        peaks = {name: peak(*side, arguments.threads) for name, side in sides.items()}
    policies = {
        name: load(path, engine=engine, dtype="fp32", threads=arguments.threads)
        for name, (path, engine) in sides.items()
    }
    observation = make_observation(policies["eager"].spec, None, PROMPT, None)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in policies}
    chunks = {}
    order = list(policies)
    for index in range(arguments.rounds + 1):
        for name in order[index % len(order) :] + order[: index % len(order)]:
            took, chunks[name] = once(policies[name], observation)
            if index:  # the first round only warms up
                seconds[name].append(took)
                print(f"round {index}  {name:44} {took[0]:7.2f} CPU s {took[1]:7.2f} s", flush=True)
    rows = {}
    for name, taken in seconds.items():
        error = np.linalg.norm(chunks[name] - chunks["eager"]) / np.linalg.norm(chunks["eager"])
        rows[name] = {
            "cpu_seconds": [round(cpu, 2) for cpu, _ in taken],
            **ratio_to_eager("", [cpu for cpu, _ in taken], [cpu for cpu, _ in seconds["eager"]]),
            "seconds": [round(clock, 2) for _, clock in taken],
            **ratio_to_eager(
                "_by_clock", [clock for _, clock in taken], [clock for _, clock in seconds["eager"]]
            ),
            "chunk_error": float(f"{error:.3g}"),
            "peaks_mib": peaks.get(name),
        }
        print(f"{name:44} {rows[name]}")
    record = {
        "hardware": machine.cpu_model(),
        "kernels": extension().kernels,
        "threads": arguments.threads,
        "load_average": os.getloadavg()[0],
        "engines": rows,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
