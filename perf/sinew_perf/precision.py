"""Number formats of a stage, and the size of a recorded operand in these formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sinew.core import DTYPES, SinewError

from sinew_perf.flops import LOW_BIT
from sinew_perf.trace import STAGES, TracedCall, TracedOperand

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Key: a format in which torch cannot compute on every device. Value: its number of bits.
SMALL_BITS = {"fp8": 8, "int8": 8, "int4": 4, "ternary": 2}
TORCH_NAMES = {name: word for word, name in DTYPES.items()}
# Key: a component of a model. Value: the stage of the inference that reads its weights.
STAGE_OF = {
    "vision": "vision",
    "language": "prefix",
    "head": "head",
}
# ATen operators of linear layers.
LINEAR = ("mm", "addmm")


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of one stage.

    Small weights with float activations are widened before the product, which then runs at the rate of the
    activations. With small activations, the inputs of linear layers are small, their results are bf16, and the
    product runs at the rate of the wider format. The quantisation of the inputs itself is not counted.

    Attributes:
        weights: Format of the matrices of linear layers.
        activations: Format of all other data of the stage, including other weights, except the weights that the model
            keeps in fp32.
        cache: Format of the prefix's keys and values.
    """

    weights: str
    activations: str
    cache: str

    @classmethod
    def parse(cls, text: str, field: str = "dtype") -> Precision:
        """Read ``WEIGHTS[/ACTIVATIONS[/CACHE]]``: "bf16", "int8" (with bf16), "int4/int8", "int8//int8".

        Args:
            text: The text, with the format names of all commands (fp32, bf16, fp16, fp8) or with torch's own names.
            field: Name of the option, for messages.

        Raises:
            SinewError: The text is invalid.
        """
        parts = [TORCH_NAMES.get(part, part) for part in text.split("/")]
        for part in parts:
            if part and part not in FLOATS and part not in SMALL_BITS:
                raise SinewError(
                    f"{field}: expected one of {', '.join([*FLOATS, *SMALL_BITS])}, got {part!r}"
                )
        if len(parts) > 3 or not parts[0]:
            raise SinewError(f"{field}: expected WEIGHTS[/ACTIVATIONS[/CACHE]], got {text!r}")
        weights, activations, cache = (*parts, "", "")[:3]
        activations = activations or (weights if weights in FLOATS else "bf16")
        return cls(weights, activations, cache or (activations if activations in FLOATS else "bf16"))

    @property
    def stream(self) -> torch.dtype:
        """Return the torch dtype in which the program of this stage is traced."""
        return FLOATS.get(self.activations, torch.bfloat16)

    def compute(self, call: TracedCall, fused: bool = False) -> str:
        """Return the format of a call's arithmetic.

        It is int8 for products with low-bit weights, as the engines compute them.

        Args:
            call: The call.
            fused: True if one kernel computes attention, which does not widen its operands.
        """
        if call.operator in LOW_BIT:
            return "int8"
        if self.activations in SMALL_BITS and _is_linear(call) and call.dtype == self.stream:
            return max((self.weights, self.activations), key=bits)
        if fused and call.is_attention:
            return dtype_name(max((o.unwidened for o in call.operands if not o.written), key=_size))
        return dtype_name(call.dtype)

    def of(self, operand: TracedOperand, call: TracedCall, fused: bool = False) -> str:
        """Return the format in which an operand is stored.

        Args:
            operand: The operand.
            call: The call that uses it.
            fused: True if one kernel computes attention, which does not widen its operands.
        """
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
    """Return the precision of each stage.

    Args:
        dtypes: One text for all stages, or a dict with a text for each component (vision, language, head). A component
            without a text uses that of language, or bf16.

    Raises:
        SinewError: A component or a format is unknown.
    """
    if isinstance(dtypes, str):
        return dict.fromkeys(STAGES, Precision.parse(dtypes))
    if unknown := set(dtypes).difference(STAGE_OF):
        raise SinewError(
            f"dtype: expected components of {', '.join(STAGE_OF)}, got {', '.join(sorted(unknown))}"
        )
    default = dtypes.get("language", "bf16")
    return {
        stage: Precision.parse(dtypes.get(component, default), f"dtype.{component}")
        for component, stage in STAGE_OF.items()
    }


def as_traced(call: TracedCall) -> Precision:
    """Return the formats that the tensors of a call had in the trace."""
    name = dtype_name(call.dtype)
    return Precision(name, name, name)


def as_number_format(name: str) -> tuple[str, int]:
    """Convert a dtype such as int64 or float64 to a format in which machines are described. Return the format, and the
    factor for the number of elements with which the number of bytes stays the same.
    """
    if name in FLOATS or name in SMALL_BITS:
        return name, 1
    size = bits(name) // 8
    return {1: ("int8", 1), 2: ("bf16", 1)}.get(size, ("fp32", size // 4))


def bits(name: str) -> int:
    return SMALL_BITS[name] if name in SMALL_BITS else getattr(torch, DTYPES.get(name, name)).itemsize * 8


def dtype_name(dtype: torch.dtype) -> str:
    """Return "fp32", "bf16" or "fp16" for these types, and torch's own name for any other type."""
    name = str(dtype).removeprefix("torch.")
    return TORCH_NAMES.get(name, name)


def _size(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _is_linear(call: TracedCall) -> bool:
    return call.operator in LINEAR and any(operand.weight for operand in call.operands)


def _matrix(call: TracedCall) -> TracedOperand:
    return max((operand for operand in call.operands if operand.weight), key=lambda operand: operand.elements)
