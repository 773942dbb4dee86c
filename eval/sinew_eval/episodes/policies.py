"""Policies of an episode: a bundle in this process, a server, or a scripted expert."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from sinew.core import SinewError
from sinew.engine.backend import choose
from sinew_client import Client
from sinew_client.auth import key_from_environment
from sinew_client.target import ADDRESS, EXPERT, MODEL_SERVER, Target
from sinew_client.types import MOST_TOGETHER
from sinew_client.untrusted import named, open_regular

from sinew_eval.episodes.settings import StreamCosts, Variant
from sinew_eval.sim.experts import EXPERTS, Expert, open_expert

if TYPE_CHECKING:
    import gymnasium
    from sinew.engine.backend import EngineChoice
    from sinew.policy import Policy as LoadedPolicy
    from sinew_client import ActionChunk, Policy


class EvalPolicy(Protocol):
    """Interface of a policy, as the runner uses it.

    Attributes:
        chunk_size: H, number of actions in a chunk.
        committed_rows: Length of the action prefix that the policy was trained to continue.
        motion: Reference of the actions, as the policy states it. None if the policy states nothing.
        served: The policy's metadata.
    """

    chunk_size: int
    committed_rows: int
    motion: Mapping[str, Any] | None
    served: dict[str, Any]

    def start(self, env: gymnasium.Env) -> None:
        """Begin a new episode in ``env``, which has just been reset."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        """Compute a chunk.

        Args:
            observation: Images, state and prompt.
            seed: Seed of the noise.

        Returns:
            Actions, float32 [H, D] in robot units, and the milliseconds from the call to the actions.
        """

    def close(self) -> None: ...


class EpisodePolicy:
    """Adapts any :class:`sinew_client.Policy` to the interface that the runner of episodes uses.

    The latency is the round trip of a server's answer, or else the policy's own time from preprocessing to robot
    units.

    Attributes:
        policy: The wrapped policy.
        last: Answer to the latest request. None before the first request.
        served: The policy's metadata, in the form of a server's metadata.
    """

    def __init__(self, policy: Policy, solver_steps: int | None = None):
        self.policy, self.solver_steps = policy, solver_steps
        self.last: ActionChunk | None = None
        spec = policy.spec
        self.served: dict[str, Any] = spec.to_dict()
        self.chunk_size, self.committed_rows = spec.chunk_size, spec.committed_rows
        self.motion: Mapping[str, Any] | None = self.served["motion"]

    def start(self, env: gymnasium.Env) -> None:
        if isinstance(self.policy, Expert):
            self.policy.start(env)
        else:
            self.policy.reset()

    def begin(self, session: str) -> None:
        """Begin a new episode in ``session``, which is one of several that run at the same time."""
        self.policy.reset(session)

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        return self._infer(self._request(observation, seed))

    def infer_all(
        self, requests: Sequence[tuple[Mapping[str, Any], int, str]]
    ) -> list[tuple[np.ndarray, float] | Exception]:
        """Answer several requests, in one batch if the policy supports it.

        Args:
            requests: (observation, seed, session) of each request.

        Returns:
            For each request, its actions and the milliseconds of its batch, or its error.
        """
        batch = [{**self._request(seen, seed), "session": session} for seen, seed, session in requests]
        if self.one_by_one or len(batch) == 1:
            return [_caught(self._infer, each) for each in batch]
        policy: Any = self.policy
        return [
            each if isinstance(each, Exception) else (each.actions, each.timing.total_ms)
            for each in policy.infer_all(batch)
        ]

    @property
    def one_by_one(self) -> str:
        """Return why several observations are computed one after the other. "" if they are computed in one batch."""
        if not hasattr(self.policy, "run_batch"):
            return f"expected a policy that is loaded in this process, got {type(self.policy).__name__}"
        return str(getattr(self.policy, "unbatched", ""))

    def _request(self, observation: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {**observation, "seed": seed, "solver_steps": self.solver_steps}

    def _infer(self, request: Mapping[str, Any]) -> tuple[np.ndarray, float]:
        self.last = checked_chunk(self.policy.infer(request), self.policy)
        return self.last.actions, self.last.round_trip_ms or self.last.timing.total_ms

    def close(self) -> None:
        self.policy.close()


def checked_chunk(answer: Any, policy: Any) -> ActionChunk:
    """Check the result of a policy's ``infer``.

    Args:
        answer: The result.
        policy: The policy.

    Returns:
        The result.

    Raises:
        SinewError: The result is not a chunk of the policy's actions.
    """
    dim = policy.spec.action.dim
    expectation = f"expected sinew_client.ActionChunk(actions) with actions of [rows, {dim}]"
    actions = getattr(answer, "actions", None)
    if actions is None or not hasattr(answer, "timing"):
        shape = f" of {list(np.shape(answer))}" if isinstance(answer, (np.ndarray, list, tuple)) else ""
        raise SinewError(f"{type(policy).__name__}.infer: {expectation}, got {type(answer).__name__}{shape}")
    shape = np.shape(actions)
    if len(shape) != 2 or not shape[0] or shape[1] != dim:
        raise SinewError(f"{type(policy).__name__}.infer: {expectation}, got actions of {list(shape)}")
    found: ActionChunk = answer
    return found


def _caught(call: Callable[[Any], Any], what: Any) -> Any:
    """Call the function ``call`` with the argument ``what``. Return its result, or the SinewError that it raised."""
    try:
        return call(what)
    except SinewError as error:
        return error


class InProcess(EpisodePolicy):
    """A bundle that is loaded in this process."""

    policy: LoadedPolicy

    def __init__(self, bundle: str, solver_steps: int | None = None, **options: Any):
        """Load a bundle.

        Args:
            bundle: Path of the bundle.
            solver_steps: Number of solver steps. None for the bundle's own number.
            **options: Options of :func:`sinew.load`.
        """
        from sinew.policy import load

        policy = load(bundle, **options)
        policy.warm_up()
        super().__init__(policy, solver_steps)
        self.served = policy.metadata()["policy"]


class ServerPolicy(EpisodePolicy):
    """A policy on a server.

    Attributes:
        client: Connection to the server.
        engine: The server's metadata about the engine, and why the engine was chosen.
    """

    def __init__(self, address: str, solver_steps: int | None, timeout: float = 60.0):
        self.client = client = Client(address, timeout=timeout, api_key=key_from_environment())
        metadata = client.metadata()
        self.engine: dict[str, Any] = metadata["server"]
        super().__init__(client, solver_steps)
        self.served = metadata["policy"]
        self.max_batch = min(int(metadata["server"].get("max_batch", 1)), MOST_TOGETHER)

    @property
    def one_by_one(self) -> str:
        """Return why several observations are computed one after the other. "" if they are computed in one batch."""
        if self.max_batch > 1:
            return ""
        return (
            "this server computes one observation at a time; restart it with `sinew serve --max-batch auto`"
        )

    def infer_all(
        self, requests: Sequence[tuple[Mapping[str, Any], int, str]]
    ) -> list[tuple[np.ndarray, float] | Exception]:
        """Send several requests in messages that the server computes in one batch each."""
        client: Any = self.policy
        found: list[Any] = []
        for start in range(0, len(requests), self.max_batch):
            part = requests[start : start + self.max_batch]
            found += client.infer_all(
                [{**self._request(seen, seed), "session": session} for seen, seed, session in part]
            )
        return [each if isinstance(each, Exception) else (each.actions, each.round_trip_ms) for each in found]


def open_policy(variant: Variant, env_id: str) -> EvalPolicy:
    """Open the policy of a variant.

    Args:
        variant: The variant.
        env_id: Environment, which determines the expert for the target ``expert``.

    Returns:
        The open policy.

    Raises:
        SinewError: The policy cannot be opened.
    """
    target = Target.parse(variant.target)
    if target.kind == EXPERT:
        return EpisodePolicy(open_expert(target.place or env_id))
    if target.kind == MODEL_SERVER:
        from sinew_eval.foreign.model_server import ModelServer

        return ModelServer(variant.target)
    if target.kind == ADDRESS:
        return ServerPolicy(variant.target, variant.solver_steps)
    from sinew.bundle.rename import parse_renames

    return InProcess(
        variant.target,
        variant.solver_steps,
        rename=parse_renames(variant.rename),
        allow_missing_cameras=variant.allow_missing_cameras,
        allow_empty_prompt=variant.allow_empty_prompt,
        **_computing(variant),
    )


def _computing(variant: Variant) -> dict[str, Any]:
    """Return the options that a variant sets for the engine of its bundle. :func:`sinew.load` and the choice of an
    engine use them.

    A CPU uses one thread, as in worker processes, because the number of threads affects the last bits of sums.
    """
    names = ("engine", "device", "dtype", "ignore_recipe")
    threads = None if variant.device.startswith("cuda") else 1
    return {name: getattr(variant, name) for name in names} | {"threads": threads}


def chosen(variant: Variant) -> EngineChoice:
    """Choose the engine for a variant's bundle.

    Raises:
        SinewError: No engine runs the bundle.
    """
    from sinew.bundle.rename import parse_renames, rename_cameras
    from sinew.policy import open_bundle

    opened = open_bundle(variant.target)
    rename_cameras(opened.manifest.spec, parse_renames(variant.rename))
    guidance = StreamCosts.parse(variant.stream).guidance if variant.stream else None
    return choose(opened, **_computing(variant), stream=guidance)


# Fields of a policy's description that decide how its chunks are executed.
EXECUTION_FIELDS = (
    "motion",
    "temporal_ensemble",
    "real_time_chunking",
    "n_action_steps",
    "chunk_size",
)


def stated_facts(target: str, env_id: str) -> dict[str, Any]:
    """Read a policy's statements about the execution of its chunks, without loading the policy.

    Args:
        target: The policy.
        env_id: Environment, which determines the expert for the target ``expert``.

    Returns:
        For each field in ``EXECUTION_FIELDS``, the policy's value, or None if the policy states nothing.
    """
    if target == EXPERT:
        specs = (spec.to_dict() for start, (spec, _) in EXPERTS.items() if env_id.startswith(start))
        whole: Mapping[str, Any] = next(specs, {})
    elif Target.parse(target).remote:
        whole = identity(target)
    else:
        from sinew.policy import open_bundle

        whole = open_bundle(target).manifest.spec.to_dict()
    return {key: whole.get(key) for key in EXECUTION_FIELDS}


@lru_cache(maxsize=64)
def identity(target: str) -> dict[str, Any]:
    """Return the identity of a policy, which reports contain and which distinguishes policies between runs.

    A bundle is identified by the SHA-256 of its content, a server by its metadata.

    Args:
        target: The policy.

    Returns:
        A dict with ``kind``, ``id`` and, for a server, further metadata.
    """
    if target == EXPERT:
        return {"kind": "expert", "id": EXPERT}
    kind = Target.parse(target).kind
    if kind == MODEL_SERVER:
        from sinew_eval.foreign.model_server import said

        hello = said(target)
        name = named(hello.get("model_server", ""), 100)
        text = f"{name} {named(hello.get('harness_version', ''), 40)}"
        return {"kind": "server", "id": text, "dtype": "", "motion": None, "name": name, "architecture": ""}
    if kind == ADDRESS:
        from sinew_client import Client

        with Client(target, timeout=30.0, api_key=key_from_environment()) as client:
            served = client.metadata()
        server, policy = served["server"], served["policy"]
        text = f"{policy['name']} {policy['architecture']} {server['dtype']} {server['device']} {server['version']}"
        bundle = server.get("identity")
        hash_ = bundle.get("hash") if isinstance(bundle, dict) else None
        if isinstance(hash_, str) and hash_:
            text += f" {named(hash_, 64)}"
        return {
            "kind": "server",
            "id": text,
            "dtype": server["dtype"],
            "hardware": server["hardware"],
            **{key: policy.get(key) for key in EXECUTION_FIELDS},
            "name": policy["name"],
            "architecture": policy["architecture"],
        }
    return {"kind": "bundle", "id": file_hash(target)}


@lru_cache(maxsize=256)
def file_hash(target: str) -> str:
    """Return the SHA-256 of a file, or of all files in a folder of `sinew export`. Only regular files are opened.

    Args:
        target: The file or folder.

    Returns:
        64 hexadecimal digits.

    Raises:
        SinewError: The file or folder does not exist, or contains something that is not a regular file.
    """
    path = Path(target)
    digest = hashlib.sha256()
    try:
        if not path.exists():
            raise SinewError(f"{target}: no such bundle; expected a file, tcp://host:port or {EXPERT!r}")
        for part in sorted(path.iterdir()) if path.is_dir() else [path]:
            with open_regular(part) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    except OSError as error:
        raise SinewError(f"{target}: {error.strerror}") from None
    # A NUL character in the name raises ValueError.
    except ValueError as error:
        raise SinewError(f"{named(target)}: {error}") from None
    return digest.hexdigest()
