"""Read vla.cpp's GGUF files of SmolVLA, pi0 and pi0.5.

The files contain no tokenizer, so the user passes one. The prompt is the default of the family. The notes of the bundle
list all assumptions. Schema: vla.cpp ``scripts/convert_{smolvla,pi0,pi05}_to_gguf.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sinew.bundle.schema import STATISTICS as ORDER
from sinew.bundle.schema import (
    ImageRecipe,
    Normalization,
    Processing,
    PromptRecipe,
)
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.options import SOLVER_STEPS_SETTING, ConvertOptions
from sinew.convert.read.files import named
from sinew.convert.tensors import computed, read_array
from sinew.convert.tokenizer_files import load_tokenizer
from sinew.core import CameraSpec, ConvertError, PolicySpec, VectorSpec
from sinew.families.pi.convert import GEMMA, PI05_PROMPT
from sinew.families.pi.model import PI0Config, PI05Config
from sinew.families.smolvla.convert import ROPE_THETA
from sinew.families.smolvla.model import SmolVLAConfig
from sinew.layers.decoder import DecoderConfig
from sinew.layers.vit import ViTConfig
from sinew.steps.image.letterbox import Letterbox
from sinew.steps.prompt.base import PromptStep
from sinew.steps.prompt.clean import Clean
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.prompt.state import State
from sinew.steps.prompt.suffix import Suffix
from sinew.steps.prompt.template import sentence
from sinew.vlacpp.file import FORMAT, VlacppFile

STATISTICS = tuple(f"{what}_{stat}" for what in ("state", "action") for stat in ("mean", "std", "q01", "q99"))
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
# In files of pi0.5, the name of each of these norms of the expert refers to a dense layer, which computes the norm's
# scale.
ADAPTIVE = ("attn_norm", "ffn_norm", "output_norm")
WHOLE = {
    "token_embd.weight": "language.embed_tokens.weight",
    "vit.pos_embd": "vision.position_embedding.weight",
}


def bundle_name(name: str, architecture: str) -> str:
    """Convert a tensor name of vla.cpp to the module path in Sinew's model of this architecture."""
    part, _, rest = name.partition(".")
    if name in WHOLE or part not in PARTS:
        # Projections have the same names in vla.cpp and in Sinew's model.
        return WHOLE.get(name, name)
    if name.startswith("mm.proj."):
        return name.replace("mm.proj", "connector")
    pieces = [LEAVES.get(piece, piece) for piece in rest.split(".")]
    if architecture == "pi05" and part == "aex" and rest.split(".")[-2] in ADAPTIVE:
        pieces.insert(-1, "dense")
    return ".".join([PARTS[part], *pieces])


# Before 0.4.0, vla.cpp's engine for pi0 divides the image features by the square root of the hidden size
# (src/models/pi0.cpp, line 498, commit b18873d). It never multiplies them again, although its engine for pi0.5 does.
# vla.cpp's converter writes the projector as trained, so its file of a pi0 gives wrong actions. A file with the key
# `projector_factor` contains the projector multiplied by this root, so that the engine computes the trained features.
PROJECTOR = ("mm.proj.weight", "mm.proj.bias")
PROJECTOR_FACTOR = "projector_factor"


def projector_factor(architecture: str, hidden: int) -> float:
    """Return the factor by which a file multiplies its projector, to correct a division in vla.cpp's engine.

    Args:
        architecture: The architecture of the file.
        hidden: The hidden size of the language model.

    Returns:
        The square root of ``hidden`` for pi0, 1.0 for all others.
    """
    return hidden**0.5 if architecture == "pi0" else 1.0


NAMES = ("vla.cpp GGUF of smolvla, pi0 or pi05",)
OPTIONS = ("vlm", "tokenizer", "cameras")
SETTINGS = {"solver_steps": SOLVER_STEPS_SETTING}
ARCHITECTURES = ("smolvla", "pi0", "pi05")


