"""Read the steps of LeRobot's processor pipelines, and check that a converter supports each step.

A pipeline is a JSON list of named steps next to the weights. A family interprets a step, or ignores it if it does not
affect the computation. For any other step, conversion fails and names the step, because skipping a step silently would
give plausible but wrong actions. Source: ``lerobot/processor`` (0.6), fields of each step's ``get_config``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinew.convert.read.files import read_json
from sinew.core import ConvertError
from sinew.steps.vector.add_state import AddState
from sinew.steps.vector.base import VectorStep

PRE, POST = "policy_preprocessor", "policy_postprocessor"
STEP_KEYS = ("registry_name", "class", "config", "state_file", "artifacts")


@dataclass(frozen=True)
class ProcessorStep:
    """A kind of step that Sinew supports in a pipeline, and the supported values of its configuration.

    Attributes:
        free: Fields of the step's configuration, separated by spaces, that may have any value.
        switches: Fields that are true or false.
        fields: The other fields, with their allowed values.
        ordered: True if the step must follow the ordered steps before it in the family's list.
        required: True if the pipeline must contain the step.
        absent: Sentence that the conversion prints for a file without this step, although the family was trained with
            the step.
        stands_for: Name of the usual step that this step replaces; "" if it replaces none. The step is found by that
            name.
    """

    free: str = ""
    switches: str = ""
    fields: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ordered: bool = True
    required: bool = False
    absent: str = ""
    stands_for: str = ""


BATCH = ProcessorStep(ordered=False)
DEVICE = ProcessorStep("device", fields={"float_dtype": (None, "float32")}, ordered=False)
NORMALIZER = ProcessorStep("eps features norm_map normalize_observation_keys", required=True)
# This step reads the state before it is normalised, so it must come before the normaliser.
RELATIVE = ProcessorStep("exclude_joints action_names", "enabled")
TOKENIZER = ProcessorStep(
    "max_length tokenizer_name",
    fields={
        "task_key": ("task",),
        "padding_side": ("right",),
        "padding": ("longest", "max_length"),
        "truncation": (True,),
    },
    required=True,
)
RENAME = ProcessorStep("rename_map")
ANYWHERE = {"to_batch_processor": BATCH, "device_processor": DEVICE}
POSTPROCESSOR = {
    "unnormalizer_processor": NORMALIZER,
    "absolute_actions_processor": ProcessorStep(switches="enabled"),
    "device_processor": DEVICE,
}


class Pipelines:
    """Both pipelines of a checkpoint directory, checked against the steps that a family supports.

    Args:
        directory: The checkpoint directory.
        supported: "policy_preprocessor" and "policy_postprocessor" -> registry name -> step, in the required order.

    Raises:
        ConvertError: A pipeline is missing, or has a step that the family does not support.

    Attributes:
        directory: The checkpoint directory.
        absent: Sentences for the user about steps that the files lack, although the family was trained with them.
        steps: Pipeline -> name of a step -> record of the step.
        there: True if the checkpoint has pipelines. Checkpoints of LeRobot before 0.4 have none.
    """

    def __init__(self, directory: Path, supported: Mapping[str, Mapping[str, ProcessorStep]]):
        self.directory = directory
        self.absent: list[str] = []
        files = [directory / f"{name}.json" for name in supported]
        there = [file for file in files if file.exists()]
        if 0 < len(there) < len(files):
            missing = next(file for file in files if file not in there)
            raise ConvertError(
                f"{missing}: this file is missing, and {there[0].name} exists; copy both from the checkpoint"
            )
        self.steps = {name: dict(self._read(name, steps)) for name, steps in supported.items()}
        self.there = any(self.steps.values())

    def step(self, pipeline: str, name: str) -> dict[str, Any] | None:
        """Return one step's record; None if the pipeline has no such step."""
        return self.steps[pipeline].get(name)

    def config(self, pipeline: str, name: str) -> dict[str, Any]:
        """Return one step's configuration; {} if the pipeline has no such step."""
        return self.steps[pipeline].get(name, {}).get("config", {})

    def _read(
        self, pipeline: str, supported: Mapping[str, ProcessorStep]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        path = self.directory / f"{pipeline}.json"
        if not path.exists():
            return
        record = read_json(path)
        if unknown := [key for key in record if key not in ("name", "steps")]:
            raise ConvertError(
                f"{path}: expected only the keys name and steps, got {', '.join(unknown)}, which is not understood"
            )
        steps = record.get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise ConvertError(f"{path}: steps: expected a list of steps, each a JSON object")
        order, names = list(supported), set()
        furthest = ""
        for index, step in enumerate(steps):
            name = step.get("registry_name") or step.get("class")
            where = f"{path}: step {index} ({name})"
            if not isinstance(name, str) or name not in supported:
                raise ConvertError(
                    f"{where}: this step is not understood; expected one of {', '.join(supported)}"
                )
            if name in names and supported[name].ordered:
                raise ConvertError(f"{where}: the step occurs twice; remove one of the two")
            names.add(name)
            _check_step(where, step, supported[name])
            if supported[name].ordered:
                if furthest and order.index(name) < order.index(furthest):
                    raise ConvertError(f"{where}: expected this step before {furthest}, got it after")
                furthest = name
            yield supported[name].stands_for or name, step
        if missing := [name for name in supported if supported[name].required and name not in names]:
            raise ConvertError(f"{path}: expected a step {missing[0]}, got none; copy the complete file")
        self.absent += [
            f"{path.name} has no step {name}: {step.absent}"
            for name, step in supported.items()
            if step.absent and name not in names
        ]


def _check_step(where: str, step: dict[str, Any], kind: ProcessorStep) -> None:
    config = step.get("config", {})
    if unknown := [key for key in step if key not in STEP_KEYS]:
        raise ConvertError(f"{where}: {unknown[0]!r} is not understood; expected only {', '.join(STEP_KEYS)}")
    if not isinstance(config, dict):
        raise ConvertError(f"{where}: config: expected a configuration, a JSON object, got {config!r}")
    for key, value in config.items():
        if key in kind.free.split():
            continue
        allowed = (True, False) if key in kind.switches.split() else kind.fields.get(key)
        if allowed is None:
            raise ConvertError(
                f"{where}: {key}={value!r} is not understood; Sinew does not support this field"
            )
        if not any(value is a or (value == a and type(value) is type(a)) for a in allowed):
            raise ConvertError(f"{where}: {key}: expected {' or '.join(map(repr, allowed))}, got {value!r}")


def relative_dims(config: Mapping[str, Any], action_dim: int, where: str) -> tuple[int, ...]:
    """Return the action dimensions that are relative to the state.

    These are all dimensions whose name contains no name of ``exclude_joints``. If the file does not name the actions,
    all dimensions are relative, as in LeRobot (``RelativeActionsProcessorStep._build_mask``).

    Args:
        config: The configuration of ``relative_actions_processor``.
        action_dim: Size of an action.
        where: The file and the step, for messages.
    """
    excluded, names = config.get("exclude_joints") or [], config.get("action_names")
    for key, value in (("exclude_joints", excluded), ("action_names", names or [])):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConvertError(f"{where}: {key}: expected a list of names, got {value!r}")
    if names is None:
        return tuple(range(action_dim))
    tokens = [token.lower() for token in excluded if token]
    absolute = {
        i for i, name in enumerate(names[:action_dim]) if any(token in name.lower() for token in tokens)
    }
    return tuple(i for i in range(action_dim) if i not in absolute)


def action_steps(
    pipelines: Pipelines, config: Mapping[str, Any], state_dim: int, action_dim: int
) -> tuple[VectorStep, ...]:
    """Return the step that makes relative actions absolute; () if the actions are absolute already.

    The step adds the raw state, which LeRobot's ``relative_actions_processor`` stores before the normaliser runs.

    Args:
        pipelines: The checkpoint's pipelines.
        config: The checkpoint's configuration. If there are no pipelines, it states whether actions are relative.
        state_dim: Size of the state.
        action_dim: Size of an action.

    Raises:
        ConvertError: The two pipelines contradict each other, or the state is too short.
    """
    where = f"{pipelines.directory / PRE}.json: relative_actions_processor"
    relative = pipelines.config(PRE, "relative_actions_processor")
    enabled = relative.get("enabled", False)
    if pipelines.there:
        absolute = pipelines.config(POST, "absolute_actions_processor").get("enabled", False)
        if enabled != absolute:
            raise ConvertError(
                f"{where}: enabled={enabled}, but absolute_actions_processor of {POST}.json has enabled={absolute};"
                " both must be equal"
            )
    else:
        where, enabled = "config.json: use_relative_actions", bool(config.get("use_relative_actions"))
        relative = {
            "exclude_joints": config.get("relative_exclude_joints", ["gripper"]),
            "action_names": config.get("action_feature_names"),
        }
    if not enabled:
        if pipelines.there and config.get("use_relative_actions") and not relative:
            pipelines.absent.append(
                f"config.json has use_relative_actions=true, and {PRE}.json has no step relative_actions_processor:"
                " the bundle executes the model's actions without adding the state"
            )
        return ()
    dims = relative_dims(relative, action_dim, where)
    if action_dim > state_dim:
        raise ConvertError(f"{where}: expected a state of {action_dim} values or more, got {state_dim}")
    return (AddState(dims),) if dims else ()
