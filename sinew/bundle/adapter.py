"""A LoRA adapter as a file of its own: a bundle without its base's weights, with the hash of its base.

    y = x W^T + (x A^T) B^T        MODULE.lora_a: float32 [r, inputs], MODULE.lora_b: float32 [outputs, r], scaled

The names are those of the base's bundle (Hu et al. 2021, "LoRA"). Weights that were trained as a whole have their own
names and replace the base's. Configuration, processing and statistics are the adapter's own and complete. The
tokenizer is the base's, and the adapter has its hash. ``sinew convert --no-merge`` writes such files. The name
endings are those of llama.cpp's adapters.
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
MAX_NAME = 64  # characters of what requests call an adapter
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Of a specification: what an adapter may say for itself, and what counts only where both say it.
_OWN = ("name", "default_prompt", "keys")
_STATED = ("control_hz", "n_action_steps", "temporal_ensemble", "real_time_chunking", "embodiment", "motion")


def weights_hash(hashes: Mapping[str, str]) -> str:
    """Return the identity of a bundle's weights: the SHA-256 of its tensors' names and hashes."""
    return hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()


def check_name(name: str) -> None:
    """Raise :class:`BundleError` for what cannot name an adapter in a request."""
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BundleError(
            f"adapters: expected names of at most {MAX_NAME} letters, digits, '.', '_' and '-', got {name[:80]!r}"
        )


def open_adapter(path: Path, base: Bundle) -> Bundle:
    """Return the adapter of a file, found to be one of ``base``: the same weights, configuration and tokenizer, and
    robots of the same form. Reads no weights. Raises :class:`BundleError` that names what differs."""
    found = Bundle(path)
    ours, theirs = base.manifest, found.manifest
    if theirs.base is None:
        raise BundleError(f"{path}: a whole policy, no adapter; `sinew convert ... --no-merge` writes those")
    if base.hashes is None:
        raise BundleError(
            f"{base.path}: carries no hashes, by which its adapters know it; convert it once more"
        )
    if theirs.architecture != ours.architecture:
        raise BundleError(
            f"{path}: an adapter of {theirs.architecture}, and {base.path} is {ours.architecture}"
        )
    if theirs.config != ours.config:
        keys = theirs.config.keys() | ours.config.keys()
        key = next(key for key in sorted(keys) if theirs.config.get(key) != ours.config.get(key))
        raise BundleError(
            f"{path}: config.{key} differs from that of the base {base.path}; pass the base of its training"
        )
    if (own := weights_hash(base.hashes)) != theirs.base.weights:
        raise BundleError(
            f"{path}: an adapter of {theirs.base.name!r}, whose weights are {theirs.base.weights[:16]}...; those of"
            f" {base.path} are {own[:16]}... (a quantised or merged bundle is another base)"
        )
    if hashlib.sha256(ours.tokenizer.encode()).hexdigest() != theirs.base.tokenizer:
        raise BundleError(
            f"{path}: the tokenizer differs from that of the base {base.path}; pass the base of its training"
        )
    if problem := other_form(theirs.spec, ours.spec):
        raise BundleError(
            f"{path}: {problem}; convert it with its base and serve it as a policy of its own (--policy)"
        )
    return found


def fitted(adapter: Bundle, base: Manifest) -> Manifest:
    """Return the manifest of a base with an adapter: the base's tokenizer and specification, cameras renamed as there,
    and the adapter's processing. Raises :class:`BundleError` where they do not go together."""
    prompt = adapter.manifest.spec.default_prompt or base.spec.default_prompt
    spec = replace(base.spec, default_prompt=prompt)
    made = replace(adapter.manifest, spec=spec, tokenizer=base.tokenizer, base=None, seen=base.seen)
    with BundleError.at(adapter.path, BundleError):
        made.check()
    return made


def other_form(adapter: PolicySpec, base: PolicySpec) -> str:
    """Return the first difference between adapter and base that would break a robot of the base; "" if there
    is none.
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
            return f"spec.{each.name}: expected {_text(expected)}, as the base, got {_text(got)}"
    return ""


def unknown(name: object, known: Mapping[str, Any]) -> tuple[str, str]:
    """Return the expected and the actual value for an error about a request's adapter."""
    if not isinstance(name, str):
        return "a text", type(name).__name__
    if not known:
        return "no adapter, as this policy was opened without any", repr(name[:MAX_NAME])
    hint = did_you_mean(name[:MAX_NAME], known)
    return f"one of {', '.join(known)}, or none for the base", f"{name[:MAX_NAME]!r}{hint}"


def _stated(vector: VectorSpec, other: VectorSpec) -> tuple[Any, ...]:
    return (
        vector.dim,
        vector.names if vector.names and other.names else (),
        vector.units if vector.units and other.units else (),
    )


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + " ..."
