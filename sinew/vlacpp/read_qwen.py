"""Read vla.cpp's GGUF files of GR00T N1.7 and VLA-JEPA, the policies over Qwen3-VL.

The tensors are renamed to upstream's names, and the importers of upstream's files read them. An N1.7 file contains the
processor's configuration and the statistics. A VLA-JEPA file contains no configuration, no statistics and no names of
cameras, so the user passes the cameras and the statistics. The tokenizer, the chat template and the image processor
come from ``--vlm``. Source: vla.cpp ``scripts/convert_gr00t_n1_7_to_gguf.py``, ``convert_vla_jepa_to_gguf.py``,
``gguf_blocks.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.lerobot.checkpoint import ACTION, STATE, LeRobotCheckpoint
from sinew.convert.options import SOLVER_STEPS_SETTING, ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply, reshape
from sinew.core import ConvertError
from sinew.families.gr00t import convert as gr00t
from sinew.families.gr00t import qwen
from sinew.families.gr00t.files import NvidiaFiles
from sinew.families.vla_jepa import convert as vla_jepa
from sinew.vlacpp.file import FORMAT, VlacppFile, decoder_rules

ARCHITECTURES = ("gr00t_n1_7", "vla_jepa")
NAMES = ("vla.cpp GGUF of gr00t_n1_7 or vla_jepa",)
OPTIONS = ("vlm", "tokenizer", "embodiment", "cameras", "stats")
SETTINGS = {key: setting for key, setting in gr00t.SETTINGS.items() if key != "ignore"} | {
    "solver_steps": SOLVER_STEPS_SETTING
}
READ_BY = {  # key: architecture; value: entries of OPTIONS and SETTINGS that only this architecture supports
    "gr00t_n1_7": ("embodiment", *(key for key in SETTINGS if key != "solver_steps")),
    "vla_jepa": ("cameras", "stats"),
}
COSMOS = "nvidia/Cosmos-Reason2-2B"  # the model_name in N1.7's configuration
FRAME = 256  # side of LIBERO's frames in pixels; the processor resizes other frames
RESIZE = [224, 224]  # frame size in the published VLA-JEPA checkpoints, which vla.cpp expects


def _tower(to: str, file: VlacppFile) -> list[Rule]:
    frames, side = file.integer("temporal_patch_size"), file.integer("patch_size")

    def patches(source: TensorSource) -> TensorSource:
        # Convert the weight from [C, 3 * frames * rows * columns] to the shape of a Conv3d, [C, 3, frames, rows,
        # columns].
        return reshape(source, source.shape[0], 3, frames, side, side)

    block = rf"{to}blocks.\1."
    return [
        Rule(r"vit\.patch_embd\.weight", (f"{to}patch_embed.proj.weight",), patches),
        Rule(r"vit\.patch_embd\.bias", (f"{to}patch_embed.proj.bias",)),
        Rule(r"vit\.pos_embd", (f"{to}pos_embed.weight",)),
        Rule(r"vit\.blk\.(\d+)\.ln([12])\.(.*)", (rf"{block}norm\2.\3",)),
        Rule(r"vit\.blk\.(\d+)\.attn_qkv\.(.*)", (rf"{block}attn.qkv.\2",)),
        Rule(r"vit\.blk\.(\d+)\.attn_o\.(.*)", (rf"{block}attn.proj.\2",)),
        Rule(r"vit\.blk\.(\d+)\.(fc[12])\.(.*)", (rf"{block}mlp.linear_\2.\3",)),
        Rule(r"vit\.deepstack\.(\d+)\.norm\.(.*)", (rf"{to}deepstack_merger_list.\1.norm.\2",)),
        Rule(r"vit\.deepstack\.(\d+)\.(fc[12])\.(.*)", (rf"{to}deepstack_merger_list.\1.linear_\2.\3",)),
        Rule(r"vit\.merger\.norm\.(.*)", (rf"{to}merger.norm.\1",)),
        Rule(r"vit\.merger\.(fc[12])\.(.*)", (rf"{to}merger.linear_\1.\2",)),
    ]


def _blocks(old: str, new: str) -> list[Rule]:
    to = rf"{new}.transformer_blocks.\1."
    return [
        Rule(old + r"\.(\d+)\.adaln\.(.*)", (rf"{to}norm1.linear.\2",)),
        Rule(old + r"\.(\d+)\.(norm[13])\.(.*)", (rf"{to}\2.\3",)),
        Rule(old + r"\.(\d+)\.attn_([qkv])\.(.*)", (rf"{to}attn1.to_\2.\3",)),
        Rule(old + r"\.(\d+)\.attn_o\.(.*)", (rf"{to}attn1.to_out.0.\2",)),
        Rule(old + r"\.(\d+)\.ff0\.(.*)", (rf"{to}ff.net.0.proj.\2",)),
        Rule(old + r"\.(\d+)\.ff2\.(.*)", (rf"{to}ff.net.2.\2",)),
    ]


def head_rules(short: str, dit: str, to: str) -> list[Rule]:
    """Return the rules that rename the tensors of a diffusion head.

    Args:
        short: Prefix of the head's names in vla.cpp.
        dit: Prefix of the names of the transformer's own layers in vla.cpp.
        to: Prefix of the new names.
    """
    embedder = rf"{to}model.timestep_encoder.timestep_embedder.linear_\1.\2"
    return [
        Rule(rf"{short}\.state_enc\.l([12])\.(.*)", (rf"{to}state_encoder.layer\1.\2",)),
        Rule(rf"{short}\.act_enc\.l([123])\.(.*)", (rf"{to}action_encoder.layer\1.\2",)),
        Rule(rf"{short}\.act_enc\.W([123])\.(.*)", (rf"{to}action_encoder.W\1.\2",)),
        Rule(rf"{short}\.act_dec\.l([12])\.(.*)", (rf"{to}action_decoder.layer\1.\2",)),
        Rule(rf"{short}\.pos_embd", (f"{to}position_embedding.weight",)),
        Rule(rf"{short}\.future_tokens", (f"{to}future_tokens.weight",)),
        Rule(rf"{short}\.vlln\.(.*)", (rf"{to}vlln.\1",)),
        Rule(rf"{dit}\.time_emb\.l([12])\.(.*)", (embedder,)),
        Rule(rf"{dit}\.proj_out([12])\.(.*)", (rf"{to}model.proj_out_\1.\2",)),
        *_blocks(rf"{short}\.dit", f"{to}model"),
        *_blocks(rf"{short}\.vlsa", f"{to}vl_self_attention"),
    ]


def read(file: VlacppFile, options: ConvertOptions) -> Conversion:
    """Read a vla.cpp file. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The file is not supported, or its architecture does not support an option.
    """
    for name in (*options.non_defaults, *options.settings):
        if any(name in read_by for kind, read_by in READ_BY.items() if kind != file.architecture):
            raise ConvertError(
                f"{name}: a vla.cpp file of {file.architecture} does not support this option; omit the option"
            )
    if file.architecture == "vla_jepa":
        return vla_jepa.assemble(VlacppJepa(file, options))
    name = "backbone.model.model."
    rules = [
        *decoder_rules(f"{name}language_model."),
        *_tower(f"{name}visual.", file),
        *head_rules("aex", r"aex\.dit", "action_head."),
    ]
    return qwen.assemble(VlacppNvidia(file, options, rules, COSMOS))


def head_record(file: VlacppFile, tensors: Mapping[str, TensorSource]) -> dict[str, Any]:
    """Return the sizes of a GR00T head in the form of NVIDIA's configuration.

    Args:
        file: The file.
        tensors: The tensors of the file under NVIDIA's names.

    Raises:
        ConvertError: A tensor or a key is missing.
    """
    n = file.integer

    def size(name: str, axis: int) -> int:
        if name not in tensors or len(tensors[name].shape) <= axis:
            raise ConvertError(
                f"{file.path}: the tensor {name!r} is missing; write the file again with vla.cpp's converter"
            )
        return tensors[name].shape[axis]

    record: dict[str, Any] = {
        "backbone_embedding_dim": n("backbone_embedding_dim"),
        "diffusion_model_cfg": {
            "num_layers": n("dit_layers"),
            "num_attention_heads": n("dit_heads"),
            "attention_head_dim": n("dit_head_dim"),
            "output_dim": size("action_head.model.proj_out_2.weight", 0),
            "interleave_self_attention": bool(n("dit_interleave")),
        },
        "hidden_size": size("action_head.action_decoder.layer2.W", 1),
        "num_timestep_buckets": n("num_timestep_buckets"),
        "max_seq_len": n("max_seq_len"),
        "action_horizon": n("action_horizon"),
        "max_state_dim": n("max_state_dim"),
        "max_action_dim": n("action_dim"),
        "num_inference_timesteps": n("num_inference_timesteps"),
    }
    if file.architecture == "gr00t_n1_5":
        record["num_target_vision_tokens"] = n("num_target_vision_tokens")
    else:
        # vla.cpp supports no other transformer in the head.
        record["use_alternate_vl_dit"] = True
        record["attend_text_every_n_blocks"] = n("attend_text_every_n_blocks")
    if file.architecture != "gr00t_n1_6":
        record["vl_self_attention_cfg"] = {
            "num_layers": n("vlsa_layers"),
            "num_attention_heads": n("vlsa_heads"),
            "attention_head_dim": n("vlsa_head_dim"),
        }
    return record


class VlacppNvidia(NvidiaFiles):
    """A vla.cpp file of GR00T N1.6 or N1.7, read like NVIDIA's checkpoint folder. ``rules`` rename the tensors."""

    format = FORMAT

    def __init__(self, file: VlacppFile, options: ConvertOptions, rules: Sequence[Rule], model: str):
        self.file, self.path, self.options = file, file.path, options
        self._tensors = apply(file.tensors, rules)
        own = {"model_name": model, "select_layer": file.integer("lm_layers_used")}
        self.config = JsonRecord(file.path, own | head_record(file, self._tensors))
        self.processor = JsonRecord(file.path, file.record("processor_config_json")).part("processor_kwargs")

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def numbers(self) -> Mapping[str, Any]:
        return self.file.record("embodiment_id_mapping")

    @cached_property
    def _statistics(self) -> Mapping[str, Any]:
        return self.file.record("statistics_json")

    @cached_property
    def weights(self) -> tuple[dict[str, TensorSource], list[Path]]:
        return self._tensors, [self.path]

    @property
    def files(self) -> list[Path]:
        return [self.path]


