"""Number formats of a stage, and the bytes that they make of a recorded operand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from sinew.core import DTYPES, SinewError
from sinew.perf.trace import STAGES, Call, Operand

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALL_BITS = {"float8": 8, "int8": 8, "int4": 4, "ternary": 2}  # torch computes on none of them everywhere
WORDS = {"fp8": "float8", **DTYPES}  # the command line's words for the names of torch and of hardware tables
LINEAR = ("mm", "addmm")  # what linear layers become


@dataclass(frozen=True, slots=True)
class Precision:
    """weights: of the matrices of linear layers. activations: of everything else that the stage computes on,
    other weights included, except what the model keeps in float32. cache: of the prefix's keys and values.

    Small weights with float activations are widened before the product, which then runs at the activations'
    rate. With small activations the inputs of linear layers are small, their results bfloat16, and the
    product runs at the rate of the wider of the two; the quantisation of the inputs itself is not counted.
    """

    weights: str
    activations: str
    cache: str

    @classmethod
    def parse(cls, text: str, field: str = "dtype") -> Precision:
        """Read ``WEIGHTS[/ACTIVATIONS[/CACHE]]``: "bf16", "int8" (with bf16), "int4/int8", "int8//int8".

        Precisions are the words of every other verb (fp32, bf16, fp16, fp8); torch's own names count, too.
        """
        parts = [WORDS.get(part, part) for part in text.split("/")]
        for part in parts:
            if part and part not in FLOATS and part not in SMALL_BITS:
                raise SinewError(
                    f"{field}: expected one of {', '.join([*WORDS, *FLOATS, *SMALL_BITS])}, got {part!r}"
                )
        if len(parts) > 3 or not parts[0]:
            raise SinewError(f"{field}: expected WEIGHTS[/ACTIVATIONS[/CACHE]], got {text!r}")
        weights, activations, cache = (*parts, "", "")[:3]
        activations = activations or (weights if weights in FLOATS else "bfloat16")
        return cls(weights, activations, cache or (activations if activations in FLOATS else "bfloat16"))

    @property
    def stream(self) -> torch.dtype:
        """In which the program itself is traced."""
        return FLOATS.get(self.activations, torch.bfloat16)

    def compute(self, call: Call, fused: bool = False) -> str:
        """The format of a call's arithmetic. ``fused``: without the widening of attention's operands, which
        one kernel for all of it does not need."""
        if self.activations in SMALL_BITS and _is_linear(call) and call.dtype == self.stream:
            return max((self.weights, self.activations), key=bits)
        if fused and call.is_attention:
            return dtype_name(max((o.unwidened for o in call.operands if not o.written), key=_size))
        return dtype_name(call.dtype)

    def of(self, operand: Operand, call: Call, fused: bool = False) -> str:
        """The format in which an operand is stored."""
        dtype = operand.unwidened if fused and call.is_attention else operand.dtype
        if _is_linear(call) and call.dtype == self.stream:
            if operand.weight and operand is _matrix(call):
                return self.weights
            if self.activations in SMALL_BITS and not operand.weight and not operand.written:
                return self.activations
        if operand.block.kind == "cache" and dtype == self.stream:
            return self.cache
        return dtype_name(dtype)


def by_stage(dtypes: str | Mapping[str, str]) -> dict[str, Precision]:
    """One text for all stages, or stage -> text; stages that are not named take the language model's, else
    bfloat16."""
    if isinstance(dtypes, str):
        return dict.fromkeys(STAGES, Precision.parse(dtypes))
    if unknown := set(dtypes).difference(STAGES):
        raise SinewError(f"dtypes: expected stages of {', '.join(STAGES)}, got {', '.join(sorted(unknown))}")
    default = dtypes.get("language", "bfloat16")
    return {stage: Precision.parse(dtypes.get(stage, default), f"dtypes.{stage}") for stage in STAGES}


def as_traced(call: Call) -> Precision:
    """The formats that the tensors of a call had."""
    name = dtype_name(call.dtype)
    return Precision(name, name, name)


def as_number_format(name: str) -> tuple[str, int]:
    """Indices, masks and float64 tables in the formats that machines are described with: (format, elements per
    element) of the same bytes."""
    if name in FLOATS or name in SMALL_BITS:
        return name, 1
    size = bits(name) // 8
    return {1: ("int8", 1), 2: ("bfloat16", 1)}.get(size, ("float32", size // 4))


def bits(name: str) -> int:
    return SMALL_BITS[name] if name in SMALL_BITS else getattr(torch, name).itemsize * 8


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _is_linear(call: Call) -> bool:
    return call.operator in LINEAR and any(operand.weight for operand in call.operands)


def _matrix(call: Call) -> Operand:
    return max((operand for operand in call.operands if operand.weight), key=lambda operand: operand.elements)
