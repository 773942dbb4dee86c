"""The agreement between a robot and the server before the first observation: names, shapes, units, rate, identity
and mode.

The server's descriptor states the agreement, and a robot's open request repeats it. Each observation is checked
against it. Source: huggingface/lerobot, ``remote_inference/{server,client,chunk_contract}.py`` and
``inference/contracts.py`` at 88807eb6.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sinew import __version__
from sinew.core import Observation, ObservationError, PolicySpec, SinewError
from sinew.serve.decode.frames import PixelBudget
from sinew.serve.policies import Deployment
from sinew.serve.transport.listen import RemoteSettings
from sinew.serve.wires import field_names
from sinew.serve.wires.lerobot.features import DEFAULT_HZ
from sinew.serve.wires.lerobot_remote.envelope import (
    LIMITS,
    MAX_COUNTER,
    RemoteError,
    RemoteFrame,
    Tensor,
    malformed,
)

STATE = "observation.state"
IMAGES = "observation.images."
ACTION = "action"
ALIGNED = "chunk_alignment_v2"
MODES = ("chunk", "rtc_guided", "rtc_trained")
MERGES = ("append", "aligned")
ENCODINGS = ("raw", "jpeg")
ECHOED = ("artifact_identity", "observation_id", "capture_time", "task", "task_version")
CURSORS = ("observation_cursor", "cursor")
ACTION_S = 5.0  # seconds from an observation's arrival to its answer; LeRobot's client waits as long
LANGUAGE_S = 60.0
GRACE_S = 10.0  # seconds that a session stays open after the robot's liveliness token has disappeared
MAX_CHARS = 4096  # longest text, characters; at four bytes each, they fit into one string of the protocol

Kind = Literal["vqa", "next_subtask"]
# Key: kind of text in the protocol. Value: field of the observation that requests it.
KINDS = {"vqa": "question", "next_subtask": "subtask"}


@dataclass(frozen=True, slots=True)
class Feature:
    """One input of the policy, or the action, in the form that robot and server compare."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    names: tuple[str, ...]
    semantics: str

    def to_dict(self) -> dict[str, Any]:
        """Return the feature as plain containers, for a message."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "kind": self.kind,
            "names": list(self.names),
            "semantics": self.semantics,
        }

    @property
    def text(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Contract:
    """The properties of a served policy that robots must match. The server states them in its descriptor.

    Attributes:
        identity: ``sha256:`` and the hash of the bundle.
        semantics: Units of state and action. The robot's operator has to confirm them.
        interval: Seconds from one action to the next.
        features: The inputs in their order, the state first.
        cameras: Name of a feature -> camera of the policy.
        action: The action.
        prediction: Number of actions of a chunk.
        execution: Number of actions that a robot in chunk mode receives.
        modes: Mode of the protocol -> value of ``Observation.rtc``; "" for chunk.
        max_delay: Longest action prefix that the policy was trained to continue; 0 without such training.
        texts: Fields of an observation with which a robot may request text.
    """

    identity: str
    semantics: str
    interval: float
    features: tuple[Feature, ...]
    cameras: Mapping[str, str]
    action: Feature
    prediction: int
    execution: int
    modes: Mapping[str, str]
    max_delay: int
    texts: tuple[str, ...]

    def capabilities(self) -> dict[str, Any]:
        """Return the fields of the client's record of capabilities. The client would reject any other field."""
        rtc = len(self.modes) > 1
        return {
            "modes": list(self.modes),
            "prediction_steps": self.prediction,
            "execution_steps": self.execution,
            "action_interval": self.interval,
            "features": [each.to_dict() for each in self.features],
            "action_feature": self.action.to_dict(),
            "language": bool(self.texts),
            "training_max_delay": self.max_delay,
            "rtc_horizon": self.prediction if rtc else 0,
        }

    def describe(self, deployment: str, instance: str) -> dict[str, Any]:
        """Return the body of a descriptor. The answer to an open request adds the mode and the settings."""
        return {
            "deployment": deployment,
            "instance_id": instance,
            "artifact_identity": self.identity,
            "ready": True,
            "semantics": self.semantics,
            "capabilities": self.capabilities(),
            "execution_contracts": [ALIGNED],
            "limits": {
                "action_deadline_s": ACTION_S,
                "language_deadline_s": LANGUAGE_S,
                "idle_timeout_s": GRACE_S,
                "max_input_chars": MAX_CHARS,
                "max_output_chars": MAX_CHARS,
                "codec": LIMITS,
                "inflight_inference": 1,
            },
            "software": {"name": "sinew", "version": __version__},
            "available": True,
            "failure": None,
            "session": "",
            "session_status": "idle",
        }


