"""Read openpi's JAX checkpoints: the ``params`` directory that the library orbax wrote. Reading needs only the package
tensorstore.

JAX stores the layers of a model stacked along the first axis, and separates the heads of a projection. So each tensor
of the PyTorch layout is a transposed slice of a stored array. A slice is read when the bundle's tensor is written, one
at a time. Axes: L layers, C width, N heads, K key/value heads, H head size, F hidden size of the MLP.

A LoRA run stores two factors in addition to each weight of Gemma. This module merges the factors into the weight
(openpi ``models/lora.py``):

    attention input   W + scale * A @ B,   scale = alpha / rank, or alpha / sqrt(rank) with rslora
    attention output  W[n] + scale * A[n] @ sum over all heads of B
    feed-forward      W + A @ B, never scaled

The second formula differs because the result of openpi's equation for this layer, "BTNH,NHC->BTC", has no head axis.
The first factor therefore sums over the heads, and then the second factor sums over them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.writer import TensorSource
from sinew.convert.read.elements import BF16, F32
from sinew.convert.read.files import read_json
from sinew.convert.tensors import Transform, computed, moved, rounded
from sinew.core import ConvertError
from sinew.core.extras import install

# (name in PyTorch, name of the stored array, index of the slice, transform).
Entry = tuple[str, str, tuple[int, ...], Transform]

MAX_SHOWN = 8  # an error message lists at most this many arrays
MOST_TYPED = 400  # an error message suggests names for --set ignore with at most this many characters
STORED = {"float32": F32, "bfloat16": BF16}
VISION = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
EXPERT = "paligemma_with_expert.gemma_expert.model"


def same(x: np.ndarray) -> np.ndarray:
    return x


def flipped(x: np.ndarray) -> np.ndarray:  # input shape [in, out], output shape [out, in]
    return x.T


def heads_out(x: np.ndarray) -> np.ndarray:  # input shape [C, N, H], output shape [N * H, C]
    return x.reshape(x.shape[0], -1).T


def heads_in(x: np.ndarray) -> np.ndarray:  # input shape [N, H, C], output shape [C, N * H]
    return x.reshape(-1, x.shape[-1]).T


def heads_first(x: np.ndarray) -> np.ndarray:  # input shape [N, C, H], output shape [N * H, C]
    return x.transpose(0, 2, 1).reshape(-1, x.shape[1])


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1)


# Rank of the LoRA factors in openpi's own variants gemma_2b_lora and gemma_300m_lora (``models/gemma.py``). Their alpha
# is equal to the rank. Key: suffix in the names of the arrays, "" for the language model and "_1" for the action
# expert.
PUBLISHED_RANKS = {"": 16, "_1": 32}
ATTENTION = re.compile(r"PaliGemma\.llm\.layers\.attn\.(?P<einsum>\w+?_einsum)(?P<suffix>_1)?\.w")
FACTORS = ("lora_a", "lora_b")


@dataclass(frozen=True)
class Adapters:
    """The scaling of the LoRA factors of a training run, if the user sets it.

    Attributes:
        alpha: The alphas of the language model and of the action expert. None means the alphas of openpi's own
            variants.
        rslora: True divides alpha by the square root of the rank instead of by the rank.
    """

    alpha: tuple[float, float] | None = None
    rslora: bool = False

    def scale(self, name: str, rank: int) -> float:
        """Return the scale of the LoRA product of a weight.

        Raises:
            ConvertError: The alpha is unknown, because the rank differs from openpi's own variants and the user set no
                alpha.
        """
        attention = ATTENTION.fullmatch(name)
        if attention is None:
            return 1.0
        suffix = attention["suffix"] or ""
        if self.alpha is not None:
            alpha = self.alpha[suffix == "_1"]
        elif rank == PUBLISHED_RANKS[suffix]:
            alpha = float(rank)
        else:
            raise ConvertError(
                f"{name}: expected a LoRA adapter of rank {PUBLISHED_RANKS[suffix]} as in openpi's own variants, got"
                f" rank {rank}; pass the alpha of your LoRAConfig with --set lora_alpha=NUMBER, or with"
                " --set lora_alpha=LANGUAGE,EXPERT if there are two (and --set rslora=true if your LoRAConfig sets it)"
            )
        return alpha / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True)
class StoredSlice:
    """A slice of a stored array that is read on demand.

    Attributes:
        array: The opened array.
        index: Index of the slice along the first axes. Empty for the whole array.
    """

    array: Any  # type: tensorstore.TensorStore
    index: tuple[int, ...]

    def blocks(self) -> Iterable[memoryview]:
        values = self.array[self.index].read().result() if self.index else self.array.read().result()
        yield np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


class OrbaxStore:
    """The arrays of a ``params`` directory. Their names are joined with dots."""

    def __init__(self, path: Path):
        try:
            import tensorstore
        except ImportError:
            raise ConvertError(
                f"{path} is a JAX checkpoint, which requires tensorstore. Install it ({install('tensorstore')}), or"
                " convert the checkpoint to PyTorch with openpi's examples/convert_jax_model_to_pytorch.py"
            ) from None
        self.path, self.tensorstore = path, tensorstore
        metadata = read_json(path / "_METADATA")
        try:
            trees = metadata["tree_metadata"].values()
            names = [".".join(part["key"] for part in tree["key_metadata"]) for tree in trees]
            self.driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
            self.ocdbt = metadata.get("use_ocdbt", True)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConvertError(
                f"{path / '_METADATA'}: expected orbax's description of a tree of arrays ({error!r})"
            ) from None
        # Training runs append ".value" to every name. Published checkpoints do not.
        self.names = {name.removeprefix("params.").removesuffix(".value"): name for name in names}
        self.arrays: dict[str, Any] = {}

    @property
    def unread(self) -> list[str]:
        """Return the names of the arrays that were not read."""
        return [name for name in self.names if name not in self.arrays]

    def array(self, name: str) -> Any:
        if name not in self.names:
            raise ConvertError(
                f"{self.path}: the checkpoint has no array {name!r}. Use a complete checkpoint, or pass its training"
                " configuration with --openpi-config"
            )
        if name not in self.arrays:
            base, inner = f"file://{self.path.resolve()}/", f"{self.names[name]}/"
            store = (
                {"driver": "ocdbt", "base": base, "path": inner}
                if self.ocdbt
                else {"driver": "file", "path": str(self.path.resolve() / inner)}
            )
            try:
                opened = self.tensorstore.open({"driver": self.driver, "kvstore": store}, read=True).result()
            except ValueError as error:
                raise ConvertError(
                    f"{self.path}: array {name!r} cannot be read ({str(error)[:200]}). Copy the checkpoint again"
                ) from None
            if opened.dtype.name not in STORED:
                raise ConvertError(
                    f"{self.path}: array {name!r}: expected float32 or bfloat16, got {opened.dtype.name}"
                )
            self.arrays[name] = opened
        return self.arrays[name]

    def slice(self, name: str, stored: str, index: tuple[int, ...]) -> TensorSource:
        """Return a slice of a stored array as a tensor called ``name``."""
        array = self.array(stored)
        shape = tuple(array.shape[len(index) :])
        nbytes = math.prod(shape) * (4 if array.dtype.name == "float32" else 2)
        return TensorSource(name, shape, STORED[array.dtype.name], nbytes, StoredSlice(array, index))


class Params:
    """The weights of a ``params`` directory, merged with their LoRA factors.

    Attributes:
        merged: Names of the weights that had LoRA factors.
    """

    def __init__(self, store: OrbaxStore, adapters: Adapters):
        self.store, self.adapters = store, adapters
        self.merged: set[str] = set()

    def source(self, entry: Entry) -> TensorSource:
        name, stored, index, transform = entry
        weight = self.store.slice(name, stored, index)
        before = stored.removesuffix(".w") + ("." if stored.endswith(".w") else "_")
        factors = [f"{before}{factor}" for factor in FACTORS]
        present = [factor for factor in factors if factor in self.store.names]
        if len(present) == 1:
            raise ConvertError(
                f"{self.store.path}: expected {factors[0]} and {factors[1]}, got only {present[0]}. Use a complete"
                " checkpoint"
            )
        if present:
            self.merged.add(stored)
            weight = self._with(
                stored, weight, *(self.store.slice(factor, factor, index) for factor in factors)
            )
        return moved(transform, weight)

    def _with(self, stored: str, weight: TensorSource, down: TensorSource, up: TensorSource) -> TensorSource:
        rank = down.shape[-1] if down.shape else 0
        expected = ((*weight.shape[:-1], rank), (*weight.shape[:-2], rank, weight.shape[-1]))
        if not rank or (down.shape, up.shape) != expected:
            raise ConvertError(
                f"{self.store.path}: LoRA adapter of {stored}: expected shapes {[*expected[0]]} and {[*expected[1]]},"
                " got"
                f" {[*down.shape]} and {[*up.shape]}; Sinew only merges adapters of a weight's last two axes"
            )
        scale = np.float32(self.adapters.scale(stored, rank))
        attention = ATTENTION.fullmatch(stored)
        over_heads = attention is not None and attention["einsum"] == "attn_vec_einsum"

        def add(w: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return w + scale * (a @ (b.sum(axis=0) if over_heads else b))

        merged = computed(add, weight, down, up, shape=weight.shape)
        return rounded(merged) if weight.type is BF16 else merged


def read_params(
    path: Path, architecture: str, adapters: Adapters | None = None, ignored: Iterable[str] = ()
) -> tuple[dict[str, TensorSource], int]:
    """Read all tensors of a pi0 or pi0.5 ``params`` directory.

    Args:
        path: The directory.
        architecture: "pi0" or "pi05".
        adapters: The scales of the LoRA factors.
        ignored: Names of arrays that the model does not need.

    Returns:
        The tensors under openpi's PyTorch names, and the number of weights into which LoRA factors were merged.

    Raises:
        ConvertError: The directory has an array that the model does not have, so the policy was trained with another
            model.
    """
    params = Params(OrbaxStore(path), adapters or Adapters())
    entries = list(_entries(params.store, architecture == "pi05"))
    sources = {entry[0]: params.source(entry) for entry in entries}
    for name in ignored:
        if name not in params.store.unread:
            raise ConvertError(
                f"--set ignore={name}: expected the name of an array in {path} that the model ignores"
            )
    if unread := sorted(set(params.store.unread) - {*ignored}):
        more = f" and {len(unread) - MAX_SHOWN} more" if len(unread) > MAX_SHOWN else ""
        is_lora = all("lora" in name for name in unread)
        kind = "LoRA factors without a weight of the model" if is_lora else "other arrays"
        raise ConvertError(
            f"{path}: expected only the arrays of {architecture}, got {kind}: {', '.join(unread[:MAX_SHOWN])}{more};"
            f" if the actions do not depend on them, pass --set ignore={','.join(unread)[:MOST_TYPED]}"
        )
    return sources, len(params.merged)


def _entries(store: OrbaxStore, adaptive: bool) -> Iterator[Entry]:
    yield from _vision(store.array("PaliGemma.img.Transformer.encoderblock.LayerNorm_0.scale").shape[0])
    depth = store.array("PaliGemma.llm.layers.attn.q_einsum.w").shape[0]
    yield f"{LANGUAGE}.embed_tokens.weight", "PaliGemma.llm.embedder.input_embedding", (), same
    yield from _gemma(LANGUAGE, "", depth, False)
    yield from _gemma(EXPERT, "_1", depth, adaptive)
    pi0, pi05 = ("state_proj", "action_time_mlp_in", "action_time_mlp_out"), ("time_mlp_in", "time_mlp_out")
    for head in ("action_in_proj", "action_out_proj", *(pi05 if adaptive else pi0)):
        yield f"{head}.weight", f"{head}.kernel", (), flipped
        yield f"{head}.bias", f"{head}.bias", (), same


def _vision(depth: int) -> Iterator[Entry]:
    img = "PaliGemma.img"
    yield f"{VISION}.embeddings.patch_embedding.weight", f"{img}.embedding.kernel", (), _patches
    yield f"{VISION}.embeddings.patch_embedding.bias", f"{img}.embedding.bias", (), same
    yield f"{VISION}.embeddings.position_embedding.weight", f"{img}.pos_embedding", (0,), same
    for kind, stored in (("weight", "scale"), ("bias", "bias")):
        yield f"{VISION}.post_layernorm.{kind}", f"{img}.Transformer.encoder_norm.{stored}", (), same
    yield f"{PROJECTOR}.weight", f"{img}.head.kernel", (), flipped
    yield f"{PROJECTOR}.bias", f"{img}.head.bias", (), same
    block, attention = f"{img}.Transformer.encoderblock", "MultiHeadDotProductAttention_0"
    for i in range(depth):
        layer = f"{VISION}.encoder.layers.{i}"
        for j in (0, 1):
            yield f"{layer}.layer_norm{j + 1}.weight", f"{block}.LayerNorm_{j}.scale", (i,), same
            yield f"{layer}.layer_norm{j + 1}.bias", f"{block}.LayerNorm_{j}.bias", (i,), same
            yield f"{layer}.mlp.fc{j + 1}.weight", f"{block}.MlpBlock_0.Dense_{j}.kernel", (i,), flipped
            yield f"{layer}.mlp.fc{j + 1}.bias", f"{block}.MlpBlock_0.Dense_{j}.bias", (i,), same
        for ours, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
            yield (
                f"{layer}.self_attn.{ours}_proj.weight",
                f"{block}.{attention}.{theirs}.kernel",
                (i,),
                heads_out,
            )
            yield f"{layer}.self_attn.{ours}_proj.bias", f"{block}.{attention}.{theirs}.bias", (i,), flat
        yield f"{layer}.self_attn.out_proj.weight", f"{block}.{attention}.out.kernel", (i,), heads_in
        yield f"{layer}.self_attn.out_proj.bias", f"{block}.{attention}.out.bias", (i,), same


def _patches(x: np.ndarray) -> np.ndarray:  # shapes: [height, width, 3, C] -> [C, 3, height, width]
    return x.transpose(3, 2, 0, 1)


def _gemma(ours: str, suffix: str, depth: int, adaptive: bool) -> Iterator[Entry]:
    llm = "PaliGemma.llm"

    def norm(name: str, stored: str, index: tuple[int, ...]) -> Iterator[Entry]:
        if adaptive:
            yield f"{name}.dense.weight", f"{stored}.Dense_0.kernel", index, flipped
            yield f"{name}.dense.bias", f"{stored}.Dense_0.bias", index, same
        else:
            yield f"{name}.weight", f"{stored}.scale", index, same

    yield from norm(f"{ours}.norm", f"{llm}.final_norm{suffix}", ())
    attention, mlp = f"{llm}.layers.attn", f"{llm}.layers.mlp{suffix}"
    for i in range(depth):
        layer = f"{ours}.layers.{i}"
        yield f"{layer}.self_attn.q_proj.weight", f"{attention}.q_einsum{suffix}.w", (i,), heads_first
        yield f"{layer}.self_attn.k_proj.weight", f"{attention}.kv_einsum{suffix}.w", (i, 0), heads_first
        yield f"{layer}.self_attn.v_proj.weight", f"{attention}.kv_einsum{suffix}.w", (i, 1), heads_first
        yield f"{layer}.self_attn.o_proj.weight", f"{attention}.attn_vec_einsum{suffix}.w", (i,), heads_in
        yield f"{layer}.mlp.gate_proj.weight", f"{mlp}.gating_einsum", (i, 0), flipped
        yield f"{layer}.mlp.up_proj.weight", f"{mlp}.gating_einsum", (i, 1), flipped
        yield f"{layer}.mlp.down_proj.weight", f"{mlp}.linear", (i,), flipped
        yield from norm(f"{layer}.input_layernorm", f"{llm}.layers.pre_attention_norm{suffix}", (i,))
        yield from norm(f"{layer}.post_attention_layernorm", f"{llm}.layers.pre_ffw_norm{suffix}", (i,))
