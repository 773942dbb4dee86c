"""Export a bundle as vla.cpp's GGUF file.

The module supports the families whose file contains the whole policy: SmolVLA, pi0, pi0.5, OpenVLA-OFT, VLA-Adapter,
BitVLA and Evo-1. The file contains weights, sizes and statistics. vla.cpp's client processes the images and builds the
prompt with its own tokenizer. Before the file is published, Sinew's importer reads it back. If the result is another
policy, the export fails. ``REFUSED`` lists families that cannot be exported, with the reasons.
Source: vla.cpp ``scripts/convert_{smolvla,pi0,pi05}_to_gguf.py`` (commit b18873d), and the keys that ``src/models``
reads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

from sinew.bundle import Bundle
from sinew.bundle.schema import Manifest
from sinew.bundle.writer import FileSlice, Progress, TensorSource, finish_header
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.tensors import computed, constant, rounded
from sinew.core import ConvertError, scratch
from sinew.core.fields import from_builtins
from sinew.vlacpp import write_bitvla, write_evo1, write_prismatic
from sinew.vlacpp.read import read
from sinew.vlacpp.read_lerobot import (
    LEAVES,
    PARTS,
    PROJECTOR,
    PROJECTOR_FACTOR,
    STATISTICS,
    WHOLE,
    bundle_name,
    projector_factor,
)

logger = logging.getLogger(__name__)

_MODULES = (write_prismatic, write_bitvla, write_evo1)
FAMILIES = {name: module for module in _MODULES for name in module.ARCHITECTURES}
ARCHITECTURES = ("smolvla", "pi0", "pi05", *FAMILIES)
_EMBODIMENTS = "its file contains the weights of all embodiments, and a bundle contains one embodiment only"
REFUSED = {
    "gr00t_n1_5": _EMBODIMENTS,
    "gr00t_n1_6": _EMBODIMENTS,
    "gr00t_n1_7": _EMBODIMENTS,
    "vla_jepa": "its file cannot contain statistics, and without statistics the actions have no units",
    "openvla": "vla.cpp has no such architecture",
}
ALIGNMENT = 32  # GGUF's default alignment of tensors, in bytes
TOKENS = "token_embd.weight"  # src/models/smolvla.cpp always reads this tensor as bfloat16
STORED = (GGMLQuantizationType.F32, GGMLQuantizationType.BF16)
_LETTERS = {ours: theirs for theirs, ours in PARTS.items()}
_WHOLE = {ours: theirs for theirs, ours in WHOLE.items()}
# Sinew has one name for layers that vla.cpp names differently in the vision tower and in the decoder.
_TOWER = {"norm": "post_ln", "attn.o_proj": "attn_o"}
_DECODER = {"norm": "output_norm", "post_norm": "ffn_norm", "input_norm": "attn_norm"}
# Fields of a manifest that the comparison ignores, because a client chooses their values or because they do not affect
# the actions.
_FREE = {"compat", "name", "cameras", "keys", "embodiment", "control_hz", "n_action_steps", "names", "units"}
_FREE |= {
    "pad_token_id",
    "padding",
    "resizes_frames",
    "default_prompt",
    "empty_cameras",
    "pad_missing_cameras",
    "motion",
}


def export_vlacpp(
    bundle: Bundle, out: Path, progress: Progress | None = None, before_0_4: bool = False
) -> None:
    """Write a bundle as a file of vla.cpp. The file appears only when it is complete.

    Args:
        bundle: The bundle.
        out: The new file.
        progress: Called with the number of bytes that were just written.
        before_0_4: Write a pi0 for vla.cpp before 0.4.0, whose engine divides image tokens by the root of their
            width.

    Raises:
        ConvertError: vla.cpp's file format does not support the family, the precision or the recipe. A pi0 without
            ``before_0_4`` is rejected too: 0.4.0 no longer divides, and ignores the key with the factor.
    """
    manifest = bundle.manifest
    if manifest.architecture == "pi0" and not before_0_4:
        raise ConvertError(
            f"{bundle.path}: expected a policy other than pi0, got one: vla.cpp 0.4.0 reads the image tokens of a pi0"
            " unscaled, and the file that Sinew writes has them scaled for vla.cpp 0.3, so every action would be wrong."
            " Serve the bundle with `sinew serve`, or export a SmolVLA or pi0.5"
        )
    if manifest.architecture not in ARCHITECTURES:
        why = REFUSED.get(manifest.architecture)
        raise ConvertError(
            f"{bundle.path}: architecture {manifest.architecture!r}: expected one of {', '.join(ARCHITECTURES)}, which"
            f" vla.cpp's files support{f'; {why}' if why else ''}. Serve the bundle with `sinew serve` instead"
        )
    if out.exists():
        raise ConvertError(f"{out}: the file already exists; choose a new one")
    family = FAMILIES.get(manifest.architecture)
    if family is not None:
        tensors, keys = _of_family(family, bundle), family.keys(bundle)
    else:
        tensors, keys = [*_weights(bundle), *_statistics(manifest)], _keys(manifest)
        if manifest.architecture == "smolvla" and GGMLQuantizationType.F32 in (
            info.type for name, info in bundle.infos.items() if _WHOLE.get(name) == TOKENS
        ):
            logger.warning(
                "%s is rounded to bfloat16, because vla.cpp reads this tensor of SmolVLA as bfloat16 only",
                TOKENS,
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    with scratch.beside(out) as folder:
        partial, tokenizer = folder / "vla.gguf", folder / "tokenizer.json"
        _write(partial, manifest.architecture, keys, tensors, progress)
        tokenizer.write_text(manifest.tokenizer, encoding="utf-8")
        names = tuple(camera.name for camera in manifest.spec.cameras)
        paths = family.beside(bundle, folder) if family else {}
        conversion = read(partial, ConvertOptions(tokenizer=tokenizer, cameras=names, **paths))
        _compare(manifest, conversion, bundle.path)
        os.replace(partial, out)


def _of_family(family: ModuleType, bundle: Bundle) -> list[TensorSource]:
    """Return the tensors of a family that has its own module.

    Raises:
        ConvertError: vla.cpp has no name for a tensor.
    """
    stored = {source.name: source for source in _stored(bundle, family.PACKED)}
    tensors = family.renamed(bundle, dict(stored))
    if unnamed := [name for name in tensors if name in stored and name != "action_queries.weight"]:
        raise ConvertError(
            f"{bundle.path}: tensor {unnamed[0]!r}: vla.cpp's {bundle.manifest.architecture} has no name for this"
            " tensor; serve the bundle with `sinew serve` instead"
        )
    return [replace(source, name=name) for name, source in tensors.items()]


def vlacpp_name(name: str, architecture: str) -> str:
    """Return vla.cpp's name for a tensor, from the tensor's name in a bundle.

    Raises:
        ConvertError: vla.cpp has no name for the tensor.
    """
    upstream = _WHOLE.get(name) or _renamed(name)
    if bundle_name(upstream, architecture) != name:
        raise ConvertError(f"tensor {name!r}: vla.cpp's {architecture} has no name for this tensor")
    return upstream


def _renamed(name: str) -> str:
    part, _, rest = name.partition(".")
    if part == "connector":
        return name.replace("connector.proj", "mm.fc") if rest.startswith("proj.") else f"mm.proj.{rest}"
    if part not in _LETTERS:
        return name
    own = _TOWER if part == "vision" else _DECODER
    leaves = {ours: theirs for theirs, ours in LEAVES.items()} | own
    stem, _, end = rest.replace(".dense.", ".").rpartition(".")
    if stem.startswith("layers."):
        _, number, leaf = stem.split(".", 2)
        return f"{_LETTERS[part]}.blk.{number}.{leaves.get(leaf, leaf)}.{end}"
    return f"{_LETTERS[part]}.{leaves.get(stem, stem)}.{end}"


def _stored(bundle: Bundle, packed: tuple[GGMLQuantizationType, ...] = ()) -> Iterator[TensorSource]:
    """Yield the name and the data of each tensor of the bundle.

    Args:
        bundle: The bundle.
        packed: Low-bit types that the family's file supports, besides float32 and bfloat16.

    Raises:
        ConvertError: A tensor has another type.
    """
    for name, info in bundle.infos.items():
        if info.type not in (*STORED, *packed):
            raise ConvertError(
                f"{bundle.path}: tensor {name!r}: expected F32 or BF16, got {info.type.name}; export the bundle before"
                " its quantisation"
            )
        data = FileSlice(bundle.path, info.offset, info.nbytes)
        yield TensorSource(name, info.shape, info.type, info.nbytes, data)


def _weights(bundle: Bundle) -> Iterator[TensorSource]:
    """Yield vla.cpp's name and the data of each tensor.

    Small tensors of the vision tower become float32, and the token table of SmolVLA becomes bfloat16. The projector is
    multiplied by a factor, because vla.cpp's engine later divides the image features by this factor.
    """
    factor = _factor(bundle.manifest)
    for stored in _stored(bundle):
        source = replace(stored, name=vlacpp_name(stored.name, bundle.manifest.architecture))
        if bundle.manifest.architecture == "smolvla" and source.name == TOKENS:
            source = rounded(source)
        small = source.name.startswith("vit.") and (
            len(source.shape) == 1 or "patch_embd" in source.name or "pos_embd" in source.name
        )
        if source.type is GGMLQuantizationType.BF16 and (small or source.name == "mm.proj.bias"):
            source = computed(lambda x: x, source)
        if source.name in PROJECTOR and factor != 1.0:
            source = computed(lambda x: (x.astype(np.float64) * factor).astype(np.float32), source)
        yield source


def _factor(manifest: Manifest) -> float:
    return projector_factor(manifest.architecture, manifest.config["language"]["hidden_size"])


def _statistics(manifest: Manifest) -> Iterator[TensorSource]:
    for what in ("state", "action"):
        for stat, values in getattr(manifest.processing, what).stats.items():
            if (name := f"{what}_{stat}") not in STATISTICS:
                raise ConvertError(
                    f"processing.{what}: vla.cpp's file does not support the statistic {stat!r}; serve the bundle with"
                    " `sinew serve` instead"
                )
            yield constant(name, np.asarray(values, np.float32))


def _keys(manifest: Manifest) -> dict[str, Any]:
    """Return a dict of the file's metadata. Its keys do not have the architecture's name in front.

    A number in a tuple is written as float64. Other floats are written as float32.
    """
    config, spec, kind = manifest.config, manifest.spec, manifest.architecture
    language, expert, vision = config["language"], config["expert"], config["vision"]
    shuffle = config.get("pixel_shuffle", 1)
    keys: dict[str, Any] = {
        "hidden": language["hidden_size"],
        "intermediate": language["intermediate_size"],
        "n_q_heads": language["num_heads"],
        "n_kv_heads": language["num_kv_heads"],
        "head_dim": language["head_dim"],
        "n_layers": language["num_layers"],
        "vocab_size": config["vocab_size"],
        "expert_h": expert["hidden_size"],
        "expert_inter": expert["intermediate_size"],
        "chunk_size": config["chunk_size"],
        "num_steps": spec.solver_steps,
        "max_state_dim": config["max_state_dim"],
        "max_action_dim": config["max_action_dim"],
        "real_state_dim": spec.state.dim,
        "real_action_dim": spec.action.dim,
        "tokenizer_max_length": spec.max_prompt_tokens,
        "min_period": (config["min_period"],),
        "max_period": (config["max_period"],),
        "norm_eps": manifest.processing.action.eps,
        "vit_hidden": vision["hidden_size"],
        "vit_layers": vision["num_layers"],
        "vit_heads": vision["num_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "n_img_tokens": (vision["image_size"] // vision["patch_size"] // shuffle) ** 2,
        "vit_ln_eps": vision["norm_eps"],
    }
    if kind == "smolvla":
        return keys | {
            "self_attn_every_n_layers": config["self_attn_every_n_layers"],
            "expert_width_multiplier": (expert["hidden_size"] / language["hidden_size"],),
            "vit_inter": vision["intermediate_size"],
            "vit_pixel_shuffle": shuffle,
        }
    keys |= {
        "n_action_steps": spec.n_action_steps or spec.chunk_size,
        "rope_theta": (language["rope_theta"],),
        "rms_norm_eps": language["norm_eps"],
    }
    if (factor := _factor(manifest)) != 1.0:
        keys[PROJECTOR_FACTOR] = (factor,)
    if kind == "pi05":
        keys |= {
            "use_adarms_expert": True,
            "adarms_cond_dim": expert["hidden_size"],
            "norm_mode": manifest.processing.action.mode,
        }
    return keys


def _write(
    path: Path, kind: str, keys: dict[str, Any], tensors: list[TensorSource], progress: Progress | None
) -> None:
    writer = GGUFWriter(path, kind)
    writer.add_string(f"{kind}.architecture", kind)
    for name, value in keys.items():
        key = f"{kind}.{name}"
        if isinstance(value, tuple):
            writer.add_float64(key, float(value[0]))
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_float32(key, value)
    finish_header(writer, tensors)
    with open(path, "ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % ALIGNMENT))
            for block in tensor.data.blocks():
                file.write(block)
                if progress:
                    progress(len(block))
        file.write(bytes(-file.tell() % ALIGNMENT))


def _compare(ours: Manifest, conversion: Conversion, path: Path) -> None:
    """Check that the file contains the same policy as the bundle.

    Raises:
        ConvertError: A field differs. The message names the first such field.
    """
    processing = replace(conversion.processing, compat=ours.processing.compat)
    # An older bundle lacks newer fields of the configuration. Decode the configuration, so that these fields get their
    # defaults. Compare it with asdict, because msgspec would omit fields that were absent when it decoded the object.
    config: Any = from_builtins(ours.config, type(conversion.config), f"{path}: sinew.config")
    for where, expected, got in (
        ("config", config, conversion.config),
        ("spec", ours.spec, conversion.spec),
        ("processing", ours.processing, processing),
    ):
        plain = (msgspec.to_builtins(asdict(record)) for record in (expected, got))
        for field, have, would in _differences(where, *plain):
            raise ConvertError(
                f"{path}: {field} is {have!r}, which vla.cpp's file does not support: vla.cpp would use {would!r};"
                " serve the bundle with `sinew serve` instead"
            )


def _differences(where: str, expected: Any, got: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in dict.fromkeys([*expected, *got]):
            if key not in _FREE:
                yield from _differences(f"{where}.{key}", expected.get(key), got.get(key))
    elif expected != got:
        yield where, expected, got
