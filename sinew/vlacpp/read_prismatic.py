"""Read vla.cpp's GGUF files of OpenVLA-OFT and VLA-Adapter (the "Pro" head) with the importer of OpenVLA.

The files contain weights, sizes and statistics. They contain no tokenizer and no mean and std of the pixels, which are
constants in vla.cpp's code. The tensors are renamed to upstream's names, and OpenVLA's importer reads them.
Source: vla.cpp ``scripts/convert_openvla_oft_to_gguf.py``, ``convert_vla_adapter_to_gguf.py``.
"""

from __future__ import annotations

from dataclasses import replace

from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions
from sinew.convert.read.record import JsonRecord
from sinew.convert.tensors import Rule, apply
from sinew.core import ConvertError
from sinew.families.openvla import convert as openvla
from sinew.families.openvla.prismatic import HEADS, PrismaticCheckpoint
from sinew.vlacpp.file import FORMAT, VlacppFile, decoder_rules

ARCHITECTURES = ("openvla_oft", "vla_adapter")
NAMES = ("vla.cpp GGUF of openvla_oft or vla_adapter",)
OPTIONS = ("tokenizer", "stats_key", "cameras")
SETTINGS = {name: setting for name, setting in openvla.SETTINGS.items() if name != "decoding"}
# Mean and std of the pixels, rounded to bfloat16 as in the published checkpoints.
NORMALIZE = [
    {"mean": [0.484375, 0.455078125, 0.40625], "std": [0.228515625, 0.2236328125, 0.224609375]},
    {"mean": [0.5] * 3, "std": [0.5] * 3},
]
HEAD, STATE = "action_head/", "proprio_projector/"
_LINEAR, _RES = r"\.(weight|bias)", r"action_head/model.mlp_resnet_blocks.\1."
TOWERS = {"d": "featurizer", "s": "fused_featurizer"}


def _tower(letter: str, name: str) -> list[Rule]:
    old, new = rf"vis\.{letter}\.", f"vision_backbone.{name}."
    block, to = old + r"blk\.(\d+)\.", new + r"blocks.\1."
    return [
        Rule(old + "patch" + _LINEAR, (rf"{new}patch_embed.proj.\1",)),
        Rule(old + "(cls|reg)", (rf"{new}\1_token",)),
        Rule(old + "pos", (f"{new}pos_embed",)),
        Rule(block + r"ln([12])" + _LINEAR, (rf"{to}norm\2.\3",)),
        Rule(block + r"ls([12])", (rf"{to}ls\2.scale_factor",)),
        Rule(block + "(qkv|proj)" + _LINEAR, (rf"{to}attn.\2.\3",)),
        Rule(block + "(fc[12])" + _LINEAR, (rf"{to}mlp.\2.\3",)),
    ]


HEAD_RULES = [  # regression head and projector of the state
    Rule(r"aex\.proprio\.(.*)", (rf"{STATE}\1",)),
    Rule(r"aex\.head\.ln([12])" + _LINEAR, (rf"{HEAD}model.layer_norm\1.\2",)),
    Rule(r"aex\.head\.fc([12])" + _LINEAR, (rf"{HEAD}model.fc\1.\2",)),
    Rule(r"aex\.head\.blk\.(\d+)\.(?:ffn_)?ln" + _LINEAR, (rf"{_RES}ffn.0.\2",)),
    Rule(r"aex\.head\.blk\.(\d+)\.(?:(?:ffn_)?lin|fc)" + _LINEAR, (rf"{_RES}ffn.1.\2",)),
]
RULES = [
    *(rule for letter, name in TOWERS.items() for rule in _tower(letter, name)),
    Rule(r"vis\.proj\.(.*)", (r"projector.\1",)),
    *decoder_rules("language_model.model.", "lm"),
    *HEAD_RULES,
    Rule(r"aex\.head\.blk\.(\d+)\.gating", (f"{_RES}gating_factor",)),
    Rule(r"aex\.head\.blk\.(\d+)\.(.*)", (rf"{_RES}\2",)),
]


class VlacppCheckpoint(PrismaticCheckpoint):
    """The tensors of a vla.cpp file under the names of OpenVLA's checkpoints. The action head and the state projector
    are separate parts.

    Attributes:
        chunk: Metadata key of the number of actions in a chunk. Older files lack this key.
    """

    format = FORMAT
    chunk = "action.chunk"

    def __init__(self, file: VlacppFile, options: ConvertOptions, tensors: dict[str, TensorSource]):
        if options.tokenizer is None:
            raise ConvertError(
                f"{file.path}: vla.cpp files contain no tokenizer; pass the checkpoint's with --tokenizer FILE_OR_DIR"
            )
        if f"{file.architecture}.{self.chunk}" in file.metadata:
            options = replace(options, settings={"chunk": file.integer(self.chunk), **options.settings})
        self.path, self.options, self.files = file.path, options, [file.path]
        self._parts = {
            part: {key.removeprefix(part): t for key, t in tensors.items() if key.startswith(part)}
            for part in (HEAD, STATE)
        }
        self._weights = {key: t for key, t in tensors.items() if not key.startswith((HEAD, STATE))}

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def tensors(self) -> dict[str, TensorSource]:  # type: ignore[override]
        return self._weights

    def part(self, name: str) -> dict[str, TensorSource]:
        return self._parts[f"{name}/"]


class VlacppPrismatic(VlacppCheckpoint):
    """A vla.cpp file that the importer of OpenVLA reads like the checkpoint folder of OpenVLA's own project. The file
    contains no unused blocks."""

    spare_blocks = 0

    def __init__(self, file: VlacppFile, options: ConvertOptions):
        super().__init__(file, options, apply(file.tensors, RULES))
        side = file.integer("vit.image_size")
        qwen = file.architecture == "vla_adapter"
        record = {
            "timm_model_ids": list(HEADS),
            "image_sizes": [side, side],
            "norm_stats": file.record("statistics_json"),
            "pad_token_id": 0,
            "text_config": {
                "model_type": "qwen2" if qwen else "llama",
                "hidden_size": file.integer("lm.hidden"),
                "intermediate_size": file.integer("lm.inter"),
                "num_hidden_layers": file.integer("lm.layers"),
                "num_attention_heads": file.integer("lm.q_heads"),
                "num_key_value_heads": file.integer("lm.kv_heads"),
                "head_dim": file.integer("lm.head_dim"),
                "rms_norm_eps": file.number("lm.rms_eps"),
                "rope_theta": file.number("lm.rope_theta"),
                "vocab_size": file.integer("lm.vocab"),
            },
        }
        self.config = JsonRecord(file.path, record)
        for tower, heads in zip(("dino", "sig"), HEADS.values(), strict=True):
            if (got := file.integer(f"vit.{tower}.heads")) != heads:
                raise ConvertError(
                    f"{file.path}: vit.{tower}.heads: expected {heads}, got {got}; convert the original checkpoint"
                )

    def preprocessor(self) -> JsonRecord:
        return JsonRecord(self.path, {"tvf_normalize_params": NORMALIZE})


def read(file: VlacppFile, options: ConvertOptions) -> Conversion:
    """Read a vla.cpp file. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The file is not supported, or the tokenizer is missing.
    """
    conversion = openvla.assemble(VlacppPrismatic(file, options))
    note = (
        "mean and std of the pixels: the published checkpoints', as in vla.cpp's code; not in the source file"
    )
    return replace(conversion, notes=(*conversion.notes, note))
