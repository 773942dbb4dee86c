"""Read vla.cpp's GGUF files of Evo-1, which vla.cpp converts from a folder of the original repository.

The tensors are renamed to the names of the original repository, and the importer of that repository reads them. The
tokenizer and the sizes of InternVL3 come from ``--vlm``. The file contains minima and maxima for every normalisation.
Attention in masked rows returns zeros, as in vla.cpp's engine (``src/models/evo1.cpp``), unless ``--set
masked_rows=attend`` is passed. Source: vla.cpp ``scripts/convert_evo1_to_gguf.py``.
"""

from __future__ import annotations

from dataclasses import replace

from sinew.bundle.schema import Normalization
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.tensors import Rule, apply, read_array
from sinew.core import CameraSpec, ConvertError, VectorSpec
from sinew.families.evo1 import convert as evo1
from sinew.families.evo1 import original
from sinew.families.evo1.parts import Parts
from sinew.vlacpp.file import FORMAT, VlacppFile, decoder_rules

ARCHITECTURES = ("evo1",)
NAMES = ("vla.cpp GGUF of evo1",)
OPTIONS = ("vlm", "tokenizer", "cameras")
SETTINGS = {name: evo1.SETTINGS[name] for name in ("solver_steps", "masked_rows")}
_TOWER, _LANGUAGE = "embedder.model.vision_model.", "embedder.model.language_model.model."
_LAYER, _BLOCK = rf"{_TOWER}encoder.layers.\1.", r"action_head.transformer_blocks.\1."
RULES = [
    Rule(r"vit\.patch_embd\.(.*)", (rf"{_TOWER}embeddings.patch_embedding.\1",)),
    Rule(r"vit\.class_embd", (f"{_TOWER}embeddings.class_embedding",)),
    Rule(r"vit\.pos_embd", (f"{_TOWER}embeddings.position_embedding",)),
    Rule(r"vit\.blk\.(\d+)\.(norm[12]\..*|ls[12])", (rf"{_LAYER}\2",)),
    Rule(r"vit\.blk\.(\d+)\.attn_(qkv|proj)\.(.*)", (rf"{_LAYER}attn.\2.\3",)),
    Rule(r"vit\.blk\.(\d+)\.(fc[12]\..*)", (rf"{_LAYER}mlp.\2",)),
    *(
        Rule(rf"mm\.{old}\.(.*)", (rf"embedder.model.mlp1.{new}.\1",))
        for old, new in (("ln", 0), ("fc1", 1), ("fc2", 3))
    ),
    *decoder_rules(_LANGUAGE),
    Rule(r"aex\.ae\.(W[123])\.(.*)", (r"action_head.action_encoder.\1.linear.\2",)),
    Rule(r"aex\.ae\.pos_enc", ("action_head.action_encoder.pos_encoding.pe",)),
    Rule(r"aex\.time_pos_enc", ("action_head.time_pos_enc.pe",)),
    Rule(r"aex\.blk\.(\d+)\.(norm[12]\..*)", (rf"{_BLOCK}\2",)),
    Rule(r"aex\.blk\.(\d+)\.attn_in\.(weight|bias)", (rf"{_BLOCK}attn.in_proj_\2",)),
    Rule(r"aex\.blk\.(\d+)\.attn_out\.(.*)", (rf"{_BLOCK}attn.out_proj.\2",)),
    Rule(r"aex\.blk\.(\d+)\.ff1\.(.*)", (rf"{_BLOCK}ff.0.\2",)),
    Rule(r"aex\.blk\.(\d+)\.ff2\.(.*)", (rf"{_BLOCK}ff.2.\2",)),
    Rule(r"aex\.norm_out\.(.*)", (r"action_head.norm_out.\1",)),
    Rule(r"aex\.seq_pool\.(.*)", (r"action_head.seq_pool_proj.\1",)),
    Rule(r"aex\.head\.(fc[12])\.(.*)", (r"action_head.mlp_head.\1.linear.\2",)),
    Rule(r"aex\.state_enc\.(fc[12])\.(.*)", (r"action_head.state_encoder.\1.linear.\2",)),
]
STATISTICS = ("state_min", "state_max", "action_min", "action_max")


