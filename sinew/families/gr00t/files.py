"""Read the files of a GR00T checkpoint, and build the parts of a bundle that are the same for all versions of GR00T.

These parts are the action head, the embodiment, the prompt and the policy specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.bundle.writer import TensorSource
from sinew.convert.lerobot.folder import name_of
from sinew.convert.options import ConvertOptions
from sinew.convert.read.files import directory_config
from sinew.convert.read.record import JsonRecord
from sinew.convert.read.safetensors import read_weights
from sinew.convert.tokenizer_files import TokenizerFiles
from sinew.core import MAX_SIZE, CameraSpec, ConvertError, KeyMap, PolicySpec
from sinew.families.gr00t.head import HeadConfig
from sinew.families.gr00t.model import SOLVER
from sinew.families.gr00t.vectors import Modalities, Vectors, read_vectors
from sinew.layers.dit import DiTConfig
from sinew.steps.image.base import ImageRecipe
from sinew.steps.prompt.as_list import AsList
from sinew.steps.prompt.image import Image
from sinew.steps.prompt.template import sentence
from sinew.steps.prompt.words_only import InstructionPrompt

# Fields of config.json that the converter does not read: precisions, training options, and values that
# processor_config.json also has.
UNREAD_FIELDS = (
    "model_dtype model_name backbone_model_type model_revision tune_top_llm_layers tune_llm tune_visual tune_projector"
    " tune_diffusion_model tune_vlln use_flash_attention load_bf16 collator_overwrite_image_inputs eagle_collator"
    " backbone_trainable_params_fp32 image_crop_size image_target_size shortest_image_edge crop_fraction"
    " random_rotation_angle color_jitter_params use_albumentations_transforms extra_augmentation_config"
    " formalize_language apply_sincos_state_encoding use_percentiles use_relative_action use_mean_std"
    " input_embedding_dim noise_beta_alpha noise_beta_beta noise_s max_num_embodiments attn_dropout"
    " state_dropout_prob state_additive_noise_scale rtc_ramp_rate action_dim action_horizon compute_dtype hidden_size"
    " expand_batch backbone_cfg action_head_cfg"
)
SUPPORTED_VALUES = {"reproject_vision": False, "exclude_state": False}
LEROBOT_PREFIX = "_groot_model."
TEXT_TOKENS = 256  # largest number of tokens of an instruction; NVIDIA's code has no limit


def model_type(path: Path) -> str | None:
    """Return the ``model_type`` in a directory's config.json, or None."""
    return _config_entry(path, "model_type")


def is_lerobot(path: Path) -> bool:
    """Return True for LeRobot's layout. Its config.json has the type "groot". Some LeRobot versions write no type."""
    return _config_entry(path, "type") == "groot" or bool(
        _config_entry(path, "base_model_path") and _config_entry(path, "tokenizer_assets_repo")
    )


def _config_entry(path: Path, key: str) -> str | None:
    entry = directory_config(path).get(key)
    return entry if isinstance(entry, str) else None


@dataclass(frozen=True)
class Embodiment:
    """The robot for which a bundle is made. GR00T calls it an embodiment.

    Attributes:
        tag: Tag of the robot.
        number: Index of the robot's weights. The checkpoint stores some weights once for each robot.
    """

    tag: str
    number: int


