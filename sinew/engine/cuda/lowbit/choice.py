"""Choose the components whose low-bit weights stay low-bit in GPU memory. The others are converted to floats once.

The rule compares two numbers:

* **Rows** of a component: the mean number of rows with which a weight is multiplied each time it is read, over one
  chunk. This is the number of multiplications divided by the number of weights that are read.
* **Balance** of a GPU: its peak rate of bfloat16 products divided by its memory bandwidth. A bfloat16 weight has two
  bytes and needs two operations for each row. With fewer rows than the balance, reading the weight takes longer than
  multiplying it.

Below the balance, a weight with fewer bytes makes the product faster. Above it, the arithmetic limits the product, and
the library's product of bfloat16 weights has the higher rate. If the converted weights do not fit the GPU's free
memory, all low-bit weights stay low-bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinew.bundle.schema import COMPONENTS
from sinew.core.registry import model_class
from sinew.engine.backend import GIB, ROOM
from sinew.engine.cuda.kernels import tiles
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.example import Inputs, Shapes
from sinew.layers.linear import Linear
from sinew.models import on_meta
from sinew.models.base import Model

if TYPE_CHECKING:
    from sinew.bundle import Bundle

# Key: compute capability times 10. Value: peak rate of bfloat16 products divided by the memory bandwidth, in operations
# per byte. The numbers are the smallest of the machines of `sinew perf machines` with this capability.
BALANCE = {80: 153, 86: 70, 87: 146, 89: 163, 90: 182, 100: 218, 110: 474, 120: 91}


@dataclass(frozen=True)
class LowbitChoice:
    """The components with low-bit weights, and what the engine does with these weights.

    Attributes:
        kept: For each component whose weights stay low-bit in GPU memory, their formats.
        notes: For each component with low-bit weights, a sentence with the decision and its reason.
    """

    kept: dict[str, str]
    notes: dict[str, str]


# The choice for a bundle without low-bit weights.
NOTHING = LowbitChoice({}, {})


def choose_lowbit(bundle: Bundle, device: torch.device, options: CudaOptions) -> LowbitChoice:
    """Choose the components of a bundle whose low-bit weights stay low-bit on a device.

    Args:
        bundle: The bundle.
        device: The device. Without a GPU, the rule uses compute capability 8.0.
        options: The engine's options. ``lowbit`` replaces the rule.
    """
    # To read a bundle, Sinew needs packages that an engine with given weights does not need (msgspec and gguf).
    from sinew.core.fields import from_builtins
    from sinew.engine.loading import stored_codes

    cls = model_class(bundle.manifest.architecture)
    config: Any = from_builtins(bundle.manifest.config, cls.config_type, f"{bundle.path}: sinew.config")
    model = on_meta(cls, config)
    formats: dict[str, Counter[str]] = {}
    for module, name in bundle.lowbit.items():
        stored_codes(bundle, model, module)  # rejects a weight that does not fit its layer
        layer: Any = model.get_submodule(module)
        # Ternary weights belong to an architecture, and stay as they are in every engine.
        if name != "ternary":
            formats.setdefault(model.component_of(module), Counter())[name] += layer.weight.numel()
    stored = {
        part: "+".join(name for name, _ in formats[part].most_common())
        for part in COMPONENTS
        if part in formats
    }
    if not stored:
        return NOTHING
    if options.lowbit is not None or not options.kernels:
        asked = () if options.lowbit is None or not options.kernels else options.lowbit
        reason = "the engine's options" if options.kernels else "the engine's kernels are off"
        return _chosen(stored, asked, dict.fromkeys(stored, reason))
    rows = rows_of(model, Shapes.of(bundle.manifest), bundle.lowbit)
    capability = tiles.capability(device)
    most = balance(capability)
    few = [part for part in stored if rows[part] <= most]
    reasons = {}
    for part in stored:
        relation = "at most" if part in few else "more than"
        reasons[part] = (
            f"a weight is read once for {rows[part]:,.0f} rows, {relation} the {most} of compute capability"
            f" {capability / 10}"
        )
    needed = sum(2 * sum(formats[part].values()) for part in stored if part not in few) + ROOM
    if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]):
        reason = f"in bf16, the weights would need {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free"
        reasons |= {part: reason for part in stored if part not in few}
        few = [*stored]
    return _chosen(stored, few, reasons)


def balance(capability: int) -> int:
    """Return the balance of a GPU in rows.

    Args:
        capability: Compute capability, major * 10 + minor. If the table does not have it, the next lower one counts.
    """
    return BALANCE[max(key for key in BALANCE if key <= capability)]


def linear_layers(model: Model) -> list[str]:
    """Return the names of the linear layers whose weights `sinew quantize` can round, in all components."""
    return [
        name
        for name, layer in model.named_modules()
        if type(layer) is Linear and name.partition(".")[0] not in model.float32_modules
    ]


def rows_of(model: Model, shapes: Shapes, layers: Iterable[str]) -> dict[str, float]:
    """Return the mean number of rows with which a weight is multiplied when it is read, by component.

    The model runs once on the meta device, which computes shapes only.

    Args:
        model: The model on the meta device.
        shapes: Sizes of an observation.
        layers: Names of the layers to count.
    """
    reads, products, runs = Counter[str](), Counter[str](), 1
    parts = {model.get_submodule(name): model.component_of(name) for name in layers}

    def count(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, Linear)
        x, size = arguments[0], runs * layer.in_features * layer.out_features
        reads[parts[layer]] += size
        products[parts[layer]] += size * (x.numel() // x.shape[-1])

    handles = [layer.register_forward_pre_hook(count) for layer in parts if isinstance(layer, Linear)]
    steps = shapes.steps
    with torch.no_grad():
        times = [*islice(model.time_embeddings(steps), 1)]
        # The plan computes all time embeddings once, so they do not count.
        reads.clear()
        products.clear()
        context = Inputs.example(model, shapes).read(model)
        runs = model.head_runs(steps)
        model.run_head(torch.zeros(1, *model.noise_shape, device="meta"), steps, times, context)
    for handle in handles:
        handle.remove()
    return {part: products[part] / (reads[part] or 1) for part in COMPONENTS}


def _chosen(stored: dict[str, str], kept: Collection[str], reasons: dict[str, str]) -> LowbitChoice:
    stays = {part: kinds for part, kinds in stored.items() if part in kept}
    notes = {
        part: f"{part} {'stays' if part in stays else 'is converted to floats from'} {kinds} ({reasons[part]})"
        for part, kinds in stored.items()
    }
    return LowbitChoice(stays, notes)
