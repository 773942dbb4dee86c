"""Convert OmniVLA-edge's file ``omnivla-edge.pth``, in which torch stored only the model's tensors.

The sizes are read from the tensors. The number of attention heads and the camera rate are constants in OmniVLA's
inference script. The text encoder is OpenAI's CLIP ViT-B/32, which is a separate model: ``--vlm`` names its folder in
transformers' layout. Sources: NHirose/OmniVLA and LadissonLai/OmniVLA (inference/model_omnivla_edge.py,
run_omnivla_edge.py, utils_policy.py), lukemelas/EfficientNet-PyTorch (model.py, utils.py), openai/CLIP (clip/model.py,
clip/clip.py).
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert import silent
from sinew.convert.conversion import Conversion
from sinew.convert.options import ConvertOptions, Setting
from sinew.convert.read.files import named
from sinew.convert.read.record import JsonRecord
from sinew.convert.read.safetensors import read_weights
from sinew.convert.read.torch_zip import read_torch
from sinew.convert.tensors import Rule, apply, computed, constant, reshape, split_qkv
from sinew.convert.tokenizer_files import TokenizerFiles, find_model_dir, find_tokenizer
from sinew.core import CameraSpec, ConvertError, PolicySpec
from sinew.families.omnivla import robot
from sinew.families.omnivla.edge import EdgeConfig, FilmConfig
from sinew.families.omnivla.efficientnet import DEPTHS, NORM_EPS, EfficientNetConfig
from sinew.families.omnivla.goals import GOALS, KINDS, POSE, kinds, table
from sinew.layers.clip_text import ClipTextConfig
from sinew.layers.resnet import NORM_EPS as FILM_EPS
from sinew.layers.resnet import folded
from sinew.layers.vit import BlockConfig
from sinew.models.solvers import SINGLE
from sinew.steps.image.base import ImageRecipe, ImageStep
from sinew.steps.image.resize import Resize
from sinew.steps.image.scales import Scales
from sinew.steps.prompt.instruction import Instruction

NAMES = ("omnivla-edge",)
OPTIONS = ("vlm", "tokenizer")
SETTINGS = {
    "goals": Setting(
        str, "the kinds of goals to support, separated by commas (default: all of" + ", ".join(GOALS) + ")"
    ),
    **robot.SETTINGS,
}
FILE, VLM = "omnivla-edge.pth", "openai/clip-vit-base-patch32"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # pixel statistics of ImageNet
# Side of a frame and side of the newest frame with text, in pixels: imgsize and imgsize_clip in OmniVLA's runner.
SIDE, LARGE_SIDE = 96, 224
HEADS = 4  # the transformer's mha_num_attention_heads
HEAD_DIM = 64  # width of an attention head; CLIP's code computes the number of heads from it
# The tensors of a batch norm, in the order in which the function folded takes them as arguments.
PARTS = ("weight", "bias", "running_mean", "running_var")
TOWERS = {"obs_encoder": "frames", "goal_encoder_img": "image", "goal_encoder": "satellite"}
# Key: EfficientNet's name of a convolution. Value: (name of the norm after it, Sinew's name of the convolution with the
# merged norm).
CONVS = {
    "_conv_stem": ("_bn0", "stem"),
    "_expand_conv": ("_bn0", "expand"),
    "_depthwise_conv": ("_bn1", "depthwise"),
    "_project_conv": ("_bn2", "project"),
    "_conv_head": ("_bn1", "head"),
}
GATES = {"_se_reduce": "squeeze", "_se_expand": "excite"}
# Key: kind of goal. Value: (name in the checkpoint, Sinew's name) of the layer that reads goals of this kind.
READ = {
    "pose": (r"local_goal\.0", "pose_proj"),
    "satellite": ("compress_obs_enc_map", "satellite_proj"),
    "image": ("compress_goal_enc_img", "image_proj"),
    "language": ("compress_goal_enc_lan", "language_proj"),
}
LAYER, TO = r"decoder\.sa_decoder\.layers\.(\d+)\.", r"layers.\1."
RULES = (
    Rule(
        LAYER + r"self_attn\.in_proj_(weight|bias)", tuple(rf"{TO}attn.{x}_proj.\2" for x in "qkv"), split_qkv
    ),
    Rule(LAYER + r"self_attn\.out_proj\.(.+)", (rf"{TO}attn.o_proj.\2",)),
    Rule(LAYER + r"linear([12])\.(.+)", (rf"{TO}mlp.fc\2.\3",)),
    Rule(LAYER + r"(norm[12]\..+)", (rf"{TO}\2",)),
    Rule(r"decoder\.output_layers\.0\.(.+)", (r"goal_in.\1",)),
    Rule(r"action_predictor\.0\.(.+)", (r"action_out.\1",)),
    Rule(r"compress_obs_enc\.(.+)", (r"frame_proj.\1",)),
    *(Rule(rf"{theirs}\.(.+)", (rf"{ours}.\1",)) for theirs, ours in READ.values()),
    Rule(r"film_model\.film_param_generator\.(.+)", (r"vision.film.film.\1",)),
    Rule(r"film_model\.residual_blocks\.(\d+)\.conv1\.(.+)", (r"vision.film.blocks.\1.mix.\2",)),
)
TEXT_LAYER = r"text_model\.encoder\.layers\.(\d+)\."
TEXT = (
    Rule(r"text_model\.embeddings\.token_embedding\.(.+)", (r"language.embed_tokens.\1",)),
    Rule(r"text_model\.embeddings\.position_embedding\.(.+)", (r"language.places.\1",)),
    Rule(TEXT_LAYER + r"self_attn\.([qkv])_proj\.(.+)", (r"language.layers.\1.attn.\2_proj.\3",)),
    Rule(TEXT_LAYER + r"self_attn\.out_proj\.(.+)", (r"language.layers.\1.attn.o_proj.\2",)),
    Rule(TEXT_LAYER + r"layer_norm([12])\.(.+)", (r"language.layers.\1.norm\2.\3",)),
    Rule(TEXT_LAYER + r"(mlp\.fc[12]\..+)", (r"language.layers.\1.\2",)),
    Rule(r"text_model\.final_layer_norm\.(.+)", (r"language.norm.\1",)),
    Rule(r"text_projection\.(.+)", (r"language.project.\1",)),
)
# Tensors that inference does not use: ImageNet classifiers, a predicted distance that OmniVLA's script discards, the
# layer that torch copied to create the stack of layers, and CLIP's vision tower.
UNUSED_TENSORS = (
    *(f"{tower}._fc." for tower in TOWERS),
    *("dist_predictor.", "decoder.sa_layer.", "film_model.final_classifier."),
    *("vision_model.", "visual_projection.", "logit_scale", "text_model.embeddings.position_ids"),
)
# Prefixes of the tensors that are not needed if no supported goal has this kind.
UNUSED_WITHOUT_KIND = {
    "pose": ("local_goal.",),
    "satellite": ("goal_encoder.", "compress_obs_enc_map."),
    "image": ("goal_encoder_img.", "compress_goal_enc_img."),
    "language": ("film_model.", "compress_goal_enc_lan."),
}
EXPECTED = f"use {FILE} of OmniVLA-edge's repository"


def file_of(path: Path) -> Path:
    """Return the file of weights: the path itself, or the file in the folder."""
    return path / FILE if path.is_dir() else path


def recognises(path: Path) -> bool:
    """Return True for the file with the published name, for its folder, and for any other ``.pth`` file."""
    file = file_of(path)
    return file.suffix == ".pth" and file.is_file()


def read(path: Path, options: ConvertOptions) -> Conversion:
    """Read a checkpoint. The weights are read later, when the bundle is written.

    Raises:
        ConvertError: The checkpoint is not a supported OmniVLA-edge.
    """
    file, goals = file_of(path), goals_of(options)
    weights_of_file = read_torch(file)
    read_kinds = kinds(goals)
    dead = (
        *UNUSED_TENSORS,
        *(name for kind in KINDS if kind not in read_kinds for name in UNUSED_WITHOUT_KIND[kind]),
    )
    tensors, sources = dict(weights_of_file), [file]
    clip: tuple[JsonRecord, TokenizerFiles] | None = None
    if "language" in read_kinds:
        clip_config, tokenizer, weights, files = clip_of(file, options)
        clip, tensors = (clip_config, tokenizer), tensors | weights
        sources += [*files, tokenizer.path]
    sizes = TensorSizes(file, tensors)
    with named(file):
        config = model_config(sizes, goals, clip)
    return Conversion(
        format="omnivla-edge",
        config=config,
        spec=spec(config, file, options),
        processing=processing(config, clip, options),
        tokenizer=clip[1].text if clip else silent.TOKENIZER,
        tensors=our_tensors(tensors, config, dead),
        dead=dead,
        sources=sources,
        notes=notes(config, options),
    )


def goals_of(options: ConvertOptions) -> tuple[int, ...]:
    """Return the numbers of the goals in ``--set goals``, or of all goals if the option is not set."""
    text = str(options.setting("goals", "")) or ",".join(GOALS)
    numbers = {frozenset(goal.split("+")): number for number, goal in enumerate(GOALS)}
    selection = []
    for word in (part.strip() for part in text.split(",")):
        number = numbers.get(frozenset(word.split("+")))
        if number is None or number in selection:
            problem = "a goal that the policy was trained for" if number is None else "each goal once"
            raise ConvertError(f"--set goals: expected {problem} (use {', '.join(GOALS)}), got {word!r}")
        selection.append(number)
    return tuple(sorted(selection))


class TensorSizes:
    """The shapes of a checkpoint's tensors. A missing tensor raises an error with its name."""

    def __init__(self, file: Path, tensors: dict[str, TensorSource]):
        self.file, self.tensors = file, tensors

    def of(self, name: str, axes: int) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            ConvertError: The tensor is missing or has another number of axes.
        """
        source = self.tensors.get(name)
        if source is None:
            raise ConvertError(f"{self.file}: the tensor {name} is missing; {EXPECTED}")
        if len(source.shape) != axes:
            raise ConvertError(f"{self.file}: {name}: expected {axes} axes, got {list(source.shape)}")
        return source.shape

    def count(self, pattern: str) -> int:
        """Return how many different numbers the group of ``pattern`` matches in the names of the tensors."""
        return len({int(m[1]) for name in self.tensors if (m := re.match(pattern, name))})


def model_config(
    sizes: TensorSizes, goals: tuple[int, ...], clip: tuple[JsonRecord, TokenizerFiles] | None
) -> EdgeConfig:
    read_kinds = kinds(goals)
    _, places, size = sizes.of("decoder.positional_encoding.pos_enc", 3)
    history = places - len(KINDS)
    outputs = sizes.count(r"decoder\.output_layers\.(\d+)\.")
    if (chunk := sizes.of("action_predictor.0.weight", 2)[0]) % POSE:
        raise ConvertError(
            f"{sizes.file}: action_predictor.0: expected a multiple of {POSE} rows, got {chunk}"
        )
    if "image" in read_kinds and (got := sizes.of("goal_encoder_img._conv_stem.weight", 4)[1]) != 6:
        raise ConvertError(
            f"{sizes.file}: goal_encoder_img: expected 6 channels (a frame and the goal), got {got}. Sinew does not"
            " support late fusion"
        )
    state = POSE * ("pose" in read_kinds) + (len(goals) > 1)
    return EdgeConfig(
        vision=tower_config(sizes, "obs_encoder"),
        goals=goals,
        history=history,
        side=SIDE,
        head=BlockConfig(
            size,
            sizes.of("decoder.sa_decoder.layers.0.linear1.weight", 2)[0],
            sizes.count(LAYER),
            HEADS,
        ),
        reduced=tuple(sizes.of(f"decoder.output_layers.{n}.weight", 2)[0] for n in range(1, outputs)),
        chunk_size=chunk // POSE,
        max_state_dim=history * state,
        large_side=LARGE_SIDE if clip else 0,
        film=film_config(sizes) if clip else None,
        language=text_config(sizes, clip[0]) if clip else None,
    )


def tower_config(sizes: TensorSizes, tower: str) -> EfficientNetConfig:
    ends = np.cumsum(DEPTHS)
    if (blocks := sizes.count(rf"{tower}\._blocks\.(\d+)\.")) != ends[-1]:
        raise ConvertError(
            f"{sizes.file}: {tower}: expected the {ends[-1]} blocks of efficientnet-b0, got {blocks}"
        )
    return EfficientNetConfig(
        stem=sizes.of(f"{tower}._conv_stem.weight", 4)[0],
        widths=tuple(sizes.of(f"{tower}._blocks.{end - 1}._project_conv.weight", 4)[0] for end in ends),
        out_channels=sizes.of(f"{tower}._conv_head.weight", 4)[0],
    )


def film_config(sizes: TensorSizes) -> FilmConfig:
    begin, end = (f"film_model.{part}_feature_extractor.layers" for part in ("initial", "intermediate"))
    return FilmConfig(
        channels=sizes.of(f"{begin}.0.0.weight", 4)[0],
        blocks=sizes.count(r"film_model\.residual_blocks\.(\d+)\."),
        widths=tuple(
            sizes.of(f"{end}.{n}.0.weight", 4)[0] for n in range(sizes.count(re.escape(end) + r"\.(\d+)\."))
        ),
        rows=LARGE_SIDE // 8,  # FiLM follows three convolutions with stride 2.
    )


def text_config(sizes: TensorSizes, record: JsonRecord) -> ClipTextConfig:
    vocabulary, width = sizes.of("text_model.embeddings.token_embedding.weight", 2)
    text = record.part("text_config") if "text_config" in record.content else record
    text.expect(hidden_size=width, hidden_act="quick_gelu", num_attention_heads=max(1, width // HEAD_DIM))
    return ClipTextConfig(
        hidden_size=width,
        intermediate_size=sizes.of("text_model.encoder.layers.0.mlp.fc1.weight", 2)[0],
        num_layers=sizes.count(TEXT_LAYER),
        num_heads=max(1, width // HEAD_DIM),
        positions=sizes.of("text_model.embeddings.position_embedding.weight", 2)[0],
        vocab_size=vocabulary,
        out_size=sizes.of("text_projection.weight", 2)[0],
    )


def clip_of(
    file: Path, options: ConvertOptions
) -> tuple[JsonRecord, TokenizerFiles, dict[str, TensorSource], list[Path]]:
    """Read the text encoder from the folder of --vlm.

    Returns:
        Its configuration, tokenizer, tensors and files.

    Raises:
        ConvertError: The folder does not contain CLIP in transformers' layout.
    """
    patterns = "config.json tokenizer*.json model.safetensors"
    home = find_model_dir(VLM, options.vlm, file.parent, "--vlm", patterns)
    record = JsonRecord(home / "config.json")
    tensors, files = read_weights(home)
    if "text_model.embeddings.token_embedding.weight" not in tensors:
        raise ConvertError(
            f"{home}: expected CLIP in transformers' layout, got no text_model.embeddings. Pass its folder with --vlm"
        )
    return record, find_tokenizer(options, home, whose="CLIP's"), tensors, [home / "config.json", *files]


def our_tensors(
    sources: dict[str, TensorSource], config: EdgeConfig, dead: tuple[str, ...]
) -> dict[str, TensorSource]:
    """Return the model's tensors under Sinew's names. Tensors that the conversion does not use keep their names."""
    unread = {name: source for name, source in sources.items() if name.startswith(dead)}
    own = {n: s for n, s in sources.items() if n not in unread and not n.endswith("num_batches_tracked")}
    out: dict[str, TensorSource] = {}
    for theirs, ours in TOWERS.items():
        out |= tower_tensors(own, f"{theirs}.", f"vision.{ours}.")
    if config.film is not None:
        out |= film_tensors(own)
        out["vision.film.places"] = constant("vision.film.places", map_places(config.film.rows))
    positions = reshape(own.pop("decoder.positional_encoding.pos_enc"), -1, config.head.hidden_size)
    out["places"] = picked(positions, config)
    out["reads"] = constant("reads", np.array(table(config.goals), np.float32))
    outputs = tuple(
        Rule(rf"decoder\.output_layers\.{n + 1}\.(.+)", (rf"reduce.{n}.\1",))
        for n in range(len(config.reduced))
    )
    return unread | out | apply(own, (*RULES, *outputs, *TEXT))


def picked(places: TensorSource, config: EdgeConfig) -> TensorSource:
    """Select the rows of the position table for the frames and for the supported kinds of goals."""
    indices = [*range(config.history), *(config.history + KINDS.index(kind) for kind in config.kinds)]
    return computed(lambda x: x[indices], places, shape=(len(indices), config.head.hidden_size))


def map_places(count: int) -> np.ndarray:
    """Return the column and the row of each position of a feature map, scaled to -1 to 1, float32 [2, count, count].

    The values are rounded as in torch's arange.
    """
    import torch

    line = torch.arange(-1, 1 + 0.00001, 2 / (count - 1)).numpy()
    return np.stack(np.meshgrid(line, line))


def norm_parts(own: dict[str, TensorSource], name: str) -> list[TensorSource]:
    """Remove the tensors of a batch norm from ``own`` and return them.

    Raises:
        ConvertError: A tensor is missing.
    """
    if missing := [part for part in PARTS if f"{name}.{part}" not in own]:
        raise ConvertError(f"the tensor {name}.{missing[0]} is missing; {EXPECTED}")
    return [own.pop(f"{name}.{part}") for part in PARTS]


def tower_tensors(own: dict[str, TensorSource], theirs: str, ours: str) -> dict[str, TensorSource]:
    """Remove the tensors of a vision tower from ``own``, and return them. Each norm is merged into the convolution
    before it."""
    out = {}
    for name in [name for name in own if name.startswith(theirs) and name.endswith("weight")]:
        if name not in own:
            continue
        *before, conv, _ = name.removeprefix(theirs).split(".")
        place = "".join(f"{part.removeprefix('_')}." for part in before)
        if conv in GATES:
            for part in ("weight", "bias"):
                if (source := own.pop(f"{name[:-6]}{part}", None)) is not None:
                    out[f"{ours}{place}{GATES[conv]}.{part}"] = source
        elif conv in CONVS:
            norm, new = CONVS[conv]
            parts = norm_parts(own, name.removesuffix(f"{conv}.weight") + norm)
            out |= as_one(f"{ours}{place}{new}", own.pop(name), None, parts, NORM_EPS)
    return out


def as_one(
    name: str, weight: TensorSource, bias: TensorSource | None, norm: list[TensorSource], eps: float
) -> dict[str, TensorSource]:
    """Merge a batch norm into the weights of the convolution before it. Return the new weight and bias under
    ``name``."""
    scale, shift, mean, variance = norm
    sources = [weight, scale, shift, mean, variance, *([bias] if bias else [])]

    def make(part: int, w: np.ndarray, *values: np.ndarray) -> np.ndarray:
        own = values[4] if len(values) > 4 else 0.0
        return folded(w, values[0], values[1], values[2] - own, values[3], eps)[part]

    return {
        f"{name}.{value}": computed(partial(make, part), *sources, shape=shape)
        for part, (value, shape) in enumerate((("weight", weight.shape), ("bias", weight.shape[:1])))
    }


def film_tensors(own: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Remove the tensors of the FiLM network from ``own``, and return them with their norms converted.

    A norm after an activation becomes a multiplication and an addition. A norm after a convolution is merged into the
    weights of the convolution.
    """
    out = {}
    for theirs, ours in (("initial", "begin"), ("intermediate", "end")):
        prefix = f"film_model.{theirs}_feature_extractor.layers."
        for name in [n for n in own if n.startswith(prefix) and n.endswith(".running_var")]:
            number = name.removeprefix(prefix).split(".")[0]
            norm, to = norm_parts(own, f"{prefix}{number}.2"), f"vision.film.{ours}.{number}."
            for part in range(2):
                value = ("weight", "bias")[part]
                shape = (norm[0].shape[0], 1, 1)
                out[f"{to}norm.{value}"] = computed(partial(factors, part), *norm, shape=shape)
                if (source := own.pop(f"{prefix}{number}.0.{value}", None)) is not None:
                    out[f"{to}conv.{value}"] = source
    prefix = "film_model.residual_blocks."
    for name in [n for n in own if n.startswith(prefix) and n.endswith(".conv2.weight")]:
        place = name.removesuffix("conv2.weight")
        norm = norm_parts(own, f"{place}norm2")
        to = f"vision.film.blocks.{place.removeprefix(prefix)}conv"
        out |= as_one(to, own.pop(name), own.pop(f"{place}conv2.bias", None), norm, FILM_EPS)
    return out