def read(file: VlacppFile, options: ConvertOptions) -> Conversion:
    """Read a vla.cpp file. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The file is not a supported Evo-1, or an option does not fit the file.
    """
    n = file.integer
    for name, value in (("image_size", original.SIDE), ("n_images", original.VIEWS)):
        if n(name) != value:
            raise ConvertError(
                f"{file.path}: evo1.{name}: expected {value}, got {n(name)}; convert the original checkpoint instead"
            )
    tensors = file.tensors
    stats = {name: _vector(file, tensors, name) for name in STATISTICS}
    state_size, action_size = n("real_state_dim"), n("real_action_dim")
    cameras = options.cameras or tuple(f"image_{index}" for index in range(original.VIEWS))
    if len(cameras) > original.VIEWS:
        raise ConvertError(
            f"--cameras: expected at most {original.VIEWS} names, got {len(cameras)}; omit unused cameras"
        )
    encoder = tensors.get("aex.state_enc.fc1.weight")
    if encoder is None or len(encoder.shape) != 2:
        raise ConvertError(
            f"{file.path}: the tensor 'aex.state_enc.fc1.weight' is missing; write the file again with vla.cpp's"
            " converter"
        )

    def bounds(what: str, size: int, clip: bool) -> Normalization:
        part = {name: stats[f"{what}_{name}"][:size] for name in ("min", "max")}
        if any(len(values) != size or not size for values in part.values()):
            raise ConvertError(
                f"{file.path}: {what}_min, {what}_max: expected {size} numbers or more each, where {size} is"
                f" real_{what}_dim and at least 1; write the file again with vla.cpp's converter"
            )
        return Normalization("min_max", part, original.EPS, "openpi", clip=clip)

    parts = Parts(
        format=FORMAT,
        name=file.path.stem,
        vlm=original.VLM,
        layers=n("lm_layers_used"),
        views=original.VIEWS,
        category=0,
        max_tokens=n("max_text_length"),
        side=original.SIDE,
        resize=original.RESIZE,
        every_row=True,
        sizes={
            "chunk_size": n("horizon"),
            "max_state_dim": n("state_dim"),
            "max_action_dim": n("per_action_dim"),
            "head_size": n("embed_dim"),
            "decoder_size": n("mlp_head_hidden"),
            "state_size": encoder.shape[0],
            "head_heads": n("dit_heads"),
            "head_layers": n("dit_layers"),
        },
        cameras=tuple(CameraSpec(name, original.SIDE, original.SIDE) for name in cameras),
        state=VectorSpec(state_size),
        action=VectorSpec(action_size),
        state_normalization=bounds("state", state_size, clip=True),
        action_normalization=bounds("action", action_size, clip=False),
        action_steps=(),
        solver_steps=n("num_inference_timesteps"),
        n_action_steps=0,
        control_hz=options.control_hz,
        embodiment="",
        optional_cameras=len(cameras) - 1,
        tensors=apply({name: t for name, t in tensors.items() if name not in STATISTICS}, RULES),
        files=[file.path],
        notes=(
            "minima and maxima are assumed as normalisation, because the file contains no other statistics",
            f"cameras {', '.join(cameras)}: not in the source file",
            f"{n('num_inference_timesteps')} solver steps as in vla.cpp; the original server uses {original.STEPS}",
        ),
    )
    as_the_engine = replace(options, settings={"masked_rows": "zero", **options.settings})
    return evo1.assemble(parts, as_the_engine, file.path)


def _vector(file: VlacppFile, tensors: dict[str, TensorSource], name: str) -> tuple[float, ...]:
    source = tensors.get(name)
    if source is None or len(source.shape) != 1:
        raise ConvertError(
            f"{file.path}: the statistics {name} are missing; write the file again with vla.cpp's converter"
        )
    return tuple(map(float, read_array(source)))
