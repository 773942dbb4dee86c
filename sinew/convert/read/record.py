"""Read the entries of a JSON file by name. Missing entries, and entries that no code has read, are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sinew.convert.read.files import read_json
from sinew.core import ConvertError

# Names of fields that concern only training. An unread field with such a name is ignored with a note, because any other
# unread field may change the computation.
TRAINING = re.compile(
    r"^(optimizer|scheduler|freeze|unfreeze|fine_?tune|train|training|gradient|grad|loss|ema|wandb|log|save|push|hub"
    r"|checkpoint|augment|augmentation|image_transforms|lora|peft|compile|pretrained|init|warmup|early_stopping)_"
    r"|_(lr|lr_scale|lr_multiplier|weight_decay|loss|loss_weight|loss_coef|dropout|dropout_prob|warmup_steps"
    r"|decay_steps|checkpointing|frozen|label_smoothing)$"
)
MOST_SHOWN = 80  # a message shows at most this many characters of a value
# Entries that transformers writes into every config.json, or that only control how transformers runs the model.
TRANSFORMERS = (
    "_name_or_path architectures auto_map model_type torch_dtype dtype transformers_version use_cache"
    " attn_implementation _attn_implementation _attn_implementation_autoset gradient_checkpointing"
)


def training_note(keys: Iterable[str]) -> str:
    """Return a note for the user: these fields of a configuration were ignored, because they concern only training."""
    return f"config.json: ignored, because these fields concern training only: {', '.join(keys)}"


def shown_fields(fields: Mapping[str, Any]) -> str:
    """Return a text for a message with the names and the values of fields."""
    return ", ".join(f"{key}={json.dumps(value)[:MOST_SHOWN]}" for key, value in fields.items())


class JsonRecord:
    """A JSON object. Reading a missing entry raises an error that names the file.

    ``read`` is the set of entries that were read, so that :meth:`leftover` can list the other entries.
    """

    def __init__(
        self,
        path: Path,
        content: Mapping[str, Any] | None = None,
        name: str = "",
        read: set[str] | None = None,
    ):
        self.path, self.name = path, name
        self.content = read_json(path) if content is None else content
        self.read = set[str]() if read is None else read

    def leftover(self, aside: str, usual: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, ...]:
        """Return notes for the user about entries of a ``config.json`` that no code has read; () for a file with
        another name.

        Args:
            aside: Names of entries to ignore, separated by spaces, because they do not change the computation. The
                entries of :data:`TRANSFORMERS` are ignored too.
            usual: Entries that change the computation, with the only value that Sinew supports. An entry with any other
                value is listed in the notes.
        """
        if self.path.name != "config.json":
            return ()
        unread = {
            f"{self.name}{key}": value
            for key, value in self.content.items()
            if key not in {*self.read, *aside.split(), *TRANSFORMERS.split()}
            and (key not in usual or value != usual[key])
        }
        training = [key for key in unread if TRAINING.search(key.rpartition(".")[2])]
        strange = {key: value for key, value in unread.items() if key not in training}
        notes = [training_note(training)] if training else []
        if strange:
            notes.append(
                f"config.json: not understood, and ignored: {shown_fields(strange)}; check that the policy's"
                " computation does not depend on these fields"
            )
        return tuple(notes)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        if key not in self.content:
            raise ConvertError(
                f"{self.path}: {self.name}{key} is missing; use the complete file of the training run"
            )
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an optional entry; ``default`` if the entry is absent or null."""
        self.read.add(key)
        value = self.content.get(key)
        return default if value is None else value

    def expect(self, **values: Any) -> None:
        """Raise ConvertError if an entry differs from the value in ``values``, the only one that Sinew supports.

        The entry may be absent or null.
        """
        for key, value in values.items():
            if (value_there := self.get(key, value)) != value:
                raise ConvertError(f"{self.path}: {self.name}{key}: expected {value!r}, got {value_there!r}")

    def filled(self, defaults: Mapping[str, Any]) -> JsonRecord:
        """Return a copy of the record. Entries that are absent or null have the values of ``defaults``."""
        present = {key: value for key, value in self.content.items() if value is not None}
        return JsonRecord(self.path, {**defaults, **present}, self.name, self.read)

    def part(self, key: str) -> JsonRecord:
        """Return an entry that is a JSON object, as a record.

        Raises:
            ConvertError: The entry is missing or is not a JSON object.
        """
        content = self[key]
        if not isinstance(content, dict):
            raise ConvertError(
                f"{self.path}: {self.name}{key}: expected an object, got {type(content).__name__}"
            )
        return JsonRecord(self.path, content, f"{self.name}{key}.")