def contract(deployed: Deployment, settings: RemoteSettings) -> Contract:
    """Create the contract of a served policy.

    Args:
        deployed: The policy.
        settings: Statements of the server's operator about the robots.

    Returns:
        The contract. It depends only on the two arguments, so the same policy always has the same contract.

    Raises:
        SinewError: A setting does not fit the policy.
    """
    spec, about = deployed.spec, deployed.metadata.get("server", {})
    sizes = dict(settings.camera_sizes)
    names = robot_names(spec)
    semantics = settings.semantics or units(spec)
    features = []
    if spec.state.dim:
        features.append(Feature(STATE, (spec.state.dim,), "float32", "tensor", _joints(spec), semantics))
    for camera in spec.cameras:
        height, width = sizes.pop(camera.name, (camera.height, camera.width))
        if (height, width) != (camera.height, camera.width) and not spec.resizes_frames:
            raise SinewError(
                f"--camera-size {camera.name}: this policy does not resize frames; omit it and let the robot send"
                f" {camera.width} x {camera.height}"
            )
        name = IMAGES + names[camera.name]
        features.append(Feature(name, (height, width, 3), "uint8", "rgb", (), semantics))
    if sizes:
        camera_names = ", ".join(camera.name for camera in spec.cameras)
        raise SinewError(f"--camera-size: expected one of the cameras {camera_names}, got {min(sizes)}")
    guidance = about.get("guidance", ())
    guided = next((kind for kind in ("no-jacobian", "guided") if kind in guidance), None)
    modes = {"chunk": ""}
    if guided is not None:
        modes["rtc_guided"] = guided
    if "trained" in guidance and spec.committed_rows:
        modes["rtc_trained"] = "trained"
    names_of_actions = spec.action.names or (
        _joints(spec) if spec.action.dim == spec.state.dim else _numbered(spec.action.dim)
    )
    return Contract(
        identity=identity(deployed),
        semantics=semantics,
        interval=1 / (spec.control_hz or DEFAULT_HZ),
        features=tuple(features),
        cameras={IMAGES + name: camera for camera, name in names.items()},
        action=Feature(ACTION, (spec.action.dim,), "float32", "tensor", names_of_actions, semantics),
        prediction=spec.chunk_size,
        execution=spec.n_action_steps or spec.chunk_size,
        modes=modes,
        max_delay=spec.committed_rows if "rtc_trained" in modes else 0,
        texts=tuple(about.get("says", ())),
    )


def identity(deployed: Deployment) -> str:
    """Return ``sha256:`` and the hash of the bundle. A policy without a bundle has the hash of its specification."""
    digest = deployed.identity.get("hash", "")
    if not digest:
        digest = hashlib.sha256(json.dumps(deployed.spec.to_dict(), sort_keys=True).encode()).hexdigest()
    return f"sha256:{digest}"


def units(spec: PolicySpec) -> str:
    """Return one word that states the units of the state and of the action. It is used if the server's operator has not
    set ``semantics``.
    """

    def word(which: str, values: tuple[str, ...]) -> str:
        short = ["".join(each.split()) or "?" for each in values]
        return f"{which}:{short[0] if len(set(short)) == 1 else ','.join(short)}"

    if not spec.state.units and not spec.action.units:
        return "as-recorded"
    unit_lists = (("state", spec.state.units), ("action", spec.action.units))
    return "/".join(word(which, values) for which, values in unit_lists if values)


