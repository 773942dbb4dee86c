"""Find the positions of tensors in safetensors files, so that the tensors can be copied without loading them.

The ``safetensors`` package checks the header. Tensors follow each other in the order of their offsets, because the
format allows no holes. So the positions of the tensors follow from their sizes.
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
    **{
        kind: GGMLQuantizationType[kind] for kind in ("F64", "I8", "I16", "I32", "I64")
    },  # the types of buffers, which are dropped
    "BOOL": GGMLQuantizationType.I8,  # a byte per value; a type of buffers too
}

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Pattern of names that a wrapper around the saved model leaves -> the explanation in the error
WRAPPED = {
    r"\.(lora_[AaBb]|base_layer)\.": "a LoRA adapter that is not merged: save what its `merge_and_unload()` returns",
    r"^module\.|_orig_mod\.": "saved with DistributedDataParallel or torch.compile around it: save what is inside",
}
# Pattern of a file that may exist in place of a file of weights -> how to make the file of weights from it
INSTEAD = {
    "model-*.safetensors": "model.safetensors.index.json lists the tensors of each file; copy it into the same folder",
    "pytorch_model_fsdp*": '`accelerate merge-weights "{0}" "{1}"` makes it',
    "zero_to_fp32.py": '`python "{0}" "{1}" "{1}" --safe_serialization` makes it',
    "*model*.bin": "`safetensors.torch.save_file` makes it of `torch.load({0!r}, weights_only=True)`",
    "[!aop]*.safetensors": "rename it where these are the weights",  # no adapter, optimiser or processor
}
# The beginnings of names of files with the weights of a whole model
WHOLE = ("model.safetensors", "model-", "pytorch_model", "mp_rank", "consolidated", "params")


def read_safetensors(path: Path) -> dict[str, TensorSource]:
    """Return the tensors of one file by their names, in file order. Raises :class:`ConvertError`."""
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
        raise ConvertError(f"{path}: not a safetensors file, or damaged ({error})") from None
    if offset != size:
        raise ConvertError(f"{path}: tensors end at byte {offset}, the file at {size} (is it truncated?)")
    return tensors


def read_weights(directory: Path) -> tuple[dict[str, TensorSource], list[Path]]:
    """Return the tensors of a checkpoint directory and the files that hold them.

    If there is an index, every tensor must be in the shard that the index names, and the shards may have no other
    tensors. Raises :class:`ConvertError`.
    """
    files = find_weights(directory)
    index = directory / "model.safetensors.index.json"
    single = files == [directory / "model.safetensors"]
    expected = {} if single else read_json(index)["weight_map"]
    tensors: dict[str, TensorSource] = {}
    for file in files:
        for name, source in read_safetensors(file).items():
            if not single and expected.get(name) != file.name:
                where = f"in {expected[name]}" if name in expected else "nowhere"
                raise ConvertError(f"{file}: holds {name!r}, which {index.name} puts {where}")
            if how := next((said for pattern, said in WRAPPED.items() if re.search(pattern, name)), None):
                raise ConvertError(f"{file}: expected weights of the policy alone, got {name!r}, {how}")
            tensors[name] = source
    if missing := [name for name in expected if name not in tensors]:
        raise ConvertError(
            f"{directory / expected[missing[0]]}: {index.name} puts {missing[0]!r} here, and it is not there"
            + _more(missing[1:])
        )
    return tensors, files


def _more(left: Sequence[str]) -> str:
    return f" (and {len(left)} more)" if left else ""


def find_weights(directory: Path) -> list[Path]:
    """Return the weight files of a checkpoint directory: a single file, or the shards that its index lists."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        table = read_json(index).get("weight_map")
        names = list(table.values()) if isinstance(table, dict) else []
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ConvertError(f"{index}: expected a weight_map of file names in the same directory")
        names = sorted(set(names))
        if missing := [name for name in names if not (directory / name).exists()]:
            raise ConvertError(
                f"{index}: names {', '.join(missing[:3])}{_more(missing[3:])}, which the folder lacks;"
                " copy the missing files into it"
            )
        return [directory / name for name in names]
    refuse_adapter(directory)
    raise absent(single)


def absent(file: Path) -> ConvertError:
    """Return the error for a missing file of weights. It names a file that exists instead, and how to convert that
    file."""
    for pattern, how in INSTEAD.items():
        for other in sorted(file.parent.glob(pattern)):
            conversion = how.format(str(other), file.parent)
            return ConvertError(f"{file.parent}: no {file.name} here but {other.name}: {conversion}")
    return ConvertError(f"{file.parent}: no {file.name} here")


def is_adapter(directory: Path) -> bool:
    """Return True if a folder holds an adapter without the model that the adapter changes.

    Raises :class:`ConvertError` for a folder that holds both: a wrong guess at which of them the user means would
    change every action."""
    there = sorted(path.name for path in directory.iterdir())
    whole = next((name for name in there if name.startswith(WHOLE)), None)
    if whole and ADAPTER_WEIGHTS in there:
        raise ConvertError(
            f"{directory}: expected a model or an adapter, got {whole} and {ADAPTER_WEIGHTS}: move the adapter away if"
            " it is merged into the model, else the model into a folder of its own, and give that with --base"
        )
    return whole is None and not {ADAPTER_CONFIG, ADAPTER_WEIGHTS}.isdisjoint(there)


def refuse_adapter(directory: Path) -> None:
    """Raise :class:`ConvertError` for a folder that holds a LoRA adapter without the model that the adapter changes.

    This check runs before all others, because errors about other missing files would not help the user.
    """
    if is_adapter(directory):
        raise adapter_alone(directory)


def adapter_alone(directory: Path) -> ConvertError:
    """Return the error for a folder with only an adapter, with the commands that merge it."""
    config = directory / ADAPTER_CONFIG
    base = (read_json(config) if config.is_file() else {}).get("base_model_name_or_path")
    own = directory / "config.json"
    kind = (read_json(own) if own.is_file() else {}).get("type")
    policy = kind if isinstance(kind, str) else "TYPE"
    return ConvertError(
        f"{directory} holds a LoRA adapter only; merge it where LeRobot is:"
        f" `base = lerobot.policies.factory.get_policy_class({policy!r}).from_pretrained("
        f"{base if isinstance(base, str) and base else 'BASE'!r})`, then"
        f" `peft.PeftModel.from_pretrained(base, {str(directory)!r}).merge_and_unload().save_pretrained('merged')`,"
        " copy the processors' files beside it and give that folder (of another library: the base's own class)."
        " Or give the model that it changes with `--base FOLDER`, where the family takes one"
    )


def _source(path: Path, name: str, dtype: str, shape: list[int], offset: int) -> TensorSource:
    if dtype not in STORAGE:
        raise ConvertError(f"{path}: tensor {name!r} has dtype {dtype}, expected one of {list(STORAGE)}")
    kind = STORAGE[dtype]
    nbytes = math.prod(shape) * ELEMENTS[kind].itemsize
    return TensorSource(name, tuple(shape), kind, nbytes, FileSlice(path, offset, nbytes))
