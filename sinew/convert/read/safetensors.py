"""Find the positions of tensors in safetensors files, so that the tensors can be copied without loading them.

The ``safetensors`` package checks the header. The format allows no gaps between tensors, so the tensors follow each
other in the order of their offsets, and their positions follow from their sizes.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from gguf import GGMLQuantizationType
from safetensors import SafetensorError, safe_open
from sinew_client.untrusted import open_regular

from sinew.bundle.writer import FileSlice, TensorSource
from sinew.convert.read.elements import BF16, ELEMENTS, F16, F32
from sinew.convert.read.files import read_json
from sinew.core import ConvertError

STORAGE = {
    "F32": F32,
    "F16": F16,
    "BF16": BF16,
    # Checkpoints use the following types only for buffers (constants), which the conversion drops.
    **{kind: GGMLQuantizationType[kind] for kind in ("F64", "I8", "I16", "I32", "I64")},
    "BOOL": GGMLQuantizationType.I8,  # safetensors stores a boolean as one byte
}

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Key: pattern of tensor names that occur if a wrapper (such as torch.compile) was saved with the model. Value: the
# explanation for the error message.
LORA = r"\.(lora_[AaBb]|base_layer)\."
WRAPPED = {
    LORA: "a LoRA adapter that is not merged: save the result of its `merge_and_unload()`",
    r"^module\.|_orig_mod\.": "saved with DistributedDataParallel or torch.compile around it: save the inner model",
}
# Key: pattern of files that a folder may contain instead of safetensors weights. Value: a text that states how to get
# the weights.
INSTEAD = {
    "model-*.safetensors": "model.safetensors.index.json lists the tensors of each file; copy it into the same folder",
    "pytorch_model_fsdp*": 'to make it, run `accelerate merge-weights "{0}" "{1}"`',
    "zero_to_fp32.py": 'to make it, run `python "{0}" "{1}" "{1}" --safe_serialization`',
    "*model*.bin": "to make it, save `torch.load({0!r}, weights_only=True)` with `safetensors.torch.save_file`",
    # This pattern excludes adapters, optimizers and processors, whose names begin with a, o or p.
    "[!aop]*.safetensors": "rename this file if it contains the weights",
}
# The name of a file with the weights of a whole model begins with one of these texts.
WHOLE = ("model.safetensors", "model-", "pytorch_model", "mp_rank", "consolidated", "params")


def read_safetensors(path: Path) -> dict[str, TensorSource]:
    """Return the tensors of one file by their names, in file order.

    Raises:
        ConvertError: The file is not a valid safetensors file.
    """
    tensors: dict[str, TensorSource] = {}
    try:
        with open_regular(path) as plain:
            size = os.fstat(plain.fileno()).st_size
            head = plain.read(8)
        with safe_open(path, framework="numpy") as file:
            offset = 8 + struct.unpack("<Q", head)[0]
            for name in file.offset_keys():
                entry = file.get_slice(name)
                source = _source(path, name, entry.get_dtype(), entry.get_shape(), offset)
                offset += source.nbytes
                tensors[name] = source
    except OSError as error:
        raise ConvertError(f"{path}: {error.strerror or error}") if path.exists() else absent(path) from None
    except (SafetensorError, struct.error, ValueError) as error:
        raise ConvertError(
            f"{path}: not a safetensors file, or damaged ({error}); copy or download it again"
        ) from None
    if offset != size:
        raise ConvertError(
            f"{path}: tensors end at byte {offset}, the file at {size} (is it truncated?); copy or download it again"
        )
    return tensors


def read_weights(directory: Path, lora: bool = False) -> tuple[dict[str, TensorSource], list[Path]]:
    """Return the tensors of a checkpoint directory and the files that contain them.

    If the weights are split into several files, an index lists the file of every tensor. It must list exactly the
    tensors in the files.

    Args:
        directory: The checkpoint directory.
        lora: True if the caller merges LoRA adapters that are among the weights.

    Raises:
        ConvertError: A file is missing or not valid, or the index differs from the files.
    """
    files = find_weights(directory)
    index = directory / "model.safetensors.index.json"
    single = files == [directory / "model.safetensors"]
    expected = {} if single else read_json(index)["weight_map"]
    tensors: dict[str, TensorSource] = {}
    wrapped = {pattern: hint for pattern, hint in WRAPPED.items() if not (lora and pattern == LORA)}
    for file in files:
        for name, source in read_safetensors(file).items():
            if not single and expected.get(name) != file.name:
                where = f"in {expected[name]}" if name in expected else "nowhere"
                raise ConvertError(
                    f"{file}: contains {name!r}, which {index.name} lists {where}; copy the index and all weights from"
                    " one checkpoint"
                )
            if how := next((hint for pattern, hint in wrapped.items() if re.search(pattern, name)), None):
                raise ConvertError(f"{file}: expected weights of the policy alone, got {name!r}, {how}")
            tensors[name] = source
    if missing := [name for name in expected if name not in tensors]:
        raise ConvertError(
            f"{directory / expected[missing[0]]}: {index.name} lists {missing[0]!r} in this file, which does not"
            f" contain it{_more(missing[1:])}; copy the index and all weights from one checkpoint"
        )
    return tensors, files


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names)} more)" if names else ""


def find_weights(directory: Path) -> list[Path]:
    """Return the weight files of a checkpoint directory: a single file, or the shards that its index lists."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        table = read_json(index).get("weight_map")
        names = list(table.values()) if isinstance(table, dict) else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ConvertError(
                f"{index}: weight_map: expected a table of tensor -> name of a file in the same directory"
            )
        names = sorted(set(names))
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ConvertError(
                f"{index}: names {', '.join(missing[:3])}{_more(missing[3:])}, which the folder does not contain;"
                " copy the missing files into it"
            )
        return [directory / name for name in names]
    refuse_adapter(directory)
    raise absent(single)