class VlacppJepa(LeRobotCheckpoint):
    """A vla.cpp file of VLA-JEPA that is read like LeRobot's checkpoint folder."""

    format = FORMAT

    def __init__(self, file: VlacppFile, options: ConvertOptions):
        if not options.cameras:
            raise ConvertError(
                f"{file.path}: vla.cpp files contain no names of cameras; pass the names in the order of the training"
                " with --cameras NAME,NAME"
            )
        self.image_token = file.integer("image_token_index")
        self.marker = file.integer("embodied_action_token_id")
        n, name = file.integer, "model.qwen.model.model."
        rules = [
            *decoder_rules(f"{name}language_model."),
            *_tower(f"{name}visual.", file),
            *head_rules("ah", "ah", "model.action_model."),
        ]
        self._tensors = apply(file.tensors, rules)
        table = self._tensors.get("model.action_model.position_embedding.weight")
        if table is None:
            raise ConvertError(
                f"{file.path}: the tensor 'ah.pos_embd' is missing; write the file again with vla.cpp's converter"
            )
        views = {
            f"observation.images.{camera}": {"type": "VISUAL", "shape": [3, FRAME, FRAME]}
            for camera in options.cameras
        }
        config = {
            "type": vla_jepa.ARCHITECTURE,
            "input_features": {**views, STATE: {"type": "STATE", "shape": [n("state_dim")]}},
            "output_features": {ACTION: {"type": "ACTION", "shape": [n("action_dim")]}},
            "chunk_size": n("action_horizon"),
            "n_action_steps": n("action_horizon"),
            "num_embodied_action_tokens_per_instruction": n("num_future_tokens"),
            "num_inference_timesteps": n("num_inference_timesteps"),
            "action_num_timestep_buckets": n("num_timestep_buckets"),
            "action_hidden_size": n("output_dim"),
            "action_num_layers": n("dit_layers"),
            "action_num_heads": n("dit_heads"),
            "action_attention_head_dim": n("dit_head_dim"),
            "action_max_seq_len": table.shape[0],
            "resize_images_to": RESIZE,
        }
        super().__init__(file.path, options, vla_jepa.SCHEMA, config)

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def _weights(self) -> tuple[dict[str, TensorSource], list[Path]]:
        return self._tensors, [self.path]

    @property
    def files(self) -> list[Path]:
        return [self.path, *([self.options.stats] if self.options.stats else [])]

    def check_tokens(self, image: int, marker: int) -> None:
        """Check that the tokenizer has the same token ids as the file.

        Args:
            image: Id of the image token in the tokenizer of ``--vlm``.
            marker: Id of the embodied action token in the tokenizer of ``--vlm``.

        Raises:
            ConvertError: An id differs from the id in the file.
        """
        for what, own, id_of_vlm in (
            ("image_token_index", self.image_token, image),
            ("embodied_action_token_id", self.marker, marker),
        ):
            if own != id_of_vlm:
                raise ConvertError(
                    f"{self.path}: {what}: expected {own}, got {id_of_vlm} from --vlm; pass the Qwen3-VL that the"
                    " checkpoint was trained with"
                )