@dataclass(frozen=True)
class RobotRecord:
    """The description of a robot, read from the files of a checkpoint.

    Attributes:
        embodiment: The robot.
        cameras: The cameras, in the model's order.
        vectors: State and action.
        language: Key of the instruction in requests of the GR00T protocol.
        files: The files that were read.
        notes: Assumptions, for the user.
        history: Number of observation steps of the cameras, and number of control steps between two of them. Only the
            newest state is read.
    """

    embodiment: Embodiment
    cameras: Sequence[CameraSpec]
    vectors: Vectors
    language: str
    files: list[Path]
    notes: tuple[str, ...] = ()
    history: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class EagleParts:
    """The result of reading a checkpoint of a GR00T version whose backbone is Eagle, in the same form for all layouts.

    Attributes:
        architecture: Name of the architecture.
        format: Name of the checkpoint's layout. The bundle records it as its origin.
        head: Record with the head's sizes.
        records: The JSON records of config.json. The conversion fails if it neither reads an entry nor has its name in
            a list of ignored entries.
        layers: Number of layers of the language model that are used.
        backbone: Regular expression of the prefix of Eagle's tensor names.
        tensors: The tensors by their names in the checkpoint.
        files: All files that were read, except Eagle's files.
        robot: The robot's description.
        image: The image recipe.
        text_first: True if the instruction comes before the images in the prompt.
        generate: True if the chat template adds the start of the answer.
        formal: True if the instruction is converted to lower case without punctuation.
        listed: True if the instruction is written as a Python list with one text, such as ['pick up the cup'].
    """

    architecture: str
    format: str
    head: JsonRecord
    records: tuple[JsonRecord, ...]
    layers: int
    backbone: str
    tensors: dict[str, TensorSource]
    files: list[Path]
    robot: RobotRecord
    image: ImageRecipe
    text_first: bool
    generate: bool
    formal: bool
    listed: bool


class NvidiaFiles:
    """A folder of N1.6 or N1.7 in NVIDIA's layout.

    Attributes:
        format: Name of the checkpoint's layout. The bundle records it as its origin.
        transforms: Project whose image transforms are used if albumentations is off.
        frames: Height and width of the camera frames in pixels, if the files contain them.
        notes: Assumptions, for the user.
    """

    format = "gr00t-n1.7"
    transforms = "nvidia"
    frames: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, options: ConvertOptions):
        self.path, self.options = path, options
        self.config = JsonRecord(path / "config.json")
        processor = path / "processor_config.json"
        if not processor.is_file():
            raise ConvertError(
                f"{path}: processor_config.json is missing. Copy it from the training run, because it defines the"
                " cameras, the state and the action"
            )
        self.processor = JsonRecord(processor).part("processor_kwargs")

    @cached_property
    def embodiment(self) -> Embodiment:
        """The embodiment that the user chose, or the only one.

        Raises:
            ConvertError: The choice is missing or wrong. The message lists the possible tags.
        """
        numbers = self.numbers
        configured = self.processor.part("modality_configs").content
        tags = [tag for tag in configured if tag in numbers and tag in self._statistics]
        return choose(self.options.embodiment, tags, numbers, self.path)

    @property
    def name(self) -> str:
        return name_of(self.path)

    @cached_property
    def numbers(self) -> Mapping[str, Any]:
        """The index of each embodiment (robot). The checkpoint stores some weights once per embodiment, in the order
        of these indices.
        """
        return JsonRecord(self.path / "embodiment_id.json").content

    @cached_property
    def _statistics(self) -> Mapping[str, Any]:
        file = self.path / "statistics.json"
        if not file.is_file():
            raise ConvertError(
                f"{self.path}: statistics.json is missing. Copy it from the training run, because it defines the"
                " scale of states and actions"
            )
        return JsonRecord(file).content

    @cached_property
    def modalities(self) -> Modalities:
        """The configuration of the robot's inputs and outputs ("modalities"), with their statistics."""
        tag = self.embodiment.tag
        record = self.processor.part("modality_configs").part(tag)
        return Modalities(record.content, self._statistics[tag], tag, self.processor.path)

    @property
    def language(self) -> str:
        """Key of the instruction in requests of the GR00T protocol."""
        return self.modalities.keys("language")[0]

    def cameras(self, frames: tuple[int, int]) -> list[CameraSpec]:
        """Return the cameras in the model's order, with frames of this height and width in pixels."""
        return [CameraSpec(key, *frames) for key in self.modalities.keys("video")]

    def robot(self, frames: tuple[int, int]) -> RobotRecord:
        """Read the robot's description. ``frames`` is the height and width of its camera frames in pixels."""
        cameras, vectors = self.cameras(frames), self.vectors
        return RobotRecord(
            self.embodiment, cameras, vectors, self.language, self.files, self.notes, self.history
        )

    @property
    def history(self) -> tuple[int, int]:
        """Number of observation steps of the cameras, and number of control steps between two of them."""
        return self.modalities.history("video")

    @cached_property
    def vectors(self) -> Vectors:
        """State and action with their normalisation."""
        self.modalities.only_now("state")
        return read_vectors(self.modalities, self.processor.content)

    @property
    def files(self) -> list[Path]:
        """The files of this folder from which the content of the bundle is read."""
        names = ("config.json", "processor_config.json", "statistics.json", "embodiment_id.json")
        return [*self.weights[1], *(self.path / name for name in names)]

    @cached_property
    def weights(self) -> tuple[dict[str, TensorSource], list[Path]]:
        """The tensors under NVIDIA's names, and their files."""
        return nvidia_weights(self.path)


