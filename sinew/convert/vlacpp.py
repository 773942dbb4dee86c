"""Importing vla.cpp's GGUF files.

They hold weights and most hyper-parameters, but no tokenizer, no camera names and no prompt rule
(``token ids`` are their client's business); the tokenizer has to be given, and the rest is stated in the
notes of the bundle. Schema: vla.cpp ``scripts/convert_smolvla_to_gguf.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from sinew.bundle.gguf_file import GGUFFile
from sinew.bundle.schema import (
    KEY_ARCHITECTURE,
    KEY_VERSION,
    ImageRecipe,
    Normalization,
    Processing,
    PromptRecipe,
)
from sinew.bundle.writer import FileSlice, TensorSource
from sinew.convert.conversion import Conversion, Options
from sinew.convert.safetensors_file import read_array
from sinew.convert.smolvla import ROPE_THETA
from sinew.convert.tokenizer_files import load_tokenizer
from sinew.core import BundleError, CameraSpec, ConvertError, PolicySpec, VectorSpec
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig
from sinew.models.smolvla import SmolVLAConfig

RMS_EPS = 1e-5  # fixed in vla.cpp's smolvla.cpp; its norm_eps key is the normaliser's, not the layers'
DEFAULT_CAMERAS = ("camera1", "camera2", "camera3")  # the slots of the published base checkpoint
STATISTICS = ("state_mean", "state_std", "action_mean", "action_std")
STORED = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
PARTS = {"vlm": "language", "aex": "expert", "vit": "vision", "mm": "connector"}
LEAVES = {
    "blk": "layers",
    "attn_norm": "input_norm",
    "attn_q": "attn.q_proj",
    "attn_k": "attn.k_proj",
    "attn_v": "attn.v_proj",
    "attn_o": "attn.o_proj",
    "ffn_norm": "post_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
    "post_ln": "norm",
    "output_norm": "norm",
    "patch_embd": "patch_embedding",
    "fc": "proj",
}
WHOLE = {
    "token_embd.weight": "language.embed_tokens.weight",
    "vit.pos_embd": "vision.position_embedding.weight",
}


def bundle_name(name: str) -> str:
    """vla.cpp tensor name -> module path in :class:`sinew.models.smolvla.SmolVLA`."""
    part, _, rest = name.partition(".")
    if name in WHOLE or part not in PARTS:
        return WHOLE.get(name, name)  # projections keep their upstream names
    return ".".join([PARTS[part], *(LEAVES.get(piece, piece) for piece in rest.split("."))])


def read(path: Path, options: Options) -> Conversion:
    try:
        file = GGUFFile(path)
    except BundleError as error:
        raise ConvertError(str(error)) from None
    if KEY_VERSION in file.metadata:
        raise ConvertError(f"{path} is a Sinew bundle already")
    architecture = file.metadata.get(KEY_ARCHITECTURE)
    if architecture != "smolvla":
        raise ConvertError(f"{path}: vla.cpp architecture {architecture!r} is not supported (only 'smolvla')")
    if options.tokenizer is None and options.vlm is None:
        raise ConvertError(
            f"{path}: vla.cpp files hold no tokenizer; give SmolVLM2-500M's with --tokenizer FILE_OR_DIR"
        )
    tokenizer = load_tokenizer([p for p in (options.tokenizer, options.vlm) if p], "see --tokenizer")
    if tokenizer.pad_token_id is None:
        raise ConvertError(f"{tokenizer.path}: no pad token; its tokenizer_config.json should lie beside it")

    tensors = {}
    for info in file.tensors.values():
        if info.type not in STORED:
            raise ConvertError(
                f"{path}: tensor {info.name!r} is quantised ({info.type.name}); give the F32/BF16 file"
            )
        data = FileSlice(path, info.offset, info.nbytes)
        tensors[info.name] = TensorSource(info.name, info.shape, info.type, info.nbytes, data)
    keys = _Keys(path, file.metadata)
    state, action = (
        _normalization(path, tensors, what, keys.number("norm_eps")) for what in ("state", "action")
    )
    weights = {name: t for name, t in tensors.items() if name not in STATISTICS}
    config = model_config(keys)
    cameras = options.cameras or DEFAULT_CAMERAS
    side = config.vision.image_size
    return Conversion(
        architecture="smolvla",
        format="vla.cpp-gguf",
        config=config,
        spec=PolicySpec(
            architecture="smolvla",
            name=path.stem,
            cameras=tuple(CameraSpec(name, side, side) for name in cameras),
            state=VectorSpec(keys.integer("real_state_dim")),
            action=VectorSpec(keys.integer("real_action_dim")),
            chunk_size=config.chunk_size,
            noise_dim=config.max_action_dim,
            solver_steps=keys.integer("num_steps"),
            max_prompt_tokens=keys.integer("tokenizer_max_length"),
        ),
        processing=Processing(
            image=ImageRecipe(height=side, width=side),
            prompt=PromptRecipe(
                max_tokens=keys.integer("tokenizer_max_length"),
                vocab_size=config.vocab_size,
                pad_token_id=tokenizer.pad_token_id,
                ensure_suffix="\n",
            ),
            state=state,
            action=action,
            padded_state_dim=config.max_state_dim,
            padded_action_dim=config.max_action_dim,
        ),
        tokenizer=tokenizer.text,
        tensors=weights,
        rename=bundle_name,
        sources=[path, tokenizer.path],
        notes=(
            f"cameras {', '.join(cameras)}: not in the source file, "
            + ("given with --cameras" if options.cameras else "the base checkpoint's slots assumed"),
            "prompts are not padded; the source file does not say how the checkpoint was trained",
        ),
    )


def model_config(keys: _Keys) -> SmolVLAConfig:
    n = keys.integer
    heads = (n("n_layers"), n("n_q_heads"), n("n_kv_heads"), n("head_dim"), RMS_EPS, ROPE_THETA)
    try:
        return SmolVLAConfig(
            vision=ViTConfig(
                hidden_size=n("vit_hidden"),
                intermediate_size=n("vit_inter"),
                num_layers=n("vit_layers"),
                num_heads=n("vit_heads"),
                image_size=n("image_size"),
                patch_size=n("patch_size"),
                norm_eps=keys.number("vit_ln_eps"),
            ),
            language=DecoderConfig(n("hidden"), n("intermediate"), *heads),
            expert=DecoderConfig(n("expert_h"), n("expert_inter"), *heads),
            vocab_size=n("vocab_size"),
            pixel_shuffle=n("vit_pixel_shuffle"),
            chunk_size=n("chunk_size"),
            max_state_dim=n("max_state_dim"),
            max_action_dim=n("max_action_dim"),
            min_period=keys.number("min_period"),
            max_period=keys.number("max_period"),
            self_attn_every_n_layers=n("self_attn_every_n_layers"),
        )
    except (ValueError, ZeroDivisionError) as error:
        raise ConvertError(f"{keys.path}: {error}") from None


def _normalization(path: Path, tensors: dict[str, TensorSource], what: str, eps: float) -> Normalization:
    stats = {}
    for stat in ("mean", "std"):
        source = tensors.get(f"{what}_{stat}")
        if source is None or len(source.shape) != 1:
            raise ConvertError(f"{path}: no statistics vector {what}_{stat}")
        stats[stat] = tuple(float(v) for v in read_array(source))
    return Normalization("mean_std", stats, eps)


class _Keys:
    """Typed look-ups of ``smolvla.*`` metadata; errors name the key."""

    def __init__(self, path: Path, metadata: dict[str, Any]):
        self.path, self.metadata = path, metadata

    def integer(self, name: str) -> int:
        value = self.metadata.get(f"smolvla.{name}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 24:
            raise ConvertError(f"{self.path}: smolvla.{name} is {value!r}, expected a size")
        return value

    def number(self, name: str) -> float:
        value = self.metadata.get(f"smolvla.{name}")
        if not isinstance(value, float):
            raise ConvertError(f"{self.path}: smolvla.{name} is {value!r}, expected a number")
        # Stored as float32; the shortest decimal that rounds to it is the one that was meant (1e-08, 1e-06).
        return float(f"{value:.7g}")
