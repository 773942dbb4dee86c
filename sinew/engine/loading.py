"""Load a bundle's model on a device: create the model, and bring each weight into the form that the engine needs."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinew.bundle import Bundle
from sinew.bundle.quant import FORMATS, SCALE, WEIGHT
from sinew.bundle.schema import COMPONENTS
from sinew.core import DTYPES, PROMPT_TABLE, BundleError, SinewError, machine
from sinew.core.fields import from_builtins
from sinew.core.registry import model_class
from sinew.engine.backend import EngineOptions
from sinew.layers.linear import Embedding, Linear, Stored, hold, width_of
from sinew.layers.stores import half
from sinew.layers.stores.codes import Codes, codes, codes_of
from sinew.layers.stores.half import HALF
from sinew.layers.stores.plain import PLAIN
from sinew.layers.stores.rows import Rows
from sinew.layers.stores.store import Store, Tensors
from sinew.models import check_agreement, mismatch, on_meta
from sinew.models.base import Model

log = logging.getLogger(__name__)
BLOCK = 1 << 20  # number of bytes that the check of low-bit weights reads at once


def open_model(
    bundle: Bundle, options: EngineOptions, engine: str, lowbit: Collection[str] = ()
) -> tuple[Model, torch.device]:
    """Return the bundle's model for an engine that uses PyTorch, and its device.

    Args:
        bundle: The bundle.
        options: The options of the engine.
        engine: The engine's name, for log messages.
        lowbit: Components with whose low-bit weights the engine computes. The weights of other components are converted
            to floats, with a log message unless the architecture requires low-bit weights (ternary).
    """
    where = open_device(options)
    half_stays = bool(options.storage)
    model = load_model(
        bundle,
        where,
        options.dtype,
        lowbit=lowbit,
        half_stays=half_stays,
        tables=True,
        kernels=options.kernels,
    )
    layers: dict[str, Any] = {name: model.get_submodule(name) for name in bundle.lowbit}
    if widened := {kind for name, kind in bundle.lowbit.items() if not layers[name].store.coded}:
        kinds = ", ".join(sorted(widened))
        log.warning(
            "engine %s converts weights stored as %s to floats; engine cpu multiplies them as they are stored",
            engine,
            kinds,
        )
    return model, where


def open_device(options: EngineOptions, available: bool = True) -> torch.device:
    """Return the device, and set PyTorch's number of threads.

    Args:
        options: The options of the engine. ``threads`` None leaves PyTorch's number of threads unchanged.
        available: False if the device need not be available.
    """
    where = parse_device(options.device)
    if available:
        require_device(where)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if where.type == "cuda":
        # By default, cuDNN rounds the inputs and weights of float32 convolutions to 10 bits of mantissa. PyTorch does
        # not round those of matrix products. A process has one setting for all of its policies.
        torch.backends.cudnn.allow_tf32 = False
    if where.type == "cpu" and torch.get_num_threads() > 1 and not machine.WAITING & os.environ.keys():
        log.warning(
            "%s; if other programs need the CPU, set GOMP_SPINCOUNT=0 or import sinew before torch",
            machine.spinning(),
        )
    return where


def parse_device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError:
        raise SinewError(f"device: expected a device such as cpu, cuda or cuda:0, got {text!r}") from None


def require_device(device: torch.device) -> None:
    """Check that the installed PyTorch can compute on a device.

    Raises:
        SinewError: PyTorch cannot compute on the device.
    """
    if device.type in ("cpu", "meta"):
        return
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
            raise SinewError(
                f"device {device}: torch {torch.__version__} ({built}) finds no CUDA device;"
                " run `sinew doctor` to find the cause"
            )
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise SinewError(
                f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices; choose a smaller number"
            )
        return
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SinewError(
            f"device {device}: the installed torch {torch.__version__} cannot use this device: {reason};"
            " run `sinew doctor`, or choose another device"
        ) from None


def load_model(
    bundle: Bundle,
    device: torch.device,
    dtype: str,
    *,
    lowbit: Collection[str] = (),
    half_stays: bool = False,
    tables: bool = False,
    kernels: Callable[[], object] | None = None,
) -> Model:
    """Return the bundle's model with its weights. Parameters are views of the file's memory map where possible.

    Args:
        bundle: The bundle.
        device: The device of the weights.
        dtype: The precision of the weights: fp32, bf16, fp16 or native.
        lowbit: Components (vision, language, head) whose low-bit weights are kept as they are stored. The low-bit
            weights of other components are converted to floats.
        half_stays: True keeps matrices in half precision although the arithmetic is float32, if the chosen precision or
            the bundle's precision is a half precision. With "fp32", results then equal those of float32 matrices, but
            no float32 copies of the matrices are made.
        tables: True keeps tables of tokens in the host's memory. Rows are converted when they are read, with the same
            bits. Graphs that are recorded on a device need the tables on that device.
        kernels: Installs compiled products. The function is called if low-bit weights are multiplied on a CPU.
    """
    manifest = bundle.manifest
    cls = model_class(manifest.architecture)
    config: Any = from_builtins(manifest.config, cls.config_type, f"{bundle.path}: sinew.config")
    model = on_meta(cls, config)
    tensors = bundle.tensors("meta" if device.type == "meta" else "cpu")
    coded = {name: stored_codes(bundle, model, name) for name in bundle.lowbit}
    placement = Placement(bundle, model, device, dtype, tensors, coded, lowbit, half_stays, tables)
    stores = placement.stores()
    modules: dict[str, Any] = dict(model.named_modules())
    for name, store in stores.items():
        hold(modules[name], store)
    if problems := mismatch(model, placement.shapes(stores)):
        raise BundleError(f"{bundle.path}: {problems}")
    check_agreement(bundle.path, manifest, model)
    model.solver = manifest.spec.solver
    if kernels and device.type == "cpu" and any(isinstance(store, Codes) for store in stores.values()):
        kernels()
    model.load_state_dict(placement.state(stores), strict=True, assign=True)
    for name, layer in model.named_modules():
        if (
            isinstance(layer, nn.Linear)
            and not isinstance(layer, Linear)
            and layer.weight.dtype in half.DTYPES
        ):
            raise BundleError(
                f"{bundle.path}: dtype: expected fp32, got {dtype}: layer {name} of {cls.__name__} is a plain"
                " torch.nn.Linear, which cannot use weights in half precision"
            )
    return model


def stored_codes(bundle: Bundle, model: nn.Module, module: str) -> Codes:
    """Return the low-bit format of the weight of ``module`` in the bundle.

    Raises:
        BundleError: The weight does not fit the layer.
    """
    name, where = bundle.lowbit[module], f"{bundle.path}: {module + WEIGHT}"
    rows, row_bytes = bundle.tensor(module + WEIGHT).shape
    try:
        k = width_of(model.get_submodule(module))
    except AttributeError:
        k = None
    if k is None:
        raise BundleError(
            f"{where}: only linear layers, convolutions over rows and token tables can be stored as {name}; convert"
            " the bundle again"
        )
    with BundleError.at(where, ValueError):
        expected = FORMATS[name].row_bytes(k)
    if row_bytes != expected:
        raise BundleError(
            f"{where}: expected {expected} bytes for a row of {k} weights in {name}, got {row_bytes}"
        )
    scale = bundle.infos.get(module + SCALE)
    if scale is not None and tuple(scale.shape) not in ((1,), (rows,)):
        got = list(scale.shape)
        raise BundleError(f"{bundle.path}: {module + SCALE}: expected 1 or {rows} scales, got {got}")
    return codes(name, k, 0 if scale is None else scale.shape[0])


@dataclass(frozen=True)
class Placement:
    """Decides in which form each tensor of a bundle is stored in ``model``. The model has no memory for weights yet.

    A store is the object that defines the form of a weight in memory (:class:`sinew.layers.stores.store.Store`).

    Attributes:
        bundle: The bundle.
        model: The model on the meta device.
        tensors: The bundle's tensors by name.
        coded: For each module with a low-bit weight, the format of this weight.
        device, dtype, lowbit, half_stays, tables: Arguments of :func:`load_model`.
    """

    bundle: Bundle
    model: Model
    device: torch.device
    dtype: str
    tensors: Mapping[str, Tensor]
    coded: Mapping[str, Codes]
    lowbit: Collection[str]
    half_stays: bool
    tables: bool

    def stores(self) -> dict[str, Store]:
        """Return the store (the form of the weight in memory) of each layer of the bundle that has one."""
        return {
            name: self._store(name, layer, self.coded.get(name))
            for name, layer in self.model.named_modules()
            if isinstance(layer, Stored) and name + WEIGHT in self.bundle.infos
        }

    def _store(self, name: str, layer: Stored, coded: Codes | None) -> Store:
        """Choose the store (the form of the weight in memory) of one layer.

        Args:
            name: The layer's name.
            layer: The layer.
            coded: The low-bit format of the layer's weight in the bundle, or None if the bundle stores floats.
        """
        # Leave the store of such a layer unchanged: a subclass may compute with its weight in any way. BitNet's layer
        # fixes its low-bit format for every engine.
        if width_of(layer) is None or codes_of(layer):
            return layer.store
        own = torch.float32 if coded else self.tensors[name + WEIGHT].dtype
        computed = self._computed(name, own)
        if self._is_table(name):
            moved = self.device.type not in ("cpu", "meta")
            return Rows(coded or PLAIN, computed, self.device) if coded or moved or computed != own else PLAIN
        if coded and self.model.component_of(name) in self.lowbit:
            return Rows(coded, computed, self.device) if isinstance(layer, Embedding) else coded
        return HALF if isinstance(layer, Linear) and self._lying(name, own) != computed else PLAIN

    def shapes(self, stores: Mapping[str, Store]) -> dict[str, tuple[int, ...]]:
        """Return the shape that each tensor of the bundle should have for the model. Low-bit weights have the shape in
        which their store keeps them."""
        sizes = {name: tuple(info.shape) for name, info in self.bundle.infos.items()}
        for module in self.coded:
            rows, row_bytes = self.tensors[module + WEIGHT].shape
            sizes[module + WEIGHT] = rows, row_bytes
            if not stores[module].coded:
                sizes[module + WEIGHT] = rows, *self._row_shape(module)
                sizes.pop(module + SCALE, None)
        return sizes

    def state(self, stores: Mapping[str, Store]) -> dict[str, Tensor]:
        """Return the tensors of the model, ready to be assigned to its parameters.

        A tensor with the same dtype and device as in the file is a view of the file's memory map. After a tensor was
        copied, its pages of the file are released immediately.

        Raises:
            BundleError: A weight contains invalid codes (low-bit integers).
        """
        state: dict[str, Tensor] = {}
        for name in self.model.state_dict():
            tensor, (module, _, part) = self.tensors[name], name.rpartition(".")
            store = stores.get(module, PLAIN)
            if module in self.coded and part == "weight":
                if self.device.type != "meta":
                    check_codes(tensor, self.coded[module].name, f"{self.bundle.path}: {name}")
                if not store.coded:
                    tensor = self.coded[module].widened(Tensors(tensor, self.tensors.get(module + SCALE)))
                    tensor = tensor.unflatten(1, self._row_shape(module))
            if self._is_table(module):
                state[name] = tensor
            elif store.coded and part in ("weight", "scale"):
                state[name] = tensor.to(self.device)
            else:
                as_it_lies = store == HALF and part == "weight"
                dtype = (self._lying if as_it_lies else self._computed)(name, tensor.dtype)
                state[name] = tensor.to(device=self.device, dtype=dtype)
            if self.device.type != "meta" and state[name].data_ptr() != self.tensors[name].data_ptr():
                self.bundle.copied(self.tensors[name])
        return state

    def _row_shape(self, module: str) -> tuple[int, ...]:
        """Return the shape of one row of a module's weight in floats: (k,), or (channels, kernel) of a convolution."""
        weight: Any = self.model.get_submodule(module).weight
        return tuple(weight.shape[1:])

    def _lying(self, name: str, own: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor has in memory, from its dtype ``own`` in the bundle and the chosen
        precision.
        """
        if self.dtype == "native" or (self.half_stays and self.dtype == "fp32"):
            return own
        if name.partition(".")[0] in self.model.float32_modules:
            return torch.float32
        return getattr(torch, DTYPES[self.dtype])

    def _computed(self, name: str, own: torch.dtype) -> torch.dtype:
        """Return the dtype in which the model computes with a tensor that has the dtype ``own`` in the bundle."""
        lying = self._lying(name, own)
        return torch.float32 if self.half_stays and lying in half.DTYPES else lying

    def _is_table(self, module: str) -> bool:
        """Return True if ``module`` is a language model's token table, which may stay in its stored precision.

        Other tables contain positions, or the model reads all of their rows.
        """
        return (
            self.tables
            and module.rpartition(".")[2] == PROMPT_TABLE
            and type(self.model.get_submodule(module)) is Embedding
        )


def check_codes(weight: Tensor, name: str, where: str) -> None:
    """Check that a low-bit weight contains only valid codes (integers). The kernels' results are undefined for
    invalid codes.

    A byte contains four ternary codes of two bits each. The code 3 (both bits set) is invalid. The check copies at
    most one block of bytes at a time.

    Args:
        weight: uint8 tensor.
        name: The low-bit format.
        where: The file and the weight's name, for the error.

    Raises:
        BundleError: A code is invalid.
    """
    if name != "ternary":
        return
    for block in weight.view(-1).split(BLOCK):
        if bool((block & (block >> 1) & 0b01010101).any()):
            raise BundleError(f"{where}: expected ternary codes 0, 1 and 2, got 3")


def stored_recipe(bundle: Bundle, model: Model) -> dict[str, str]:
    """Return the low-bit formats of each component's weights, joined by "+".

    The format with the most bytes comes first.
    """
    nbytes: dict[str, Counter[str]] = {}
    for module, name in bundle.lowbit.items():
        nbytes.setdefault(model.component_of(module), Counter())[name] += bundle.infos[module + WEIGHT].nbytes
    return {
        component: "+".join(name for name, _ in nbytes[component].most_common())
        for component in COMPONENTS
        if component in nbytes
    }
