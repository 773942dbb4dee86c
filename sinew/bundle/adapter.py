"""A LoRA adapter as a separate file: a bundle without the weights of its base policy, but with the hash of
these weights.

    y = x W^T + (x A^T) B^T        MODULE.lora_a: float32 [r, inputs], MODULE.lora_b: float32 [outputs, r], scaled

Names of modules are those of the base's bundle (Hu et al. 2021, "LoRA"). A weight that was trained as a whole
has its own name and replaces the base's weight. The adapter has its own complete configuration, processing
and statistics. The adapter uses the base's tokenizer, and its file contains the tokenizer's hash. ``sinew
convert --no-merge`` writes such files. The name endings are those of llama.cpp's adapters.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sinew.bundle.reader import Bundle
from sinew.bundle.schema import Manifest
from sinew.core import BundleError, PolicySpec, VectorSpec, did_you_mean

LORA_A, LORA_B = ".lora_a", ".lora_b"
MAX_NAME = 64  # a request may name an adapter with at most this many characters
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Fields of the specification (inputs and outputs of a policy) that an adapter may set differently from its
# base.
_OWN = ("name", "default_prompt", "keys")
# Fields of the specification that must be equal only if both the adapter and the base set them.
_STATED = ("control_hz", "n_action_steps", "temporal_ensemble", "real_time_chunking", "embodiment", "motion")


def weights_hash(hashes: Mapping[str, str]) -> str:
    """Return the identity of a bundle's weights: the SHA-256 of the names and hashes of its tensors."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def check_name(name: str) -> None:
    """Raise :class:`BundleError` if a text is not a valid name of an adapter."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BundleError(
            f"adapters: expected names of at most {MAX_NAME} letters, digits, '.', '_' and '-', got {name[:80]!r}"
        )


def open_adapter(path: Path, base: Bundle) -> Bundle:
    """Open an adapter, and check that it belongs to ``base``. Weights are not read.

    The adapter must have the same architecture, configuration, weights' hash and tokenizer as the base. The inputs
    and outputs of the robot must also be equal.

    Raises:
        BundleError: The adapter belongs to another base. The message names the difference.
    """
    adapter = Bundle(path)
    ours, theirs = base.manifest, adapter.manifest
    if theirs.base is None:
        raise BundleError(
            f"{path}: this is a whole policy and not an adapter; write an adapter with `sinew convert ... --no-merge`"
        )
    if base.hashes is None:
        raise BundleError(
            f"{base.path}: this bundle contains no hashes, so its adapters cannot be checked; convert it again"
        )
    if theirs.architecture != ours.architecture:
        raise BundleError(
            f"{path}: this adapter is for the architecture {theirs.architecture}, and {base.path} has"
            f" {ours.architecture}; pass the base that the adapter was trained on"
        )
    if theirs.config != ours.config:
        keys = theirs.config.keys() | ours.config.keys()
        key = next(key for key in sorted(keys) if theirs.config.get(key) != ours.config.get(key))
        raise BundleError(
            f"{path}: config.{key} differs from that of the base {base.path}; pass the base of its training"
        )
    if (own := weights_hash(base.hashes)) != theirs.base.weights:
        raise BundleError(
            f"{path}: an adapter of {theirs.base.name!r}, whose weights have the hash {theirs.base.weights[:16]}...;"
            f" the weights of {base.path} have {own[:16]}... Pass the base that the adapter was trained on (a"
            " quantised or merged bundle is another base)"
        )
    if hashlib.sha256(ours.tokenizer.encode()).hexdigest() != theirs.base.tokenizer:
        raise BundleError(
            f"{path}: the tokenizer differs from that of the base {base.path}; pass the base of its training"
        )
    if problem := other_form(theirs.spec, ours.spec):
        raise BundleError(
            f"{path}: {problem}; convert it with its base, and serve it as a separate policy (--policy)"
        )
    return adapter


def fitted(adapter: Bundle, base: Manifest) -> Manifest:
    """Return the manifest of a base bundle that runs with an adapter.

    The tokenizer, the specification and the names of the cameras come from the base. The processing comes from the
    adapter.

    Raises:
        BundleError: The adapter's processing does not fit the base's specification.
    """
    prompt = adapter.manifest.spec.default_prompt or base.spec.default_prompt
    spec = replace(base.spec, default_prompt=prompt)
    manifest = replace(adapter.manifest, spec=spec, tokenizer=base.tokenizer, base=None, seen=base.seen)
    with BundleError.at(adapter.path, BundleError):
        manifest.check()
    return manifest


def other_form(adapter: PolicySpec, base: PolicySpec) -> str:
    """Return a message about the first input or output of the adapter that differs from the base's; "" if all
    are equal.

    A robot that was set up for the base would not work with an adapter that has other inputs or outputs.
    """
    for each in fields(PolicySpec):
        got, expected = getattr(adapter, each.name), getattr(base, each.name)
        if each.name in _OWN or (each.name in _STATED and not (got and expected)):
            continue
        if each.name == "cameras" and base.resizes_frames and adapter.resizes_frames:
            got, expected = ([camera.name for camera in cameras] for cameras in (got, expected))
        if isinstance(got, VectorSpec) and isinstance(expected, VectorSpec):
            pair = _stated(got, expected), _stated(expected, got)
            got, expected = pair
        if got != expected:
            return f"spec.{each.name}: expected {_text(expected)} like the base, got {_text(got)}"
    return ""


def unknown(name: object, adapters: Mapping[str, Any]) -> tuple[str, str]:
    """Return two texts for an error message about an unknown adapter: the expected value and the actual value.

    Args:
        name: The adapter in the request.
        adapters: Name of each loaded adapter -> the adapter.
    """
    if not isinstance(name, str):
        return "a text", type(name).__name__
    if not adapters:
        return "no adapter, because this policy was opened without any", repr(name[:MAX_NAME])
    hint = did_you_mean(name[:MAX_NAME], adapters)
    return f"one of {', '.join(adapters)}, or none for the base", f"{name[:MAX_NAME]!r}{hint}"


def _stated(vector: VectorSpec, other: VectorSpec) -> tuple[Any, ...]:
    return (
        vector.dim,
        vector.names if vector.names and other.names else (),
        vector.units if vector.units and other.units else (),
    )


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."
