"""Make safetensors files from rules, so that a golden case does not have to store random weights.

A rule file is JSON with these fields:

* ``metadata``: The metadata of the safetensors file.
* ``seed``: The seed of all tensors.
* ``tensors``: For each tensor its ``dtype``, ``shape``, ``rule`` and the parameters of the rule.
* ``taken``: Files whose tensors this file shares. ``file`` is a file of another case, relative to the fixtures. By
  default all of its tensors are taken, except those in ``except``, and ``prefix`` is put before their names. With
  ``names`` (name in this file -> name in the other file), only these tensors are taken. Instead of ``file``,
  ``bundle`` names a bundle of the package that was converted from this safetensors file; it needs ``names``.
* ``sha256``: The SHA-256 of the resulting file.

Numpy draws the values in float64 and rounds them once at the end. The draws need no mathematical library, so the
bytes are the same on all machines. If they are not, the SHA-256 shows this.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from sinew.bundle import GGUFFile
from sinew.families.smolvla.golden.frames import grey_frame, wave, with_noise

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"F32": "<f4", "I64": "<i8", "U8": "|u1", "BOOL": "|b1"}
PARTS = 4  # a normal value is the sum of four uniform parts of a word, with 16 bits each
MEAN = PARTS * 0xFFFF / 2
# Standard deviation of the sum. Each part has the variance (2**32 - 1) / 12.
STD = math.sqrt((2.0**32 - 1) / 3)

Tensor = tuple[str, list[int], bytes]  # dtype in the notation of safetensors, shape, data
Rule = Callable[[int, str, dict[str, Any]], np.ndarray]


def words(seed: int, name: str, count: int) -> np.ndarray:
    """Return ``count`` random words of 64 bits for a tensor.

    The key of the generator (Philox) is a hash of the seed and the tensor's name. So the values of a tensor do not
    depend on other tensors.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key).random_raw(count)


def size(spec: dict[str, Any]) -> int:
    return math.prod(spec["shape"])


