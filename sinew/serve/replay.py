"""A policy without a model, for ``sinew serve --replay``. Its answers are the records that ``sinew serve --record``
wrote.

The scheduler uses it in place of a :class:`sinew.policy.Policy`. So you can develop a robot's code with every
protocol without a GPU, weights or torch. Observations are checked like in the policy, but their content does not
change the answers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client.open_policy import Limit, OpenPolicy, refuse_words

from sinew.bundle.adapter import unknown
from sinew.bundle.schema import Manifest
from sinew.core import (
    ActionChunk,
    CameraSpec,
    CancelledError,
    Moment,
    Observation,
    ObservationError,
    PolicySpec,
    SinewError,
    Timing,
    VectorSpec,
    did_you_mean,
)
from sinew.processing import Processor
from sinew.records.recorder import check_array, moments_in, open_record, read_meta, read_record, record_files
from sinew.serve.policies import DEFAULT
from sinew.serve.served import ServedPolicy

# Largest number of sessions whose position in the recording is stored. It is limited because clients
# choose the names.
MAX_SESSIONS = 10_000
# Largest size of all actions in bytes, because they are in memory. This is enough for over five hours of ten chunks
# of 50 x 26 numbers per second.
MAX_BYTES = 1 << 30
MAX_MS = 3.6e6  # longest recorded inference, ms
MATCHED = "the request's session, then the order of requests; other sessions get the first recorded one"


@dataclass(frozen=True, slots=True)
class ReplayedAnswer:
    """One recorded reply.

    Attributes:
        actions: float32 [H, D].
        seed: Seed of the noise.
        total_ms: Duration of the inference, milliseconds.
        adapter: Adapter that computed the reply; "" for the base policy.
    """

    actions: np.ndarray
    seed: int | None
    total_ms: float
    adapter: str = ""


class Replay(OpenPolicy, ServedPolicy):
    """A policy that answers with the chunks of a recording.

    A recorded session gets its own chunks in order. Any other session gets the chunks of the first recorded session.
    After the last chunk, the recording starts again. Records without actions (errors, text, contexts) and records of
    policies other than the server's first are skipped. Requests for an adapter get the adapter's records.

    Args:
        folder: The recording.
        manifest: Manifest of the recorded bundle, if available, with names, units and checks. Without it, the first
            record gives the cameras with their sizes, and the widths of state and actions.
        latency: True answers after the duration of the recorded inference. False answers at once.
        allow_missing_cameras: See :class:`sinew.policy.Policy`.
        allow_empty_prompt: See :class:`sinew.policy.Policy`.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest | None = None,
        *,
        latency: bool = True,
        allow_missing_cameras: bool = False,
        allow_empty_prompt: bool = False,
    ):
        self.folder, self.latency, self.manifest = folder, latency, manifest
        self._processor = (
            None
            if manifest is None
            else Processor(manifest, allow_missing_cameras, allow_empty_prompt=allow_empty_prompt)
        )
        self._missing = allow_missing_cameras
        self.sessions, self.left_out, first, most = _read(folder)
        self.adapters: dict[str, dict[str, list[ReplayedAnswer]]] = {}
        for name, answers in self.sessions.items():
            for answer in answers:
                self.adapters.setdefault(answer.adapter, {}).setdefault(name, []).append(answer)
        spec = _spec(folder, first, most) if manifest is None else manifest.spec
        shape = next(iter(self.sessions.values()))[0].actions.shape
        if shape != (spec.chunk_size, spec.action.dim):
            raise SinewError(
                f"{folder}: expected chunks of [{spec.chunk_size}, {spec.action.dim}] as the bundle has them, got"
                f" {list(shape)}; the records may belong to another policy"
            )
        self.spec = spec
        self.padded_state_dim = spec.state.dim if manifest is None else manifest.processing.padded_state_dim
        self.padded_action_dim = (
            spec.action.dim if manifest is None else manifest.processing.padded_action_dim
        )
        self.threads, self.threads_reason, self.device = 0, "nothing is computed", "none"
        self._lock = threading.Lock()
        # Key: (adapter, session). Value: number of the next recorded chunk for this session.
        self._places: OrderedDict[tuple[str, str], int] = OrderedDict()

    def __repr__(self) -> str:
        sessions = ", ".join(map(repr, self.sessions))
        return (
            f"<sinew.serve.replay.Replay of {str(self.folder)!r}: {self.chunks} chunks, sessions {sessions}>"
        )

    @property
    def chunks(self) -> int:
        """Number of chunks in the recording."""
        return sum(map(len, self.sessions.values()))

    @property
    def unbatched(self) -> str:
        """The reason why requests are answered one at a time."""
        return "a replay computes nothing, so batches would not be faster"

    @property
    def warning(self) -> str:
        """The warning that every reply contains: the actions were recorded and not computed."""
        return f"this is a replay of {self.folder.name}: the actions were recorded and not computed"

    def describe(self) -> dict[str, Any]:
        """Return the description of a policy, and the recording under the key ``replay``, ready for JSON."""
        return {
            "engine": "replay",
            "engine_reason": f"--replay {self.folder.name}: recorded chunks, nothing is computed",
            "device": "none",
            "device_reason": "nothing is computed",
            "dtype": "as recorded",
            "dtype_reason": "nothing is computed",
            "precision": {},
            "ignored_recipe": "",
            "replay": {
                "records": self.folder.name,
                "chunks": self.chunks,
                "sessions": {name: len(answers) for name, answers in self.sessions.items()},
                "left_out": self.left_out,
                "adapters": [name for name in self.adapters if name],
                "matched": MATCHED,
                "latency": "recorded" if self.latency else "none",
            },
        }

    def problem(self) -> str | None:
        """Return None, because no files are read after the start."""
        return None

    def warm_up(self) -> None:
        """Do nothing, because a recording computes nothing."""

    def reset(self, session: str = "") -> None:
        """Replay the session's recording from its beginning again, for a new episode."""
        self._refuse_closed()
        with self._lock:
            for name in self.adapters:
                self._places.pop((name, session), None)

    def prepare(self, observation: Observation | Mapping[str, Any]) -> Observation:
        """Check an observation in the same way as the recorded policy, and return it.

        Raises:
            ObservationError: The observation does not fit the recorded policy.
        """
        self._refuse_closed()
        if not isinstance(observation, Observation):
            observation = Observation.from_mapping(observation)
        refuse_words(observation, "a replay")
        if observation.adapter not in self.adapters:
            named = {name: None for name in self.adapters if name}
            raise ObservationError("adapter", *unknown(observation.adapter, named))
        if self._processor is not None:
            self._processor.check(replace(observation, adapter=""))
        else:
            self._check(observation)
        return observation

    def run(self, prepared: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        """Return the next recorded chunk of the observation's session.

        Raises:
            CancelledError: The event ``cancel`` was set.
        """
        answer, again = self._next(prepared.adapter, prepared.session)
        if self.latency and (cancel or threading.Event()).wait(answer.total_ms / 1e3):
            raise CancelledError("the request was cancelled")
        warnings = (self.warning, *(["the recording began again"] if again else []))
        timing = Timing(total_ms=answer.total_ms if self.latency else 0.0)
        return ActionChunk(
            answer.actions.copy(),
            timing,
            answer.seed,
            prepared.session,
            prepared.time,
            warnings,
            adapter=answer.adapter,
        )

    def infer(
        self, observation: Observation | Mapping[str, Any], *, timeout: float | None = None
    ) -> ActionChunk:
        """Check an observation (:meth:`prepare`), and return the next recorded chunk (:meth:`run`).

        Raises:
            RequestTimeout: The chunk did not come within ``timeout`` seconds.
        """
        with Limit(timeout) as limit:
            return self.run(self.prepare(observation), cancel=limit)

    def _next(self, adapter: str, session: str) -> tuple[ReplayedAnswer, bool]:
        sessions = self.adapters[adapter]
        answers = sessions.get(session) or next(iter(sessions.values()))
        with self._lock:
            # Move the session to the end, so that the oldest session is removed first.
            place = self._places.pop((adapter, session), 0)
            self._places[adapter, session] = place + 1
            while len(self._places) > MAX_SESSIONS:
                self._places.popitem(last=False)
        return answers[place % len(answers)], bool(place) and place % len(answers) == 0

    def _check(self, observation: Observation) -> None:
        """Check names, sizes and types, as far as the recording contains them."""
        if len(observation.earlier) >= self.spec.history:
            expected = f"at most {self.spec.history - 1} observation steps, as in the recording"
            raise ObservationError("earlier", expected, str(len(observation.earlier)))
        for moment in observation.moments:
            self._check_moment(moment)

    def _check_moment(self, moment: Moment) -> None:
        cameras = {camera.name for camera in self.spec.cameras}
        for name, frame in moment.images.items():
            if name not in cameras:
                hint = did_you_mean(name, cameras)
                raise ObservationError(
                    f"images.{name}", f"one of the cameras {sorted(cameras)}{hint}", "an unknown camera"
                )
            shape = np.shape(frame)
            if len(shape) != 3 or shape[2] != 3 or 0 in shape:
                raise ObservationError(f"images.{name}", "[height, width, 3]", str(list(shape)))
        if not self._missing and (missing := sorted(cameras - set(moment.images))):
            raise ObservationError(f"images.{missing[0]}", "a frame", "nothing")
        state = np.asarray(moment.state)
        if state.shape != (self.spec.state.dim,) or state.dtype.kind not in "fiu":
            raise ObservationError(
                "state", f"{self.spec.state.dim} numbers", f"{state.dtype} {list(state.shape)}"
            )
        if not np.isfinite(state).all():
            raise ObservationError("state", "finite numbers", "nan or inf")


def _read(folder: Path) -> tuple[dict[str, list[ReplayedAnswer]], int, Path, int]:
    """Read the records of a folder.

    Returns:
        The answers of each session, the number of records without an answer, the first file with an answer, and the
        largest number of observation steps. The first record of an episode may have fewer steps.
    """
    paths = record_files(folder)
    sessions: dict[str, list[ReplayedAnswer]] = {}
    left_out, first, shape, size, most = 0, None, None, 0, 1
    for path in paths:
        record = _answer(path)
        if record is None:
            left_out += 1
            continue
        session, answer, moments = record
        most = max(most, moments)
        first, shape = first or path, shape or answer.actions.shape
        if answer.actions.shape != shape:
            raise SinewError(
                f"{path}: actions: expected {list(shape)} as in earlier records, got {list(answer.actions.shape)}"
            )
        size += answer.actions.nbytes
        if size > MAX_BYTES:
            raise SinewError(
                f"{folder}: expected at most {MAX_BYTES} bytes of actions, got more, up to {path.name}"
            )
        sessions.setdefault(session, []).append(answer)
    if first is None:
        raise SinewError(
            f"{folder}: expected a record with actions, got {left_out} records of errors, texts, contexts or"
            " other policies"
        )
    return sessions, left_out, first, most


def _answer(path: Path) -> tuple[str, ReplayedAnswer, int] | None:
    """Read a record without its frames. Return its session, its answer and its number of observation steps.

    The result is None for a record without actions.
    """
    with open_record(path) as npz:
        meta = read_meta(npz)
        if "actions" not in npz or meta.get("policy", "") not in ("", DEFAULT):
            return None
        actions = npz.read("actions")
        moments = moments_in(npz.names)
    with SinewError.at(path, SinewError):
        check_array("actions", actions)
    actions = np.asarray(actions, np.float32)
    total_ms = float(meta.get("total_ms") or 0.0)
    if total_ms >= MAX_MS:
        raise SinewError(f"{path}: total_ms: expected less than {MAX_MS:g} ms, got {total_ms:g} ms")
    return meta["session"], ReplayedAnswer(actions, meta["seed"], total_ms, meta.get("adapter", "")), moments


def _spec(folder: Path, first: Path, moments: int) -> PolicySpec:
    """Build the specification of a recording's policy from its records.

    Args:
        folder: The recording.
        first: The first record with actions.
        moments: Largest number of observation steps in a record.
    """
    record = read_record(first)
    actions = record.actions
    assert actions is not None
    cameras = tuple(
        CameraSpec(name, int(np.shape(frame)[0]), int(np.shape(frame)[1]))
        for name, frame in record.observation.images.items()
    )
    return PolicySpec(
        architecture="replay",
        name=folder.resolve().name,
        cameras=cameras,
        state=VectorSpec(len(record.observation.state)),
        action=VectorSpec(actions.shape[1]),
        chunk_size=len(actions),
        noise_dim=0,
        solver_steps=1,
        max_prompt_tokens=0,
        history=moments,
    )
