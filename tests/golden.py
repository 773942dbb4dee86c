"""Read the golden fixtures."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

from sinew.models.solvers import FLOW, solve

# rule for the eager float32 engine against the reference: 1 - cosine, and the largest difference
COSINE_GAP, MAX_ABS = 1e-7, 1e-4
WEBP = b"RIFF"


def decoded(file: np.ndarray) -> np.ndarray:
    """Decode a PNG or WebP file, in which the fixtures store frames to save space. Returns uint8 [height, width, 3]."""
    return np.array(Image.open(io.BytesIO(file.tobytes())))


class Golden:
    """One ``fixture.safetensors``: tensors by name, frames as uint8 [H, W, 3], and the facts in its metadata."""

    def __init__(self, directory: Path):
        with safe_open(directory / "fixture.safetensors", framework="pt") as file:
            self.tensors = {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 - the file is not a dict, and has no iterator
            }
            self.metadata = file.metadata()
        for name, tensor in self.tensors.items():
            if tensor.dtype == torch.uint8 and tensor.ndim == 1 and bytes(tensor[:4].tolist()) == WEBP:
                self.tensors[name] = torch.from_numpy(decoded(tensor.numpy()))
        self.cameras = json.loads(self.metadata["cameras"])

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def numpy(self, name: str) -> np.ndarray:
        return self.tensors[name].numpy()

    def observation(self) -> dict:
        return {
            "images": {c.removeprefix("observation.images."): self.numpy(f"frame.{c}") for c in self.cameras},
            "state": self.numpy("state_raw"),
            "prompt": self.metadata["task"],
            **({"noise": self.numpy("noise")[0]} if "noise" in self.tensors else {}),
        }


def integrate(velocity, noise: torch.Tensor, steps: int) -> torch.Tensor:
    """Integrate with Euler's method from time 1 to 0, without an engine. velocity: function of x [B, H, A] and t
    [B]."""
    times = [torch.full((len(noise),), time, device=noise.device) for time in FLOW.times(steps)]
    return solve(velocity, noise, FLOW.steps(steps), times)


def cosine_gap(a: torch.Tensor | np.ndarray, b: torch.Tensor | np.ndarray) -> float:
    a, b = (torch.as_tensor(x).double().flatten() for x in (a, b))
    return 1.0 - float(torch.dot(a, b) / (a.norm() * b.norm()))


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_parity(ours: np.ndarray | torch.Tensor, reference: np.ndarray | torch.Tensor) -> None:
    ours, reference = torch.as_tensor(ours), torch.as_tensor(reference)
    assert ours.shape == reference.shape
    assert float((ours - reference).abs().max()) <= MAX_ABS
    assert cosine_gap(ours, reference) <= COSINE_GAP