def normal(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Draw nearly normal values with the mean ``mean`` (default 0) and the standard deviation ``std``.

    All values are within 3.47 standard deviations of the mean.
    """
    drawn = words(seed, name, size(spec)).astype("<u8").view("<u2").reshape(-1, PARTS).sum(1, dtype=np.int64)
    return spec.get("mean", 0.0) + spec["std"] * ((drawn - MEAN) / STD)


def uniform(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Draw values from ``low`` to ``high``, in steps of 2**-53 of this range."""
    drawn = (words(seed, name, size(spec)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return spec["low"] + (spec["high"] - spec["low"]) * drawn


def constant(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    return np.full(size(spec), spec["value"])


def grid(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return the coordinates of the cells for a spatial softmax, [h * w, 2]: x and y, each from -1 to 1."""
    x, y = np.meshgrid(np.linspace(-1.0, 1.0, spec["w"]), np.linspace(-1.0, 1.0, spec["h"]))
    return np.stack([x.ravel(), y.ravel()], 1)


def sinusoid(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return the position embedding of ACT's VAE encoder, [..., positions, width].

    Inference does not use this tensor.
    """
    count, width = spec["shape"][-2:]
    angles = np.array(
        [[at / np.power(10000, 2 * (j // 2) / width) for j in range(width)] for at in range(count)]
    )
    return waves(angles[:, 0::2], angles[:, 1::2])


def cosine(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return the position embedding of Florence-2 for the time axis, [positions, width].

    X-VLA uses only the first position, which is exactly 0, 1, 0, 1, ... OmniVLA-edge has the same embedding. There,
    numpy's sines differ from the original by at most two units in the last place.
    """
    count, width = spec["shape"][-2:]
    angles = np.arange(count)[:, None] * np.exp(np.arange(width // 2) * -(math.log(10000) / (width // 2)))
    return waves(angles, angles)


def sinusoid_32(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return Evo-1's embedding of times, [1, positions, width], with the same bits as the original.

    torch computed the original in float32. ``frequencies`` are the frequencies of the original. At the indices
    ``above`` and ``below``, the original is the next higher or next lower float of the rounded sine. Each index is
    stored as the distance from the previous index.
    """
    positions = np.arange(spec["shape"][-2], dtype=np.float32)[:, None]
    angles = (positions * np.array(spec["frequencies"], np.float32)).astype(np.float64)
    found = waves(angles, angles).astype(np.float32).ravel()
    for beside, towards in (("above", 2), ("below", -2)):
        at = np.cumsum(spec[beside], dtype=np.int64)
        found[at] = np.nextafter(found[at], np.float32(towards))
    return found


def waves(sines: np.ndarray, cosines: np.ndarray) -> np.ndarray:
    return np.stack([np.sin(sines), np.cos(cosines)], -1).reshape(len(sines), -1)


def grey(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return the frame of ``camera`` in a case of SmolVLA or pi (sinew/families/smolvla/golden/frames.py)."""
    return grey_frame(spec["camera"], seed, spec["skip"], spec["word"])


def coloured(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return the frame of ``camera`` (0 or 1) in a case of GR00T or Evo-1, [height, width, 3].

    Each colour channel is a wave with noise.
    """
    (height, width, colours), camera = spec["shape"], spec["camera"]
    red = wave(height, width, 90, 17 + 6 * camera, 23 - 3 * camera)
    picture = np.stack([red, 0.8 * np.roll(red, 31, 0) + 20, 0.6 * np.roll(red, 47, 1) + 40], -1)
    return with_noise(picture, seed, spec["skip"] + camera * height * width * colours, 32)


def tril(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return VQ-BeT's causal mask, [1, 1, N, N]: ones on and below the diagonal."""
    return np.tril(np.ones(spec["shape"][-2:]))


def windows(seed: int, name: str, spec: dict[str, Any]) -> np.ndarray:
    """Return VQ-BeT's indices of the actions of each step, [N, chunk].

    Inference does not use this tensor.
    """
    count, width = spec["shape"]
    return np.arange(count)[:, None] + np.arange(width)[None]


RULES: dict[str, Rule] = {
    "normal": normal,
    "uniform": uniform,
    "constant": constant,
    "pos_grid": grid,
    "sinusoid": sinusoid,
    "cosine_1d": cosine,
    "sinusoid_32": sinusoid_32,
    "grey_frame": grey,
    "coloured_frame": coloured,
    "tril": tril,
    "windows": windows,
}


def draw(seed: int, name: str, spec: dict[str, Any]) -> Tensor:
    """Return a tensor by the rule with the name ``spec["rule"]``."""
    if spec["rule"] not in RULES:
        raise ValueError(f"{name}: expected one of the rules {', '.join(RULES)}, got {spec['rule']!r}")
    values = np.asarray(RULES[spec["rule"]](seed, name, spec))
    if values.size != size(spec):
        raise ValueError(f"{name}: expected {size(spec)} values for {spec['shape']}, got {values.size}")
    return spec["dtype"], spec["shape"], values.astype(DTYPES[spec["dtype"]]).tobytes()


def read(data: bytes) -> tuple[dict[str, Tensor], dict[str, str] | None]:
    """Return the tensors of a safetensors file in their order in the file, and the metadata of the file."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata, body = header.pop("__metadata__", None), memoryview(data)[8 + length :]
    found = {name: (t["dtype"], t["shape"], slice(*t["data_offsets"])) for name, t in header.items()}
    in_order = sorted(found.items(), key=lambda entry: entry[1][2].start)
    return {name: (dtype, shape, bytes(body[at])) for name, (dtype, shape, at) in in_order}, metadata


def from_bundle(path: Path, names: dict[str, str]) -> dict[str, Tensor]:
    """Return tensors of a bundle in float32, which represents all values of bfloat16 exactly.

    Args:
        path: The bundle.
        names: For each name in the result, the name in the bundle.
    """
    file, data = GGUFFile(path), path.read_bytes()
    found: dict[str, Tensor] = {}
    for here, there in names.items():
        info = file.tensors[there]
        stored = data[info.offset : info.offset + info.nbytes]
        if info.type is GGMLQuantizationType.BF16:
            stored = (np.frombuffer(stored, "<u2").astype("<u4") << 16).tobytes()
        elif info.type is not GGMLQuantizationType.F32:
            raise ValueError(f"{path}: {there}: expected F32 or BF16, got {info.type.name}")
        found[here] = ("F32", list(info.shape), stored)
    return found


def write(tensors: dict[str, Tensor], metadata: dict[str, str] | None) -> bytes:
    """Return a safetensors file, as bytes, with the tensors in their given order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(data for _, _, data in tensors.values())])


def build(rules: dict[str, Any], stored: bytes | None, other: Callable[[str], bytes]) -> bytes:
    """Return the safetensors file of a rule file: first the stored tensors, then the other tensors, sorted by name.

    Args:
        rules: The rule file.
        stored: A safetensors file with the tensors that have no rule. None: all tensors have one.
        other: Returns the unpacked bytes of another case's file.

    Raises:
        ValueError: A tensor is given twice, or the result has another SHA-256 than the rule file states.
    """
    tensors, metadata = ({}, None) if stored is None else read(stored)
    made = {name: draw(rules["seed"], name, spec) for name, spec in rules.get("tensors", {}).items()}
    for share in rules.get("taken", []):
        if "bundle" in share:
            with tempfile.NamedTemporaryFile() as bundle:
                bundle.write(lzma.decompress((ROOT / f"{share['bundle']}.xz").read_bytes()))
                bundle.flush()
                made |= from_bundle(Path(bundle.name), share["names"])
            continue
        there = read(other(share["file"]))[0]
        if "names" in share:
            made |= {here: there[name] for here, name in share["names"].items()}
            continue
        for name, tensor in there.items():
            if name not in share.get("except", ()):
                made[share.get("prefix", "") + name] = tensor
    if twice := tensors.keys() & made.keys():
        raise ValueError(
            f"expected each tensor once, got both a stored tensor and a rule for {', '.join(sorted(twice))}"
        )
    data = write({**tensors, **dict(sorted(made.items()))}, rules.get("metadata", metadata))
    found = hashlib.sha256(data).hexdigest()
    if found != rules["sha256"]:
        raise ValueError(f"expected a file with SHA-256 {rules['sha256']}, got {found}")
    return data