def factors(
    part: int, scale: np.ndarray, shift: np.ndarray, mean: np.ndarray, variance: np.ndarray
) -> np.ndarray:
    """Return the factor (``part`` 0) or the added number (``part`` 1) to which a frozen batch norm is equal, float64
    [C, 1, 1]."""
    both = folded(np.ones((len(scale), 1, 1, 1)), scale, shift, mean, variance, FILM_EPS)
    return both[part].reshape(-1, 1, 1)


def spec(config: EdgeConfig, file: Path, options: ConvertOptions) -> PolicySpec:
    prompt_fields = {"max_prompt_tokens": config.language.positions} if config.language else silent.SPEC
    return PolicySpec(
        architecture="omnivla_edge",
        name=file.stem,
        cameras=tuple(CameraSpec(name, *robot.FRAME) for name in config.cameras),
        state=robot.state(config.goals, "pose" in config.kinds, options)[0],
        action=robot.ACTION,
        chunk_size=config.chunk_size,
        noise_dim=0,
        solver_steps=1,
        solver=SINGLE,
        control_hz=robot.HZ,
        n_action_steps=1,
        history=config.history,
        **prompt_fields,
    )


def processing(
    config: EdgeConfig, clip: tuple[JsonRecord, TokenizerFiles] | None, options: ConvertOptions
) -> Processing:
    resize: ImageStep = Resize(SIDE, SIDE, "pil_bicubic")
    if config.large_side:
        resize = Scales((config.large_side, SIDE))
    height, width = resize.size(*robot.FRAME)
    prompt = silent.PROMPT
    if clip is not None and config.language is not None:
        prompt = PromptRecipe(
            max_tokens=config.language.positions,
            vocab_size=config.language.vocab_size,
            pad_token_id=0,
            padding="max_length",
            steps=(Instruction(),),
        )
    return Processing(
        image=ImageRecipe(height, width, (resize,), MEAN, STD),
        prompt=prompt,
        state=Normalization("identity"),
        action=Normalization("identity"),
        state_steps=robot.state(config.goals, "pose" in config.kinds, options)[1],
        action_steps=robot.path_steps(options),
        padded_state_dim=config.max_state_dim,
        padded_action_dim=POSE,
        all_cameras=True,
    )


def notes(config: EdgeConfig, options: ConvertOptions) -> tuple[str, ...]:
    """Return notes for the user about facts that no file of the checkpoint contains."""
    lines = [
        *robot.notes(config.goals, "pose" in config.kinds, options),
        f"{HEADS} attention heads and {robot.HZ:g} Hz, the constants of OmniVLA's runner",
    ]
    if config.language is not None:
        lines.append("a text with more tokens than CLIP's limit is rejected; OmniVLA's runner would cut it")
    return tuple(lines)