def absent(file: Path) -> ConvertError:
    """Return the error for a missing file of weights. If another file can replace it, the error names that file and
    explains how to convert it."""
    for pattern, how in INSTEAD.items():
        for other in sorted(file.parent.glob(pattern)):
            conversion = how.format(str(other), file.parent)
            return ConvertError(
                f"{file.parent}: {file.name} is missing, but {other.name} exists: {conversion}"
            )
    return ConvertError(f"{file.parent}: {file.name} is missing; pass the folder that contains this file")


def is_adapter(directory: Path) -> bool:
    """Return True if a folder contains an adapter without the model that the adapter changes.

    Raises:
        ConvertError: The folder contains a model and an adapter. Using the wrong one would change every action.
    """
    there = sorted(path.name for path in directory.iterdir())
    whole = next((name for name in there if name.startswith(WHOLE)), None)
    if whole and ADAPTER_WEIGHTS in there:
        raise ConvertError(
            f"{directory}: expected a model or an adapter, got {whole} and {ADAPTER_WEIGHTS}. If the adapter is merged"
            " into the model, move the adapter out of this folder. Otherwise move the model into a folder of its own,"
            " and pass that folder with --base"
        )
    return whole is None and not {ADAPTER_CONFIG, ADAPTER_WEIGHTS}.isdisjoint(there)


def refuse_adapter(directory: Path) -> None:
    """Raise :class:`ConvertError` for a folder with a LoRA adapter but without the model that the adapter changes.

    This check runs before all others, because errors about other missing files would not help the user.
    """
    if is_adapter(directory):
        raise adapter_alone(directory)


def adapter_alone(directory: Path) -> ConvertError:
    """Return the error for a folder that contains only an adapter. Its message has the commands that merge the
    adapter into its base."""
    config = directory / ADAPTER_CONFIG
    base = (read_json(config) if config.is_file() else {}).get("base_model_name_or_path")
    own = directory / "config.json"
    kind = (read_json(own) if own.is_file() else {}).get("type")
    policy = kind if isinstance(kind, str) else "TYPE"
    return ConvertError(
        f"{directory} contains a LoRA adapter only. To merge it in Python, in an environment with LeRobot:"
        f" `base = lerobot.policies.factory.get_policy_class({policy!r}).from_pretrained("
        f"{base if isinstance(base, str) and base else 'BASE'!r})`, then"
        f" `peft.PeftModel.from_pretrained(base, {str(directory)!r}).merge_and_unload().save_pretrained('merged')`,"
        " copy the processors' files into the folder `merged`, and convert that folder (if another library trained the"
        " adapter, load the base with that library). Or pass the adapter's base model with `--base FOLDER`, if the"
        " family supports it"
    )


def _source(path: Path, name: str, dtype: str, shape: list[int], offset: int) -> TensorSource:
    if dtype not in STORAGE:
        raise ConvertError(f"{path}: tensor {name!r} has dtype {dtype}, expected one of {list(STORAGE)}")
    kind = STORAGE[dtype]
    nbytes = math.prod(shape) * ELEMENTS[kind].itemsize
    return TensorSource(name, tuple(shape), kind, nbytes, FileSlice(path, offset, nbytes))