def nvidia_weights(path: Path) -> tuple[dict[str, TensorSource], list[Path]]:
    """Read a folder's tensors under NVIDIA's names, without the prefix that LeRobot adds, and list the weight files."""
    tensors, files = read_weights(path)
    return {name.removeprefix(LEROBOT_PREFIX): source for name, source in tensors.items()}, files


def untied(tensors: Mapping[str, TensorSource], head: str, table: str) -> dict[str, TensorSource]:
    """Return ``tensors`` with the token table under the name ``table``, and without the language head, which is the
    same tensor.

    A checkpoint stores the shared tensor under one of the two names, and different writers use different names.
    """
    remaining = dict(tensors)
    source = remaining.pop(head, None)
    if source is not None:
        remaining.setdefault(table, source)
    return remaining


def choose(tag_option: str, tags: Sequence[str], numbers: Mapping[str, Any], where: Path) -> Embodiment:
    """Choose the robot (embodiment) for which the bundle is made.

    Args:
        tag_option: The user's choice, or "" for the only embodiment.
        tags: Tags that can be chosen.
        numbers: Index of each tag in the weights.
        where: File or folder for error messages.

    Raises:
        ConvertError: The choice is missing or wrong. The message lists the possible tags.
    """
    tag_list = ", ".join(sorted(tags))
    if not tags:
        raise ConvertError(
            f"{where}: expected a robot with an id, a modality configuration and statistics, got"
            f" {tag_option or 'none'}. Use the complete files of the training run"
        )
    if not tag_option and len(tags) != 1:
        raise ConvertError(f"{where} contains several robots. Choose one with --embodiment TAG: {tag_list}")
    tag = tag_option or tags[0]
    if tag not in tags:
        raise ConvertError(f"--embodiment {tag}: unknown in {where}. Use one of: {tag_list}")
    number = numbers[tag]
    if not isinstance(number, int) or number < 0:
        raise ConvertError(f"{where}: the id of embodiment {tag!r}: expected a whole number, got {number!r}")
    return Embodiment(tag, number)


def head_config(config: JsonRecord, masks: bool) -> HeadConfig:
    """Build the configuration of the action head.

    Args:
        config: config.json, or its action_head_cfg in N1.5.
        masks: True if the blocks that read the features alternately read only text tokens and only image tokens.
    """
    dit, refine = config.part("diffusion_model_cfg"), config.get("vl_self_attention_cfg") or {}
    layers = dit["num_layers"]
    dit.filled({"interleave_self_attention": False}).expect(
        interleave_self_attention=True, positional_embeddings=None, norm_type="ada_norm"
    )
    has_refinement = bool(refine.get("num_layers"))
    return HeadConfig(
        dit=DiTConfig(
            num_layers=layers,
            num_heads=dit["num_attention_heads"],
            head_dim=dit["attention_head_dim"],
            output_size=dit["output_dim"],
            context_size=config["backbone_embedding_dim"],
            is_cross=tuple(index % 2 == 0 for index in range(layers)),
        ),
        hidden_size=config["hidden_size"],
        buckets=config["num_timestep_buckets"],
        positions=config["max_seq_len"] if config.get("add_pos_embed", True) else 0,
        refine_layers=refine["num_layers"] if has_refinement else 0,
        refine_heads=refine["num_attention_heads"] if has_refinement else 0,
        refine_head_dim=refine["attention_head_dim"] if has_refinement else 0,
        text_every=config["attend_text_every_n_blocks"]
        if masks and config.get("use_alternate_vl_dit")
        else 0,
        future_tokens=config.get("num_target_vision_tokens", 0),
        norm_features=bool(config.get("use_vlln", True)),
    )


