"""Compare the conversion of a camera frame to pixels with Pillow and torch, in one thread.

    python -m benchmarks.resize [rounds]

The implementations run alternately on the same frame. The program prints the median of each in milliseconds, and the
median ratio of Sinew's time to the other time. Then it prints the median of each implementation in its own process, as
on a server. In a shared process, buffers of other libraries let the C library keep freed memory, which saves page
faults.

* "torch": from a uint8 frame to normalised planes as in training code (convert, scale, interpolate, pad, normalise)
* "torch, resize alone": the interpolation of planes that are already float
* "Pillow": its bilinear resize, which the openpi processing calls
* "sinew, compiled": with the kernels of engine `cpu`, which must give the same bits

Where the resize has no letterbox, only the two implementations of Sinew run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import get_args

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from sinew.engine.cpu.kernels.library import extension
from sinew.processing.image import prepare_frame
from sinew.steps.image import compiled
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.image.methods import Method
from sinew.steps.image.resize import Resize


def contestants(frame: np.ndarray, recipe: ImageRecipe) -> dict[str, Callable[[], object]]:
    height, width = Letterbox(recipe.height, recipe.width).inner(*frame.shape[:2])
    planes = torch.from_numpy(frame).permute(2, 0, 1)[None].contiguous().float() / 255

    def interpolate(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)

    def whole() -> torch.Tensor:
        x = interpolate(torch.from_numpy(frame).permute(2, 0, 1)[None].float() / 255)
        x = F.pad(x, (recipe.width - width, 0, recipe.height - height, 0))
        return (x - 0.5) / 0.5

    return {
        **ours(frame, recipe),
        "torch": whole,
        "torch, resize alone": lambda: interpolate(planes),
        "Pillow": lambda: np.asarray(
            Image.fromarray(frame).resize((width, height), Image.Resampling.BILINEAR)
        ),
    }


def ours(frame: np.ndarray, recipe: ImageRecipe) -> dict[str, Callable[[], np.ndarray]]:
    def by(kernels: compiled.FrameKernels | None) -> np.ndarray:
        compiled.install(kernels)
        return prepare_frame(frame, recipe)

    if not np.array_equal(by(None), by(extension().frames)):
        raise SystemExit("the compiled resize differs from numpy's")
    return {"sinew": lambda: by(None), "sinew, compiled": lambda: by(extension().frames)}


CASES: tuple[tuple[int, int, str], ...] = (
    (240, 224, "bilinear"),
    (480, 224, "bilinear"),
    (480, 512, "bilinear"),
    *((480, 224, method) for method in ("pil_bilinear", *get_args(Method))),
)


def ways(height: int, side: int, method: str) -> dict[str, Callable[[], object]]:
    frame = np.random.default_rng(0).integers(0, 256, (height, height * 4 // 3, 3), np.uint8)
    if method in get_args(Method):
        return ours(frame, ImageRecipe(side, side, (Resize(side, side, method),)))
    box = Letterbox(side, side, method, "center" if method == "pil_bilinear" else "top_left")
    return contestants(frame, ImageRecipe(side, side, (box,)))


def alone(case: int, name: str, rounds: int) -> float:
    """Return the median milliseconds of one implementation, in a process that runs no other implementation."""
    command = [sys.executable, "-m", "benchmarks.resize", str(rounds), str(case), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def medians(runs: Iterable[Callable[[], object]], rounds: int) -> list[float]:
    times = []
    for run in runs:
        found = []
        for _ in range(rounds + 3):
            start = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - start))
        times.append(float(np.median(found[3:])))
    return times


def main(rounds: int = 100, case: int | None = None, name: str = "") -> None:
    torch.set_num_threads(1)
    if case is not None:
        print(*medians([ways(*CASES[case])[name]], rounds))
        return
    for number, (height, side, method) in enumerate(CASES):
        runs = ways(height, side, method)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds + 3):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                times[name].append(1e3 * (time.perf_counter() - start))
        print(f"{height} x {height * 4 // 3} -> {side} x {side}, {method}")
        ours = np.array(times["sinew"][3:])
        for name, all_of in times.items():
            theirs = np.array(all_of[3:])
            ratio = f"ours / it {np.median(ours / theirs):5.2f}"
            own = f"alone {alone(number, name, rounds):7.3f} ms"
            print(f"  {name:20s} {np.median(theirs):7.3f} ms   {ratio}   {own}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *sys.argv[3:4])