def robot_names(spec: PolicySpec) -> dict[str, str]:
    """Return camera -> the robot's name of the camera, without LeRobot's prefix."""
    keys: Mapping[str, str] = {}
    if field_names.key_maps(spec, "lerobot"):
        keys = field_names.camera_keys(spec, "lerobot")
    return {camera.name: keys.get(camera.name, camera.name).removeprefix(IMAGES) for camera in spec.cameras}


def _joints(spec: PolicySpec) -> tuple[str, ...]:
    """Return the names of the values of the state. LeRobot compares these names with the robot's names."""
    for keys in field_names.key_maps(spec, "lerobot"):
        if len(keys.state) == spec.state.dim and not set(keys.state) <= {STATE}:
            return keys.state
    return spec.state.names or _numbered(spec.state.dim)


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"{index}" for index in range(count))


@dataclass(frozen=True, slots=True)
class Agreed:
    """The settings on which a robot and the server have agreed for one session.

    Attributes:
        contract: The contract of the policy.
        mode: The mode: chunk, rtc_guided or rtc_trained.
        merge: The chunk merging: append or aligned.
    """

    contract: Contract
    mode: str
    merge: str

    @property
    def aligned(self) -> bool:
        return self.merge == "aligned"


def agree(body: Mapping[str, Any], offered: Contract) -> Agreed:
    """Check the request with which a robot opens a session against the contract of the server.

    Args:
        body: The body of the request.
        offered: The contract of the server.

    Returns:
        The agreement for the session.

    Raises:
        RemoteError: A field differs. Its code is unsupported, incompatible or malformed.
    """
    required = body.get("required_capabilities", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise malformed("required_capabilities", "a list of names", required)
    for each in required:
        if each != ALIGNED:
            raise _differs("unsupported", "required_capabilities", ALIGNED, each)
    merge: Any = "append"
    settings = body.get("chunk_settings")
    if settings is not None:
        merge = settings.get("chunk_merge") if isinstance(settings, Mapping) else settings
        if not isinstance(settings, Mapping) or set(settings) != {"chunk_merge"} or merge not in MERGES:
            raise _differs(
                "incompatible", "chunk_settings", '{"chunk_merge": "append" or "aligned"}', settings
            )
    mode = body.get("mode")
    if required != ([ALIGNED] if merge == "aligned" else []):
        raise _differs(
            "incompatible", "required_capabilities", f"the capabilities of chunk_merge {merge}", required
        )
    expected = body.get("expected_artifact")
    if expected is not None and expected != offered.identity:
        raise _differs("incompatible", "expected_artifact", offered.identity, expected)
    if (semantics := body.get("semantics")) != offered.semantics:
        raise _differs("incompatible", "semantics", offered.semantics, semantics)
    if mode not in MODES:
        raise malformed("mode", f"one of {', '.join(MODES)}", mode)
    if mode not in offered.modes:
        raise _differs("unsupported", "mode", " or ".join(offered.modes), mode)
    if merge == "aligned" and mode != "chunk":
        raise _differs("incompatible", "chunk_settings", "append, because the mode is an RTC mode", merge)
    interval = body.get("action_interval")
    if isinstance(interval, bool) or not isinstance(interval, (int, float)):
        raise malformed("action_interval", "seconds", interval)
    if not math.isclose(interval, offered.interval, rel_tol=1e-6):
        raise _differs("incompatible", "action_interval", f"{offered.interval!r}", interval)
    _same_features(body, offered)
    if (encoding := body.get("encoding")) not in ENCODINGS:
        raise _differs("unsupported", "encoding", " or ".join(ENCODINGS), encoding)
    return Agreed(offered, str(mode), str(merge))


def _same_features(body: Mapping[str, Any], offered: Contract) -> None:
    features = body.get("features")
    if not isinstance(features, list) or not all(isinstance(each, Mapping) for each in features):
        raise malformed("features", "a list of maps", features)
    names, expected = [each.get("name") for each in features], [each.name for each in offered.features]
    if names != expected:
        raise _differs("incompatible", "features", ", ".join(expected), names)
    action = body.get("action_feature")
    if not isinstance(action, Mapping):
        raise malformed("action_feature", "a map", action)
    for theirs, ours in zip([*features, action], [*offered.features, offered.action], strict=True):
        for key, value in ours.to_dict().items():
            if theirs.get(key) != value:
                raise _differs("incompatible", f"{ours.name}.{key}", f"{value!r}", theirs.get(key))


def _differs(code: str, name: str, expected: str, value: object) -> RemoteError:
    error = malformed(name, expected, value)
    error.code = code
    return error


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """An observation or a request for text, with checked fields. Its arrays and frames are not decoded yet.

    Attributes:
        sequence: The number of the request in the session.
        echo: The fields that the answer repeats.
        options: Further fields of the observation.
        prompt: The instruction.
        features: Name of a feature -> its tensor or picture.
        kind: Kind of the requested text; "" for a request for actions.
    """

    sequence: int
    echo: dict[str, Any]
    options: dict[str, Any]
    prompt: str
    features: Mapping[str, Tensor | RemoteFrame]
    kind: str = ""


def read_observation(body: Mapping[str, Any], agreed: Agreed) -> CheckedRequest:
    """Check the body of an observation.

    Args:
        body: The body of the message.
        agreed: The agreement of the session.

    Returns:
        The checked fields. ``observation`` decodes them.

    Raises:
        RemoteError: A field is wrong. The code is incompatible if the field differs from the agreement, else
            malformed.
    """
    offered = agreed.contract
    sequence, echo, features = _common(body, offered)
    delay = _whole(body, "delay", offered.prediction)
    guided, width = agreed.mode != "chunk", offered.action.shape[0]
    canonical = _rows(body, "canonical_continuation", offered.prediction, width)
    model = _rows(body, "model_continuation", offered.prediction, width if guided else None)
    counts = [None if rows is None else rows.shape[0] for rows in (canonical, model)]
    if counts[0] != counts[1] and (guided or None not in counts):
        raise malformed(
            "model_continuation", f"as many actions as canonical_continuation, {counts[0]}", counts[1]
        )
    cursor = _whole(body, "cursor")
    if agreed.aligned:
        seen = _whole(body, "observation_cursor")
        if seen > cursor:
            raise malformed("observation_cursor", f"at most the cursor {cursor}", seen)
        echo |= {"observation_cursor": seen, "cursor": cursor}
    options: dict[str, Any] = {}
    if guided and canonical is not None:
        options = {
            "previous": canonical.array("canonical_continuation"),
            "delay": delay,
            "rtc": offered.modes[agreed.mode],
        }
    return CheckedRequest(sequence, echo, options, echo["task"], features)


def read_language(body: Mapping[str, Any], agreed: Agreed) -> CheckedRequest:
    """Check the body of a request for text, as :func:`read_observation` does for observations.

    Raises:
        RemoteError: A field is wrong.
    """
    offered = agreed.contract
    sequence, echo, features = _common(body, offered)
    kind, text = body.get("kind"), body.get("text")
    if not isinstance(kind, str) or kind not in KINDS:
        raise _differs("unsupported", "kind", " or ".join(KINDS), kind)
    if KINDS[kind] not in offered.texts:
        able = [word for word, name in KINDS.items() if name in offered.texts]
        raise _differs(
            "unsupported", "kind", " or ".join(able) or "no kind, because this policy generates no text", kind
        )
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_CHARS:
        raise malformed("text", f"1 to {MAX_CHARS} characters", text)
    echo |= {"kind": kind, "intent_generation": _whole(body, "intent_generation")}
    if kind == "vqa":
        return CheckedRequest(sequence, echo, {"question": text}, echo["task"], features, kind)
    return CheckedRequest(sequence, echo, {"subtask": True, "text_only": True}, text, features, kind)


def observation(request: CheckedRequest, offered: Contract, session: str, budget: PixelBudget) -> Observation:
    """Decode the arrays and frames of a checked request, on a thread of the scheduler.

    Raises:
        ObservationError: An array or a frame is not valid.
    """
    images, state = {}, np.zeros(0, np.float32)
    for name, record in request.features.items():
        if isinstance(record, RemoteFrame):
            images[offered.cameras[name]] = record.frame(name, budget)
        else:
            state = record.array(name)
    return Observation(images=images, state=state, prompt=request.prompt, session=session, **request.options)


def _common(
    body: Mapping[str, Any], offered: Contract
) -> tuple[int, dict[str, Any], Mapping[str, Tensor | RemoteFrame]]:
    sequence = _whole(body, "sequence")
    if (artifact := body.get("artifact_identity")) != offered.identity:
        raise _differs("incompatible", "artifact_identity", offered.identity, artifact)
    name, captured, task = body.get("observation_id"), body.get("capture_time"), body.get("task")
    if not isinstance(name, str) or not name:
        raise malformed("observation_id", "text that is not empty", name)
    if isinstance(captured, bool) or not isinstance(captured, (int, float)):
        raise malformed("capture_time", "seconds", captured)
    if not isinstance(task, str) or len(task) > MAX_CHARS:
        raise malformed("task", f"a text of at most {MAX_CHARS} characters", task)
    echo = dict(zip(ECHOED, (artifact, name, captured, task, _whole(body, "task_version")), strict=True))
    return sequence, echo, _features(body, offered)


def _features(body: Mapping[str, Any], offered: Contract) -> Mapping[str, Tensor | RemoteFrame]:
    features = body.get("features")
    if not isinstance(features, Mapping):
        raise malformed("features", "a map of tensors and pictures", features)
    expected = {each.name for each in offered.features}
    if set(features) != expected:
        raise _differs("incompatible", "features", ", ".join(sorted(expected)), sorted(features))
    for each in offered.features:
        record = features[each.name]
        # The policy's own errors use the name without this prefix.
        name = each.name.removeprefix("observation.")
        if each.kind == "rgb":
            if not isinstance(record, RemoteFrame) or record.shape != each.shape:
                got = list(record.shape) if isinstance(record, RemoteFrame) else type(record).__name__
                raise _differs("incompatible", name, f"a picture {list(each.shape)}", got)
        elif not isinstance(record, Tensor) or record.shape != each.shape or record.dtype.name != each.dtype:
            shown = (
                f"{record.dtype.name} {list(record.shape)}"
                if isinstance(record, Tensor)
                else "a value of another type"
            )
            raise RemoteError("incompatible", f"{name}: expected {each.text}, got {shown}")
    return features


def _whole(body: Mapping[str, Any], name: str, most: int = MAX_COUNTER) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise malformed(
            name, "a whole number of 0 or more" + (f" to {most}" if most < MAX_COUNTER else ""), value
        )
    return value


def _rows(body: Mapping[str, Any], name: str, most: int, width: int | None) -> Tensor | None:
    """Return the actions of a continuation; None if there are no actions.

    Args:
        body: The body of the message.
        name: Name of the field.
        most: Largest number of actions.
        width: Number of values of an action; None allows any number.

    Raises:
        RemoteError: The field has the wrong type, shape or values.
    """
    rows = body.get(name)
    if rows is None:
        return None
    expected = f"float32 [1 to {most}, {width or 'width'}]"
    if not isinstance(rows, Tensor):
        raise malformed(name, expected, rows)
    good = len(rows.shape) == 2 and rows.dtype.name == "float32" and rows.shape[0] <= most
    if not good or width not in (None, rows.shape[1]):
        raise RemoteError("malformed", f"{name}: expected {expected}, got {rows.dtype} {list(rows.shape)}")
    try:
        rows.array(name)
    except ObservationError as error:
        raise RemoteError("malformed", str(error)) from None
    return rows
