"""Apply LoRA adapters to a loaded model.

The resulting model shares the base weights with the loaded model, and adds the few weights of the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sinew.bundle import Bundle
from sinew.bundle.adapter import LORA_A, LORA_B
from sinew.bundle.quant import WEIGHT
from sinew.core import BundleError
from sinew.engine.clone import clone_model
from sinew.layers.linear import Linear, width_of
from sinew.layers.stores.low_rank import LowRank
from sinew.models import check_agreement
from sinew.models.base import Model

OWN_BASE = "use the base policy that the adapter was trained on"


def with_adapter(model: Model, adapter: Bundle) -> Model:
    """Return ``model`` with the weights of an adapter.

    Both models share all parameters that the adapter does not replace.

    Args:
        model: The loaded base model.
        adapter: The adapter's bundle, with LoRA factors or whole weights.

    Raises:
        BundleError: A tensor does not fit the model, or contains numbers that are not finite.
    """
    tensors = adapter.tensors()
    modules = dict(model.named_modules())
    state = model.state_dict()
    factors: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        where, part = f"{adapter.path}: {name}", name.rpartition(".")[2]
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise BundleError(
                f"{where}: expected float32, float16 or bfloat16 weights, got {adapter.infos[name].type.name}"
            )
        if not torch.isfinite(tensor).all():
            raise BundleError(
                f"{where}: expected finite numbers, got NaN or infinity; convert the adapter again"
            )
        if name.endswith((LORA_A, LORA_B)):
            factors.setdefault(name.rpartition(".")[0], {})[part] = tensor
        elif name not in state:
            raise BundleError(f"{where}: {type(model).__name__} has no weight of this name; {OWN_BASE}")
        elif tensor.shape != state[name].shape or not state[name].is_floating_point():
            expected = f"floats {list(state[name].shape)}"
            raise BundleError(f"{where}: expected {expected}, got {list(tensor.shape)}; {OWN_BASE}")
        else:
            whole[name] = tensor
    for module, pair in factors.items():
        _check_factors(f"{adapter.path}: {module}", modules.get(module), pair)
        if module + WEIGHT in whole:
            raise BundleError(f"{adapter.path}: {module}: expected LoRA factors or a whole weight, got both")
    adapted = clone_model(model, {*factors, *(name.rpartition(".")[0] for name in whole)})
    device = model.device
    for module, pair in factors.items():
        layer = adapted.get_submodule(module)
        assert isinstance(layer, Linear)
        layer.store = LowRank(layer.store, *pair["lora_a"].shape)
        for part, tensor in pair.items():
            setattr(layer, part, _parameter(tensor, device, torch.float32))
    for name, tensor in whole.items():
        module, _, part = name.rpartition(".")
        setattr(adapted.get_submodule(module), part, _parameter(tensor, device, state[name].dtype))
    check_agreement(adapter.path, adapter.manifest, adapted)
    return adapted.eval()


def _check_factors(where: str, layer: nn.Module | None, pair: Mapping[str, Tensor]) -> None:
    if not isinstance(layer, Linear) or width_of(layer) is None:
        kind = "nothing" if layer is None else type(layer).__name__
        raise BundleError(
            f"{where}: expected a linear layer of this name in the base policy, got {kind}; {OWN_BASE}"
        )
    if len(pair) != 2:
        raise BundleError(
            f"{where}: expected lora_a and lora_b, got {next(iter(pair))} alone; convert the adapter again"
        )
    down, up = pair["lora_a"], pair["lora_b"]
    rows, width = layer.store.size(layer)
    rank = down.shape[0]
    if down.dim() != 2 or not rank or down.shape[1] != width or up.shape != (rows, rank):
        raise BundleError(
            f"{where}: expected lora_a [r, {width}] and lora_b [{rows}, r], got {list(down.shape)} and"
            f" {list(up.shape)}; {OWN_BASE}"
        )


def _parameter(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