def processing(image: ImageRecipe, prompt: PromptRecipe, vectors: Vectors, config: JsonRecord) -> Processing:
    """Build the processing record of a policy. Each part of the state and of the actions has its own normalisation."""
    return Processing(
        image=image,
        prompt=prompt,
        state=Normalization("identity"),
        action=Normalization("identity"),
        padded_state_dim=config["max_state_dim"],
        padded_action_dim=config["max_action_dim"],
        state_parts=vectors.state_parts,
        action_parts=vectors.action_parts,
        action_steps=vectors.action_steps,
        all_cameras=True,
    )


def specification(
    architecture: str,
    name: str,
    robot: RobotRecord,
    config: JsonRecord,
    options: ConvertOptions,
    prompt: PromptRecipe,
    default_prompt: str = "",
) -> PolicySpec:
    """Build the policy specification: cameras, state, actions, solver and rate."""
    cameras, vectors = robot.cameras, robot.vectors
    rows = config["action_horizon"]
    horizon = min(vectors.horizon, rows)
    chunk = options.setting("chunk", horizon)
    if chunk > horizon:
        raise ConvertError(
            f"--set chunk={chunk}: expected at most {horizon}, the number of actions that the model was trained on"
        )
    keys = KeyMap(
        wire="groot",
        images={f"video/{camera.name}": camera.name for camera in cameras},
        state=tuple(f"state/{part.name}" for part in vectors.state_parts),
        prompt=f"language/{robot.language}",
    )
    moments, stride = robot.history
    return PolicySpec(
        architecture=architecture,
        name=name,
        cameras=tuple(cameras),
        state=vectors.state,
        action=vectors.action,
        chunk_size=chunk,
        noise_rows=rows if rows != chunk else 0,
        noise_dim=config["max_action_dim"],
        solver=SOLVER,
        solver_steps=options.setting("solver_steps", config["num_inference_timesteps"]),
        max_prompt_tokens=prompt.max_tokens,
        embodiment=robot.embodiment.tag,
        keys=(keys,),
        default_prompt=default_prompt,
        history=moments,
        history_stride=stride,
        history_states=moments == 1,
    )


def token_prompt(
    template: str,
    tokenizer: TokenizerFiles,
    vocab_size: int,
    placeholder: int,
    image_tokens: int,
    formal: bool,
    listed: bool = False,
) -> PromptRecipe:
    """Build the prompt recipe from a chat template that has already been filled in.

    Args:
        template: The text, with ``{image}`` for a view and ``{prompt}`` for the instruction.
        tokenizer: The tokenizer.
        vocab_size: Number of rows of the token table, which has one row per token id.
        placeholder: Id of the prompt token in whose place the model puts an image token.
        image_tokens: Number of image tokens of a view.
        formal: True if the instruction is written in lower case without punctuation.
        listed: True if the instruction is written as a Python list.
    """
    if (count := image_tokens * template.count("{image}")) > MAX_SIZE:
        raise ConvertError(f"image tokens: expected at most {MAX_SIZE} for all views together, got {count}")
    image_text = tokenizer.token_text(placeholder)
    fixed = tokenizer.encode(template.replace("{image}", image_text * image_tokens).replace("{prompt}", ""))
    return PromptRecipe(
        max_tokens=len(fixed) + TEXT_TOKENS,
        vocab_size=vocab_size,
        pad_token_id=tokenizer.pad_token_id or 0,
        steps=(
            *([InstructionPrompt()] if formal else []),
            *([AsList()] if listed else []),
            *sentence(template, image=Image(image_text, image_tokens, placeholder)),
        ),
    )