def read(file: VlacppFile, options: ConvertOptions) -> Conversion:
    """Read a vla.cpp file. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The file is not supported, or the tokenizer is missing.
    """
    path, architecture = file.path, file.architecture
    family = FAMILIES[architecture]
    if options.tokenizer is None and options.vlm is None:
        raise ConvertError(
            f"{path}: vla.cpp files contain no tokenizer; pass {family.tokenizer}'s with --tokenizer FILE_OR_DIR"
        )
    tokenizer = load_tokenizer([p for p in (options.tokenizer, options.vlm) if p], "see --tokenizer")

    tensors = file.tensors
    with named(path):
        config = family.config(file, tensors)
    tensors, about_projector = _projector(file, tensors)
    state_dim, max_tokens = file.integer("real_state_dim"), file.integer("tokenizer_max_length")
    cameras = options.cameras or family.cameras
    side = config.vision.image_size
    return Conversion(
        format=FORMAT,
        config=config,
        spec=PolicySpec(
            architecture=architecture,
            name=path.stem,
            cameras=tuple(CameraSpec(name, side, side) for name in cameras),
            state=VectorSpec(state_dim),
            action=VectorSpec(file.integer("real_action_dim")),
            chunk_size=config.chunk_size,
            noise_dim=config.max_action_dim,
            solver_steps=options.setting("solver_steps", file.integer("num_steps")),
            max_prompt_tokens=max_tokens,
        ),
        processing=Processing(
            image=ImageRecipe(side, side, (Letterbox(side, side, pad=family.pad),)),
            prompt=PromptRecipe(
                max_tokens=max_tokens,
                vocab_size=config.vocab_size,
                pad_token_id=tokenizer.pad_token_id or 0,
                steps=tuple(
                    replace(step, values=state_dim) if isinstance(step, State) else step
                    for step in family.prompt
                ),
            ),
            state=_normalization(path, tensors, "state", family.mode, file.number("norm_eps")),
            action=_normalization(path, tensors, "action", family.mode, file.number("norm_eps")),
            padded_state_dim=config.max_state_dim,
            padded_action_dim=config.max_action_dim,
        ),
        tokenizer=tokenizer.text,
        tensors={name: t for name, t in tensors.items() if name not in STATISTICS},
        rename=lambda name: bundle_name(name, architecture),
        sources=[path, tokenizer.path],
        notes=(
            f"cameras {', '.join(cameras)}: not in the source file, "
            + ("from --cameras" if options.cameras else "the slots of the base checkpoint are assumed"),
            f"prompt {''.join(step.slot for step in family.prompt)!r}: the family's default, not in the source file",
            *about_projector,
        ),
    )


def _projector(
    file: VlacppFile, tensors: dict[str, TensorSource]
) -> tuple[dict[str, TensorSource], tuple[str, ...]]:
    """Return the tensors, in which the projector has its trained values, and notes for the bundle about the projector.

    Raises:
        ConvertError: The factor in the file differs from the factor of vla.cpp's engine.
    """
    factor = projector_factor(file.architecture, file.integer("hidden"))
    if factor == 1.0:
        return tensors, ()
    if f"{file.architecture}.{PROJECTOR_FACTOR}" not in file.metadata:
        note = (
            "image features as trained; vla.cpp's engine divides the image features by the root of the hidden size, so"
            " the engine computes other actions from this file, which vla.cpp's own converter wrote"
        )
        return tensors, (note,)
    if not math.isclose(factor_in_file := file.number(PROJECTOR_FACTOR), factor, rel_tol=1e-6):
        raise ConvertError(
            f"{file.path}: {file.architecture}.{PROJECTOR_FACTOR}: expected {factor:.7g}, got {factor_in_file};"
            " export the bundle again, or convert the original checkpoint"
        )
    trained = {
        name: computed(lambda x: (x.astype(np.float64) / factor).astype(np.float32), tensors[name])
        for name in PROJECTOR
        if name in tensors
    }
    return tensors | trained, ()


