"""Where the tensors lie in a safetensors file, so that they can be copied without being loaded.

The ``safetensors`` package hands out tensors, not byte ranges; a converter that streams needs the ranges.
The format is a length, a JSON header and the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

from gguf import GGMLQuantizationType

from sinew.bundle.writer import FileSlice, TensorSource
from sinew.core import ConvertError

MAX_HEADER_BYTES = 100 << 20  # the reference implementation's own limit
STORAGE = {
    "F32": (GGMLQuantizationType.F32, 4),
    "F16": (GGMLQuantizationType.F16, 2),
    "BF16": (GGMLQuantizationType.BF16, 2),
}


def read_safetensors(path: Path) -> dict[str, TensorSource]:
    """Tensors of one file under their own names, in file order. Raises :class:`ConvertError`."""
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else MAX_HEADER_BYTES + 1
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ConvertError(f"{path}: not a safetensors file, or truncated")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"][0])
            return {name: _source(path, name, entry, 8 + length, size) for name, entry in entries}
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ConvertError(f"{path}: the safetensors header is damaged ({error!r})") from None


def find_weights(directory: Path) -> list[Path]:
    """The weight files of a checkpoint directory: one, or the shards that its index lists."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if names and all(Path(name).name == name for name in names):
                return [directory / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        raise ConvertError(f"{index}: expected a weight_map of file names in the same directory")
    if (directory / "adapter_model.safetensors").exists():
        raise ConvertError(
            f"{directory} holds a LoRA adapter only; merge it into its base model first"
            " (PEFT's merge_and_unload, then save_pretrained)"
        )
    raise ConvertError(f"{directory}: no model.safetensors here")


def _source(path: Path, name: str, entry: dict, start: int, size: int) -> TensorSource:
    if entry["dtype"] not in STORAGE:
        raise ConvertError(
            f"{path}: tensor {name!r} has dtype {entry['dtype']}, expected one of {list(STORAGE)}"
        )
    kind, itemsize = STORAGE[entry["dtype"]]
    shape = tuple(int(n) for n in entry["shape"])
    begin, end = entry["data_offsets"]
    nbytes = itemsize
    for n in shape:
        nbytes *= n
    if begin < 0 or end - begin != nbytes or start + end > size:
        raise ConvertError(f"{path}: tensor {name!r} does not fit the file (is it truncated?)")
    return TensorSource(name, shape, kind, nbytes, FileSlice(path, start + begin, nbytes))


def read_array(source: TensorSource):
    """The values of a small tensor as float32 (statistics, never weights)."""
    import numpy as np

    raw = b"".join(bytes(block) for block in source.data.blocks())
    if source.type is GGMLQuantizationType.F32:
        array = np.frombuffer(raw, "<f4")
    elif source.type is GGMLQuantizationType.F16:
        array = np.frombuffer(raw, "<f2").astype(np.float32)
    else:  # bfloat16 is the upper half of float32
        array = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return array.reshape(source.shape)
