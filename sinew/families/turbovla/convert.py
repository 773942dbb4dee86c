"""Convert TurboVLA's LIBERO checkpoint: a ``.pth`` file, or a folder with ``model.safetensors`` and ``config.json``.

The ``.pth`` file contains the tensors (``model_state_dict``) and the configuration (``model_config``). The folder's
``config.json`` is the same configuration. The checkpoint contains no statistics (pass ``--stats``) and no tokenizer
(pass ``--tokenizer``). It also does not contain the number of attention heads of DINOv3 and BERT. Sinew knows this
number for the published encoders. For other encoders the user passes it with ``--arch``. Two LeRobot plugins have the
same name, but a different network. The converter recognises their checkpoints by the tensor names, and rejects them.
Sources: H-EmbodVis/TurboVLA (``turbovla/models``, ``turbovla/evaluation/policy.py``), transformers 4.57
(``modeling_dinov3_vit.py``, ``modeling_bert.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sinew.bundle.schema import Normalization, Processing, VectorPart
from sinew.bundle.writer import TensorSource
from sinew.convert.conversion import Conversion
from sinew.convert.options import IGNORE_SETTING, ConvertOptions, Setting
from sinew.convert.read.files import directory_config, named, read_json
from sinew.convert.read.record import TRAINING, JsonRecord, shown_fields, training_note
from sinew.convert.read.safetensors import find_weights, read_safetensors
from sinew.convert.read.torch_zip import read_torch_record, unread_note
from sinew.convert.tensors import Rule, apply, join, moved, pick, renames, reshape
from sinew.convert.tokenizer_files import TokenizerFiles, find_tokenizer
from sinew.core import CameraSpec, ConvertError, PolicySpec, VectorSpec
from sinew.families.turbovla.model import NORM_EPS, TurboVLAConfig
from sinew.families.turbovla.text import BertConfig
from sinew.layers.vit import ViTConfig
from sinew.models.solvers import SINGLE
from sinew.steps.image.base import ImageRecipe
from sinew.steps.prompt.base import PromptRecipe
from sinew.steps.prompt.fill import Fill
from sinew.steps.prompt.instruction import Instruction
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.base import VectorStep
from sinew.steps.vector.threshold import Threshold

NAMES = ("TurboVLA",)
OPTIONS = ("tokenizer", "arch", "stats", "stats_key", "cameras")
SIGN, SCALED = "sign", "scaled"
SETTINGS = {
    "gripper": Setting(
        str,
        f"how the last action is computed: {SIGN} (1 if it is zero or more, else -1, as in LIBERO's evaluation) or"
        f" {SCALED} (scaled by its minimum and maximum, like the other actions)",
        values=(SIGN, SCALED),
    ),
    "ignore": IGNORE_SETTING,
}
WEIGHTS, CONFIG = "model_state_dict", "model_config"  # keys of a .pth file
# A tensor name by which checkpoints of this network are recognised, because no other network has it.
TELL_TALE = "vision_language_interaction.fusion_layers.0.gamma_v"
PLUGIN = "model.vl_interaction."  # prefix of the tensors of the two LeRobot plugins
PLUGINS = ("turbovla", "turbovla_so101")  # values of "type" in the config.json of a plugin
LIBERO = (8, 7)  # size of LIBERO's state, size of an action
LIBERO_CAMERAS = ("image", "wrist_image")  # LIBERO's third-person camera and wrist camera
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # pixel statistics of ImageNet
STATE_EPS = 1e-6  # constant in TurboVLA's evaluation/policy.py
BERT_EPS = 1e-12
# Facts about the published encoders that a checkpoint does not contain.
TOWERS = {"dinov3-vitb16": {"num_attention_heads": 12, "rope_theta": 100.0, "layer_norm_eps": NORM_EPS}}
TEXTS = {"bert-base-uncased": {"num_attention_heads": 12, "layer_norm_eps": BERT_EPS}}
# FIXED: fields of the configuration for which Sinew supports only one value. UNREAD_FIELDS: fields that do not
# influence inference.
FIXED: dict[str, dict[str, Any]] = {
    "text": {"sub_sentence_present": True, "zero_padded_tokens": False},
    "vision": {"position_embedding": "view"},
    "interaction": {"padding_strategy": "key_padding_mask", "residual_style": "normalized"},
    "action": {},
}
UNREAD_FIELDS = {
    "text": "frozen force_eval_when_frozen local_files_only attention_implementation",
    "vision": "frozen local_files_only attention_implementation encode_views_separately compute_precision"
    " position_init_std position_scale_init dropout",
    "interaction": "text_dropout fusion_dropout fusion_droppath attention_backend compute_precision",
    "action": "dropout",
}
# TurboVLA reads features before the encoder's last norm, so these tensors are not needed.
UNUSED_TENSORS = (
    "vision_encoder.backbone.norm.",
    "vision_encoder.backbone.embeddings.mask_token",
    "text_encoder.bert.pooler.",
    "text_encoder.bert.embeddings.position_ids",
)
TOWER, TEXT, INTERACTION, ACTION = (
    "vision_encoder.backbone.",
    "text_encoder.bert.",
    "vision_language_interaction.",
    "action_head.",
)
ATTENTION = (
    "self_attn.in_proj=attn.{qkv}_proj self_attn.out_proj=attn.o_proj linear1=fc1 linear2=fc2 norm1 norm2"
)
RULES = (
    *renames(
        re.escape(TOWER) + r"layer\.(\d+)\.",
        r"vision.layers.\1.",
        "attention=attn norm1 norm2 mlp.up_proj=mlp.fc1 mlp.down_proj=mlp.fc2",
    ),
    Rule(
        re.escape(TOWER) + r"layer\.(\d+)\.layer_scale([12])\.lambda1", (r"vision.layers.\1.scale\2.weight",)
    ),
    *renames(re.escape(f"{TOWER}embeddings."), "vision.", "patch_embeddings=patch_embedding"),
    *renames(r"vision_projection\.", "connector.", "input_norm mlp.0=fc1 mlp.3=fc2 skip output_norm"),
    Rule(r"view_embedding", ("view_places",), lambda source: pick(source, 0)),
    *renames(
        re.escape(f"{TEXT}encoder.layer.") + r"(\d+)\.",
        r"language.layers.\1.",
        "attention.self.query=attn.q_proj attention.self.key=attn.k_proj attention.self.value=attn.v_proj"
        " attention.output.dense=attn.o_proj attention.output.LayerNorm=norm1 intermediate.dense=fc1"
        " output.dense=fc2 output.LayerNorm=norm2",
    ),
    *renames(
        re.escape(f"{TEXT}embeddings."),
        "language.",
        "word_embeddings=embed_tokens position_embeddings=places LayerNorm=norm",
    ),
    # An instruction has only one segment, so only the first segment embedding is needed.
    Rule(
        re.escape(f"{TEXT}embeddings.token_type_embeddings.weight"),
        ("language.segment",),
        lambda source: pick(source, 0),
    ),
    *renames(r"text_encoder\.", "language.", "text_projection=project"),
    *renames(
        re.escape(f"{INTERACTION}fusion_layers.") + r"(\d+)\.",
        r"fusion.\1.",
        "layer_norm_v=norm_v layer_norm_l=norm_l attn.v_proj=v_proj attn.l_proj=l_proj"
        " attn.values_v_proj=values_v_proj attn.values_l_proj=values_l_proj attn.out_v_proj=out_v_proj"
        " attn.out_l_proj=out_l_proj",
    ),
    Rule(re.escape(f"{INTERACTION}fusion_layers.") + r"(\d+)\.gamma_([vl])", (r"fusion.\1.gamma_\2",)),
    *renames(re.escape(f"{INTERACTION}text_layers.") + r"(\d+)\.", r"text_layers.\1.", ATTENTION),
    *renames(
        re.escape(f"{ACTION}state_projection."), "state.", "net.0=input_norm net.1=fc1 net.4=fc2 output_norm"
    ),
    Rule(re.escape(f"{ACTION}state_projection.position"), ("state.places",), lambda source: pick(source, 0)),
    *renames(
        re.escape(f"{ACTION}decoder.decoder.layers.") + r"(\d+)\.",
        r"decoder.\1.",
        f"{ATTENTION} multihead_attn.in_proj=cross.{{qkv}}_proj multihead_attn.out_proj=cross.o_proj norm3",
    ),
    *renames(
        re.escape(f"{ACTION}decoder."),
        "",
        "action_queries=queries action_projection.layers.0=action_proj.fc1"
        " action_projection.layers.1=action_proj.fc2 action_projection.layers.2=action_proj.fc3",
    ),
)


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        record: The configuration.
        tensors: The tensors by their names in the model, without the prefix of a wrapper.
        files: The files of the checkpoint, which the bundle records.
        notes: Notes for the user.
    """

    record: JsonRecord
    tensors: dict[str, TensorSource]
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def file_of(path: Path) -> Path:
    """Return the file of weights for a path: the path itself, or the only ``.pth`` file of a folder without
    ``config.json``.

    Any other folder is returned unchanged.
    """
    if not path.is_dir() or (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.pth"))
    return files[0] if len(files) == 1 else path


def recognises(path: Path) -> bool:
    """Return True for a TurboVLA file or folder, and for the folder of a LeRobot plugin, which :func:`read` rejects."""
    path = file_of(path)
    if path.is_dir():
        config = directory_config(path)
        return config.get("type") in PLUGINS or FIXED.keys() <= config.keys()
    if path.suffix != ".pth" or not path.is_file():
        return False
    try:
        names, record = read_torch_record(path, CONFIG)
        return record is not None or any(name.endswith(TELL_TALE) for name in names)
    except ConvertError:
        # Another family can give a better error message for this file.
        return False


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported TurboVLA.
    """
    path = file_of(path)
    checkpoint = opened(path)
    groups = {name: checkpoint.record.part(name) for name in FIXED}
    check_settings(checkpoint.record, groups)
    with named(checkpoint.record.path):
        config = model_config(checkpoint, groups, options)
    notes = leftovers(checkpoint.record, groups, options)
    statistics, key = statistics_of(path, options)
    state, action, steps = vectors(statistics, config, options)
    tokenizer = find_tokenizer(
        options,
        *([path] if path.is_dir() else [path.parent]),
        whose="bert-base-uncased's tokenizer, which is not part of a checkpoint,",
    )
    config, prompt = with_words(config, groups["text"], tokenizer)
    side, cameras = config.vision.image_size, camera_names(config, options)
    return Conversion(
        format="turbovla",
        config=config,
        spec=PolicySpec(
            architecture="turbovla",
            name=path.stem if path.is_file() else path.resolve().name,
            cameras=tuple(CameraSpec(name, side, side) for name in cameras),
            state=VectorSpec(config.max_state_dim),
            action=VectorSpec(config.max_action_dim),
            chunk_size=config.chunk_size,
            noise_dim=0,
            solver_steps=1,
            max_prompt_tokens=prompt.max_tokens,
            resizes_frames=False,
            n_action_steps=config.chunk_size,
            solver=SINGLE,
        ),
        processing=Processing(
            image=ImageRecipe(side, side, mean=MEAN, std=STD),
            prompt=prompt,
            state=state,
            action=action[0].normalization if len(action) == 1 else Normalization("identity"),
            padded_state_dim=config.max_state_dim,
            padded_action_dim=config.max_action_dim,
            all_cameras=True,  # each view has its own embedding, so all views are required
            action_steps=steps,
            action_parts=action if len(action) > 1 else (),
        ),
        tokenizer=tokenizer.text,
        tensors=tensors(checkpoint.tensors),
        dead=UNUSED_TENSORS,
        sources=[*checkpoint.files, *([options.stats] if options.stats else []), tokenizer.path],
        notes=(f"statistics {key!r}" if key else "statistics of one data set", *checkpoint.notes, *notes),
    )


def opened(path: Path) -> Checkpoint:
    """Read a checkpoint's file or folder: its configuration and its tensors.

    Raises:
        ConvertError: The file has another layout, or another network with the same name.
    """
    notes: tuple[str, ...] = ()
    if path.is_dir():
        config, files = JsonRecord(path / "config.json"), find_weights(path)
        sources_by_name = {name: source for file in files for name, source in read_safetensors(file).items()}
        record, sources = config, (config.path, *files)
    else:
        every, content = read_torch_record(path, CONFIG)
        prefix = f"{WEIGHTS}."
        sources_by_name = {
            name.removeprefix(prefix): s for name, s in every.items() if name.startswith(prefix)
        }
        if not sources_by_name or content is None:
            missing = CONFIG if sources_by_name else WEIGHTS
            raise ConvertError(
                f"{path}: expected the keys {WEIGHTS} and {CONFIG}, got no {missing}. Use a file that TurboVLA's"
                " training code saved"
            )
        record, sources = JsonRecord(path, content, f"{CONFIG}."), (path,)
        notes = unread_note(path, every, WEIGHTS)
    names: dict[str, TensorSource] = {}
    for name, source in sources_by_name.items():
        if (own := name.removeprefix("module.")) in names:
            raise ConvertError(
                f"{path}: expected each tensor once, got {own} with and without the prefix 'module.'. Remove one of"
                " the two from the file"
            )
        names[own] = source
    if plugin := next((name for name in names if name.startswith(PLUGIN)), None):
        raise ConvertError(
            f"{path}: expected TurboVLA of H-EmbodVis, whose tensors have names such as {TELL_TALE}, got {plugin}. This"
            " is the network of a LeRobot plugin with the same name, which Sinew does not support"
        )
    if TELL_TALE not in names:
        raise ConvertError(
            f"{path}: the tensor {TELL_TALE} is missing, so this is not a TurboVLA checkpoint. Use a file that"
            " TurboVLA's training code saved"
        )
    return Checkpoint(record, names, sources, notes)


def check_settings(record: JsonRecord, groups: Mapping[str, JsonRecord]) -> None:
    """Raise :class:`ConvertError` for a configuration value that Sinew does not support."""
    record.expect(name=NAMES[0])
    for name, group in groups.items():
        for key, value in FIXED[name].items():
            if (got := group.get(key, value)) != value:
                raise ConvertError(
                    f"{group.path}: {group.name}{key}: expected {value!r}, got {got!r}, which is not supported. Sinew"
                    " computes TurboVLA with the settings of its LIBERO checkpoints"
                )


def leftovers(
    record: JsonRecord, groups: Mapping[str, JsonRecord], options: ConvertOptions
) -> tuple[str, ...]:
    """Check the fields of the configuration that were not read.

    Returns:
        Notes about fields that only training uses, and about fields that --set ignore names.

    Raises:
        ConvertError: A field was not read and may change the actions.
    """
    unread: dict[str, Any] = {}
    for name, group in groups.items():
        expected = {*group.read, *UNREAD_FIELDS[name].split()}
        unread |= {f"{name}.{key}": value for key, value in group.content.items() if key not in expected}
    # The file may also have a table of debugging options.
    expected = {*groups, "name", "embedding_dump"}
    unread |= {key: value for key, value in record.content.items() if key not in expected}
    ignored = {key.strip() for key in options.setting("ignore", "").split(",")}
    training = [key for key in unread if TRAINING.search(key.rpartition(".")[2]) and key not in ignored]
    strange = {key: value for key, value in unread.items() if key not in (*training, *ignored)}
    if strange:
        verb = "is" if len(strange) == 1 else "are"
        raise ConvertError(
            f"{record.path}: {shown_fields(strange)} {verb} not understood and may change the actions. If it does not,"
            f" pass --set ignore={','.join(strange)}"
        )
    skipped = [key for key in unread if key in ignored]
    return (
        *([training_note(training)] if training else []),
        *([f"{record.path.name}: ignored because of --set ignore: {', '.join(skipped)}"] if skipped else []),
    )


def encoder(
    name: str, key: str, encoders: Mapping[str, dict[str, Any]], arch: dict[str, Any]
) -> dict[str, Any]:
    """Return facts about an encoder that the checkpoint does not contain. They come from --arch or from the table of
    published encoders.

    Args:
        name: Name of the encoder in the checkpoint.
        key: "vision" or "text".
        encoders: Facts about the published encoders, by name.
        arch: Content of the file that the user passes with --arch.

    Raises:
        ConvertError: The encoder is unknown.
    """
    if key in arch:
        return JsonRecord(Path("--arch"), arch, "").part(key).content  # type: ignore[return-value]
    for published, facts in encoders.items():
        if published in name:
            return facts
    raise ConvertError(
        f"{key}.model_name_or_path: expected {', '.join(encoders)}, got {name!r}. For another encoder, pass --arch FILE"
        f' with the content of its config.json as "{key}"'
    )


def model_config(
    checkpoint: Checkpoint, groups: Mapping[str, JsonRecord], options: ConvertOptions
) -> TurboVLAConfig:
    """Build the model's configuration. :func:`with_words` adds the token ids of the text."""
    tensors = checkpoint.tensors
    text, vision, interaction, action = (groups[name] for name in FIXED)
    arch = read_json(options.arch) if options.arch else {}

    def shape(name: str, axes: int = 2) -> tuple[int, ...]:
        if name not in tensors or len(tensors[name].shape) != axes:
            got = list(tensors[name].shape) if name in tensors else "none"
            raise ConvertError(f"{name}: expected a tensor with {axes} axes, got {got}")
        return tensors[name].shape

    def count(prefix: str) -> int:
        pattern = re.compile(re.escape(prefix) + r"(\d+)\.")
        return len({match[1] for name in tensors if (match := pattern.match(name))})

    dino = JsonRecord(
        Path("--arch"), encoder(str(vision["model_name_or_path"]), "vision", TOWERS, arch), "vision."
    )
    bert = JsonRecord(Path("--arch"), encoder(str(text["model_name_or_path"]), "text", TEXTS, arch), "text.")
    dino.expect(hidden_act="gelu", use_gated_mlp=False)
    bert.expect(hidden_act="gelu", position_embedding_type="absolute")
    width, _, patch, _ = shape(f"{TOWER}embeddings.patch_embeddings.weight", 4)
    vocabulary, text_width = shape(f"{TEXT}embeddings.word_embeddings.weight")
    # Read this field here, so that it is not reported as unread. The function with_words uses it later.
    text.get("padding_length_by_instruction")
    rows = text["padding_length"]
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 < rows <= int(text["max_length"]):
        raise ConvertError(
            f"{text.path}: {text.name}padding_length: expected a whole number from 2 to max_length, got {rows!r}."
            " Padding to the longest instruction of a batch is not supported"
        )
    return TurboVLAConfig(
        vision=ViTConfig(
            hidden_size=width,
            intermediate_size=shape(f"{TOWER}layer.0.mlp.up_proj.weight")[0],
            num_layers=count(f"{TOWER}layer."),
            num_heads=dino["num_attention_heads"],
            image_size=vision["image_size"],
            patch_size=patch,
            norm_eps=dino["layer_norm_eps"],
            activation="gelu",
            prefix_tokens=1 + shape(f"{TOWER}embeddings.register_tokens", 3)[1],
            layer_scale=True,
            final_norm=False,
        ),
        language=BertConfig(
            hidden_size=text_width,
            intermediate_size=shape(f"{TEXT}encoder.layer.0.intermediate.dense.weight")[0],
            num_layers=count(f"{TEXT}encoder.layer."),
            num_heads=bert["num_attention_heads"],
            positions=shape(f"{TEXT}embeddings.position_embeddings.weight")[0],
            vocab_size=vocabulary,
            norm_eps=bert["layer_norm_eps"],
            delimiters=(0,),
        ),
        rope_theta=float(dino["rope_theta"]),
        projection_size=shape("vision_projection.mlp.0.weight")[0],
        num_views=vision["num_views"],
        text_rows=rows,
        hidden_size=interaction["hidden_dim"],
        num_heads=interaction["nheads"],
        fusion_size=interaction["enhancer_inner_dim"],
        fusion_layers=interaction["num_layers"],
        decoder_layers=action["num_layers"],
        intermediate_size=interaction["dim_feedforward"],
        state_tokens=action["num_state_tokens"],
        state_hidden_size=action["state_hidden_dim"],
        action_hidden_size=action["mlp_hidden_dim"],
        chunk_size=action["horizon"],
        max_state_dim=action["state_dim"],
        max_action_dim=action["action_dim"],
    )


def with_words(
    config: TurboVLAConfig, text: JsonRecord, tokenizer: TokenizerFiles
) -> tuple[TurboVLAConfig, PromptRecipe]:
    """Add the tokenizer's token ids to the configuration, and build the prompt recipe.

    Raises:
        ConvertError: The tokenizer or the padding table does not fit the model.
    """
    language, rows = config.language, config.text_rows
    if (size := tokenizer.tokenizer.get_vocab_size()) > language.vocab_size:
        raise ConvertError(
            f"{tokenizer.path}: expected at most {language.vocab_size} tokens, the size of BERT's token table, got"
            f" {size}. Pass the tokenizer of the checkpoint's BERT with --tokenizer"
        )
    pad, *delimiters = (tokenizer.token_id(token) for token in ("[PAD]", "[CLS]", "[SEP]", ".", "?"))
    behind = language.vocab_size
    table = text.get("padding_length_by_instruction", {})
    for instruction, length in table.items():
        where = f"{text.path}: {text.name}padding_length_by_instruction: {instruction!r:.80}"
        if not isinstance(instruction, str) or isinstance(length, bool) or not isinstance(length, int):
            raise ConvertError(f"{where}: expected a text and a whole number, got {length!r:.40}")
        if not (needed := len(tokenizer.encode(instruction))) <= length <= rows:
            raise ConvertError(
                f"{where}: expected a length from {needed}, the number of its tokens, to padding_length {rows}, got"
                f" {length}"
            )
    lengths = tuple(sorted((words, length) for words, length in table.items() if length != rows))
    prompt = PromptRecipe(
        max_tokens=rows,
        vocab_size=language.vocab_size + 1,  # one more id than BERT has: it marks a token after the padding
        pad_token_id=pad,
        steps=(Instruction(), Fill(rows, pad, behind, lengths)),
        padding="max_length",
    )
    named_tokens = replace(language, delimiters=tuple(delimiters), pad_token=pad)
    return replace(config, language=named_tokens), prompt


def camera_names(config: TurboVLAConfig, options: ConvertOptions) -> tuple[str, ...]:
    count = config.num_views
    usual = LIBERO_CAMERAS if count == len(LIBERO_CAMERAS) else tuple(f"image_{i}" for i in range(count))
    names = options.cameras or usual
    if len(names) != count:
        raise ConvertError(
            f"--cameras: expected {count} names, one for each view of the checkpoint, got {len(names)}"
        )
    return names


def statistics_of(path: Path, options: ConvertOptions) -> tuple[JsonRecord, str]:
    """Read the statistics of states and actions from the file of --stats, for one data set.

    Returns:
        The statistics, and their key in the file. The key is "" if the file has only one data set.

    Raises:
        ConvertError: --stats or --stats-key is missing or wrong.
    """
    if options.stats is None:
        raise ConvertError(
            f"{path}: a TurboVLA checkpoint has no statistics of states and actions. Pass the statistics file of its"
            " training with --stats FILE and, if the file has several data sets, --stats-key KEY (LIBERO's release:"
            " libero_all4_stats.json, key libero_all4_no_noops)"
        )
    table = JsonRecord(options.stats)
    if "action" in table.content and not options.stats_key:
        return table, ""
    keys = sorted(table.content)
    key = options.stats_key or (keys[0] if len(keys) == 1 else "")
    if key not in table.content:
        problem = f"there is no key {key!r}" if key else f"the file has statistics of {len(keys)} data sets"
        raise ConvertError(f"{options.stats}: {problem}. Pass --stats-key with one of: {', '.join(keys)}")
    return table.part(key), key


def vectors(
    statistics: JsonRecord, config: TurboVLAConfig, options: ConvertOptions
) -> tuple[Normalization, tuple[VectorPart, ...], tuple[VectorStep, ...]]:
    """Build the normalisation of states and actions.

    Returns:
        The normalisation of the state, the parts of an action, and the steps after the actions.

    Raises:
        ConvertError: Statistics are missing or have another size, or --set gripper is required.
    """
    sizes = config.max_state_dim, config.max_action_dim
    gripper = options.setting("gripper", SIGN if sizes == LIBERO else "")
    if not gripper:
        raise ConvertError(
            f"--set gripper: expected {SIGN} or {SCALED} for {sizes[1]} actions and a state of {sizes[0]} numbers,"
            " but the option is not set. The checkpoint does not record how the last action is computed. LIBERO's"
            f" policies ({LIBERO[1]} actions, a state of {LIBERO[0]} numbers) use {SIGN}"
        )
    state = statistics.part("state" if "state" in statistics.content else "proprio")
    action = statistics.part("action")
    last = sizes[1] - 1
    moving = last if gripper == SIGN else sizes[1]
    mean_std = {name: numbers(state, name, sizes[0]) for name in ("mean", "std")}
    low_high = {name: numbers(action, name, sizes[1])[:moving] for name in ("min", "max")}
    parts = [VectorPart("arm", moving, Normalization("min_max", low_high))] if moving else []
    steps: tuple[VectorStep, ...] = ()
    if gripper == SIGN:
        parts.append(VectorPart("gripper", 1, Normalization("identity")))
        # A gripper value of zero must become 1, but Threshold tests whether a value is above the limit, which excludes
        # the limit itself. So the sign is inverted first.
        steps = Affine((last,), scale=-1.0), Threshold((last,), above=-1.0, below=1.0)
    return Normalization("mean_std", mean_std, eps=STATE_EPS), tuple(parts), steps


def numbers(part: JsonRecord, name: str, count: int) -> tuple[float, ...]:
    """Return a list of statistics, rounded to float32.

    Raises:
        ConvertError: The list is missing or has another length.
    """
    try:
        values = np.asarray(part[name], np.float32)
    except (ValueError, TypeError):
        values = np.zeros((0, 0), np.float32)
    if values.shape != (count,):
        got = f"{len(values)}" if values.ndim == 1 else "another value"
        raise ConvertError(f"{part.path}: {part.name}{name}: expected a list of {count} numbers, got {got}")
    return tuple(map(float, values))


def tensors(sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    out = dict(sources)
    first, registers = f"{TOWER}embeddings.cls_token", f"{TOWER}embeddings.register_tokens"
    if first in out and registers in out:
        own = [reshape(source, -1, source.shape[-1]) for source in (out.pop(first), out.pop(registers))]
        out["vision.prefix"] = join(*own)
    for name in [name for name in out if name.startswith(TOWER) and name.endswith(".k_proj.weight")]:
        bias = name.replace(".weight", ".bias")
        # DINOv3 has no biases for keys, but Sinew's transformer layer requires them, so use zeros.
        if bias not in out:
            weight = out[name]
            out[bias] = moved(lambda w: np.zeros(len(w), w.dtype), weight, shape=weight.shape[:1])
    return apply(out, RULES)