def _smolvla(keys: VlacppFile, tensors: dict[str, TensorSource]) -> SmolVLAConfig:
    n = keys.integer
    # vla.cpp's code contains the epsilon of the layers. The key norm_eps is the epsilon of the normaliser.
    shared = (n("n_layers"), n("n_q_heads"), n("n_kv_heads"), n("head_dim"), 1e-5, ROPE_THETA)
    return SmolVLAConfig(
        vision=_vision(keys, tensors),
        language=DecoderConfig(n("hidden"), n("intermediate"), *shared),
        expert=DecoderConfig(n("expert_h"), n("expert_inter"), *shared),
        vocab_size=n("vocab_size"),
        pixel_shuffle=n("vit_pixel_shuffle"),
        chunk_size=n("chunk_size"),
        max_state_dim=n("max_state_dim"),
        max_action_dim=n("max_action_dim"),
        min_period=keys.number("min_period"),
        max_period=keys.number("max_period"),
        self_attn_every_n_layers=n("self_attn_every_n_layers"),
    )


def _pi(keys: VlacppFile, tensors: dict[str, TensorSource], kind: type[PI0Config] = PI0Config) -> PI0Config:
    n, number = keys.integer, keys.number
    heads = (n("n_layers"), n("n_q_heads"), n("n_kv_heads"), n("head_dim"))
    shared = (*heads, number("rms_norm_eps"), number("rope_theta"))
    return kind(
        vision=_vision(keys, tensors),
        language=DecoderConfig(n("hidden"), n("intermediate"), *shared, **GEMMA),
        expert=DecoderConfig(n("expert_h"), n("expert_inter"), *shared, **GEMMA),
        vocab_size=n("vocab_size"),
        chunk_size=n("chunk_size"),
        max_state_dim=n("max_state_dim"),
        max_action_dim=n("max_action_dim"),
        min_period=number("min_period"),
        max_period=number("max_period"),
    )


def _vision(keys: VlacppFile, tensors: dict[str, TensorSource]) -> ViTConfig:
    fc1 = tensors.get("vit.blk.0.fc1.weight")
    if fc1 is None or len(fc1.shape) != 2:
        raise ValueError(
            "the vision tower (vit.blk.0.fc1.weight) is missing; write the file again with vla.cpp's converter"
        )
    return ViTConfig(
        hidden_size=keys.integer("vit_hidden"),
        # The files of pi0 have no key for this size.
        intermediate_size=fc1.shape[0],
        num_layers=keys.integer("vit_layers"),
        num_heads=keys.integer("vit_heads"),
        image_size=keys.integer("image_size"),
        patch_size=keys.integer("patch_size"),
        norm_eps=keys.number("vit_ln_eps"),
    )


def _normalization(
    path: Path, tensors: dict[str, TensorSource], what: str, mode: Any, eps: float
) -> Normalization:
    stats = {}
    for stat in ORDER[mode]:
        source = tensors.get(f"{what}_{stat}")
        if source is None or len(source.shape) != 1:
            raise ConvertError(
                f"{path}: the statistics {what}_{stat} are missing; write the file again with vla.cpp's converter"
            )
        stats[stat] = tuple(float(v) for v in read_array(source))
    return Normalization(mode, stats, eps)


@dataclass(frozen=True)
class CheckpointLayout:
    """How to interpret the files of one architecture, and facts about the architecture that the files do not contain.

    Attributes:
        config: Builds the configuration from the keys and the tensors of a file.
        tokenizer: Name of the tokenizer that the user must pass.
        cameras: Default names of the cameras.
        prompt: Steps that build the prompt. The size of the state comes from the file.
        pad: Side of a letterboxed frame at which the padding is.
        mode: Normalisation mode of states and actions.
    """

    config: Callable[[VlacppFile, dict[str, TensorSource]], Any]
    tokenizer: str
    cameras: tuple[str, ...]
    prompt: tuple[PromptStep, ...]
    pad: Literal["top_left", "center"] = "center"
    mode: str = "mean_std"


_PI_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_LINE = (Instruction(), Suffix("\n"))
_STATE = (Clean(), *sentence(PI05_PROMPT, State(0)))
FAMILIES = {
    "smolvla": CheckpointLayout(
        _smolvla, "SmolVLM2-500M", ("camera1", "camera2", "camera3"), _LINE, pad="top_left"
    ),
    "pi0": CheckpointLayout(_pi, "PaliGemma", _PI_CAMERAS, _LINE),
    "pi05": CheckpointLayout(
        partial(_pi, kind=PI05Config), "PaliGemma", _PI_CAMERAS, _STATE, mode="quantiles"
    ),
}
