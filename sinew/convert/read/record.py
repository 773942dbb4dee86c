"""A JSON file whose entries are asked for by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sinew.convert.read.files import read_json
from sinew.core import ConvertError

# Names that configurations give to fields of training alone. A field that nothing reads and that has such a name is
# left aside with a note; any other one may change what is computed.
TRAINING = re.compile(
    r"^(optimizer|scheduler|freeze|unfreeze|finetune|train|training|gradient|grad|loss|ema|wandb|log|save|push|hub"
    r"|checkpoint|augment|augmentation|image_transforms|lora|peft|compile|pretrained|init|warmup|early_stopping)_"
    r"|_(lr|lr_scale|lr_multiplier|weight_decay|loss|loss_weight|loss_coef|dropout|dropout_prob|warmup_steps"
    r"|decay_steps|checkpointing|frozen|label_smoothing)$"
)
MOST_SHOWN = 80  # characters of a value in a message
# Entries that transformers writes into every config.json, or that concern its own execution
TRANSFORMERS = (
    "_name_or_path architectures auto_map model_type torch_dtype dtype transformers_version use_cache"
    " attn_implementation _attn_implementation _attn_implementation_autoset gradient_checkpointing"
)


def training_note(keys: Iterable[str]) -> str:
    """Return the note of a conversion about fields that concern training alone."""
    return f"config.json: ignored, as their names concern training only: {', '.join(keys)}"


def shown_fields(fields: Mapping[str, Any]) -> str:
    """Return fields with their values, as a message names them."""
    return ", ".join(f"{key}={json.dumps(value)[:MOST_SHOWN]}" for key, value in fields.items())


class JsonRecord:
    """A JSON object whose missing entries are errors that name the file.

    read: the entries that were asked for, so that :meth:`leftover` can name the others.
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
        """Return notes about the entries of a ``config.json`` that nothing has read; none for another file.

        Args:
            aside: Entries that do not change what is computed, a word each; transformers' own are aside anyway.
            usual: Entries that do, with the only value that is implemented; with another one they are named.
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
        found = [training_note(training)] if training else []
        if strange:
            found.append(
                f"config.json: not understood, and left aside: {shown_fields(strange)}; check that this does not"
                " change what the policy computes"
            )
        return tuple(found)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        if key not in self.content:
            raise ConvertError(f"{self.path}: {self.name}{key} is missing")
        return self.content[key]

    def get(self, key: str, default: Any = None) -> Any:
        """Return an optional entry; null counts as absent."""
        self.read.add(key)
        found = self.content.get(key)
        return default if found is None else found

    def expect(self, **values: Any) -> None:
        """Raise ConvertError for an entry other than the only value that is implemented. Absent and null it may be."""
        for key, value in values.items():
            if (found := self.get(key, value)) != value:
                raise ConvertError(f"{self.path}: {self.name}{key}: expected {value!r}, got {found!r}")

    def filled(self, defaults: Mapping[str, Any]) -> JsonRecord:
        """Return the record with ``defaults`` for what is absent or null."""
        given = {key: value for key, value in self.content.items() if value is not None}
        return JsonRecord(self.path, {**defaults, **given}, self.name, self.read)

    def part(self, key: str) -> JsonRecord:
        """Return an entry that is an object itself."""
        found = self[key]
        if not isinstance(found, dict):
            raise ConvertError(
                f"{self.path}: {self.name}{key}: expected an object, got {type(found).__name__}"
            )
        return JsonRecord(self.path, found, f"{self.name}{key}.")
