"""The names of the parts of an observation and of a chunk in the GR00T protocol.

A bundle defines them with a :class:`KeyMap` of wire "groot" (keys "video/front", "state/single_arm",
"language/task"). Without a key map, the names come from the bundle's cameras and from the names of its dimensions:
"left_arm.0", "left_arm.1", "gripper.0" give the groups left_arm and gripper. Without groups the keys are "state" and
"actions".
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sinew.core import CameraSpec, ObservationError, PolicySpec
from sinew.serve.wires.field_names import key_maps

PROMPT = "annotation.human.task_description"  # default key of the instruction; most of GR00T's robots send this key
STATE, ACTIONS = "state", "actions"
MODALITIES = ("video", "state", "language")
_PREFIXES = ("video.", "state.", "language.", "annotation.")

_MEMBER = re.compile(r"(.+)\.\d+")


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of the GR00T protocol for one policy.

    Attributes:
        cameras: Key -> camera of the policy.
        states: The keys of the state, in the state's order.
        state_parts: Key of the state -> its columns; {} if they are not known.
        actions: Key -> columns of the chunk.
        prompt: The key of the instruction.
        fixed: True if the bundle has a key map.
    """

    cameras: dict[str, str]
    states: tuple[str, ...]
    state_parts: dict[str, slice]
    actions: dict[str, slice]
    prompt: str
    fixed: bool

    @classmethod
    def of(cls, spec: PolicySpec) -> Names:
        actions = _groups(spec.action.names) or {ACTIONS: slice(0, spec.action.dim)}
        parts = _groups(spec.state.names)
        for keys in key_maps(spec, "groot"):
            states = tuple(_bare("state", key) for key in keys.state)
            return cls(
                cameras={_bare("video", key): camera for key, camera in keys.images.items()},
                states=states,
                state_parts=dict(zip(states, parts.values(), strict=True))
                if len(parts) == len(states)
                else {},
                actions=actions,
                prompt=_bare("language", keys.prompt),
                fixed=True,
            )
        return cls(
            cameras={camera.name: camera.name for camera in spec.cameras},
            states=tuple(parts) or (STATE,),
            state_parts=parts,
            actions=actions,
            prompt=PROMPT,
            fixed=False,
        )

    def videos(self, spec: PolicySpec) -> dict[str, CameraSpec]:
        """Return a mapping from the protocol's key of each camera to the specification of the camera."""
        cameras = {camera.name: camera for camera in spec.cameras}
        return {key: cameras[name] for key, name in self.cameras.items() if name in cameras}

    def select(
        self, observation: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[str, Any]], list[tuple[str, Any]], tuple[str, Any] | None]:
        """Return the policy's inputs in an observation, which may be nested or flat.

        Returns:
            The frames by camera, the parts of the state in their order, and the instruction. Each entry is (key,
            value).

        Raises:
            ObservationError: A key is missing or unknown.
        """
        _refuse_unknown(observation, self.prompt)
        video, state = _modality(observation, "video"), _modality(observation, "state")
        frames = {
            camera: (f"video.{key}", video[key]) for key, camera in self.cameras.items() if key in video
        }
        if not frames:
            raise ObservationError(
                "video", f"frames under one of the keys {', '.join(self.cameras)}", _some(video)
            )
        for key in video:
            if key not in self.cameras:
                close = difflib.get_close_matches(key, list(self.cameras), n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ObservationError(
                    f"video.{key}"[:100],
                    f"one of the cameras {', '.join(self.cameras)}",
                    f"an unknown camera{hint}",
                )
        keys = self.states
        if keys == (STATE,) and not self.fixed and len(state) == 1:
            keys = tuple(state)  # a single state may have any name
        for key in keys:
            if key not in state:
                raise ObservationError(f"state.{key}", "numbers", f"nothing; the request has {_some(state)}")
        return frames, [(f"state.{key}", state[key]) for key in keys], self._instruction(observation)

    def unread(self, observation: Mapping[str, Any]) -> list[str]:
        """Return a sentence if there are states or instructions that the policy does not read.

        Simulations send all their states and instructions, so unread ones are reported but not rejected.
        :meth:`select` has rejected all other unknown keys.
        """
        state, languages = _modality(observation, "state"), _languages(observation, self.prompt)
        strange = [f"state.{key}" for key in state if key not in self.states] if len(state) > 1 else []
        strange += (
            [f"language.{key}" for key in languages if key != self.prompt] if len(languages) > 1 else []
        )
        names = ", ".join(key[:60] for key in strange[:12])
        return [f"the policy does not read {names}"] if strange else []

    def _instruction(self, observation: Mapping[str, Any]) -> tuple[str, Any] | None:
        languages = _languages(observation, self.prompt)
        if self.prompt in languages:
            return f"language.{self.prompt}", languages[self.prompt]
        if len(languages) > 1:
            raise ObservationError("language", f"the key {self.prompt}", _some(languages))
        return next(((f"language.{key}", value) for key, value in languages.items()), None)


def _refuse_unknown(observation: Mapping[str, Any], prompt: str) -> None:
    """Raise ObservationError for a key that belongs to no modality (video, state or language) of the protocol."""
    for key in observation:
        if key not in (*MODALITIES, "task", prompt) and not key.startswith(_PREFIXES):
            expected = f"one of {', '.join(MODALITIES)}, or keys that begin with {', '.join(_PREFIXES)}"
            raise ObservationError.unknown(key, MODALITIES, expected)


def _languages(observation: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    nested = observation.get("language")
    if isinstance(nested, dict):
        return nested
    return {
        key: value
        for key, value in observation.items()
        if key == prompt or key == "task" or key.startswith(("annotation.", "language."))
    }


def _modality(observation: Mapping[str, Any], modality: str) -> dict[str, Any]:
    nested = observation.get(modality)
    if isinstance(nested, dict):
        return nested
    prefix = f"{modality}."
    return {key[len(prefix) :]: value for key, value in observation.items() if key.startswith(prefix)}


def _bare(modality: str, key: str) -> str:
    for separator in "/.":
        key = key.removeprefix(modality + separator)
    return key


def _groups(names: tuple[str, ...]) -> dict[str, slice]:
    """Group dimensions by the part of their name before the number: "left_arm.0" and "left_arm.1" form the group
    "left_arm".

    Args:
        names: Names of the dimensions in their order.

    Returns:
        Group -> its columns. The result is {} if a name has no number, or if the columns of a group are not neighbours.
    """
    members = [_MEMBER.fullmatch(name) for name in names]
    groups: dict[str, slice] = {}
    at = 0
    for group, run in itertools.groupby(members, lambda match: match[1] if match else None):
        count = len(list(run))
        if group is None or group in groups:
            return {}
        groups[group] = slice(at, at + count)
        at += count
    return groups


def _some(found: Mapping[str, Any]) -> str:
    return f"keys {', '.join(sorted(key[:40] for key in list(found)[:12]))}" if found else "no keys"
