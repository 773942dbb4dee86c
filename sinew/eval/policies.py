"""The policy side of an episode: a bundle in this process, a server, or a scripted expert."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sinew.core import SinewError
from sinew.eval.settings import Variant
from sinew.keys import key_from_environment

if TYPE_CHECKING:
    import gymnasium
    from sinew_client import ActionChunk

    from sinew.engine.choose import Choice

EXPERT = "expert"


class EvalPolicy(Protocol):
    """Observation to actions. chunk_size: H, rows of a chunk. committed_rows: those that it was trained to continue.
    motion: what it says that its actions are measured from; None where it says nothing."""

    chunk_size: int
    committed_rows: int
    motion: Mapping[str, Any] | None

    def start(self, env: gymnasium.Env) -> None:
        """A new episode begins in ``env``, which has been reset."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        """-> (float32 [H, D] in world units, milliseconds from call to actions)."""

    def close(self) -> None: ...


class InProcess:
    """A bundle loaded here. Latency is the policy's own, preprocessing to world units."""

    def __init__(
        self,
        bundle: str,
        device: str,
        dtype: str | None,
        solver_steps: int | None,
        engine: str | None = None,
        threads: int | None = None,
        **options: Any,
    ):
        from sinew.policy import load

        self.policy = load(bundle, device, dtype, engine, threads=threads, **options)
        self.served: dict[str, Any] = self.policy.spec.to_dict()  # as a server says it
        self.chunk_size, self.committed_rows = self.policy.spec.chunk_size, self.policy.spec.committed_rows
        self.motion = self.served["motion"]
        self.solver_steps = solver_steps
        self.policy.warm_up()

    def start(self, env: gymnasium.Env) -> None:
        """Nothing: policies have no memory between chunks."""

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        request = {**observation, "seed": seed, "solver_steps": self.solver_steps}
        chunk = self.policy.infer(request)
        return chunk.actions, chunk.timing.total_ms

    def close(self) -> None:
        """Nothing to close."""


class Remote:
    """A server. Latency is the round trip seen from here. ``last``: the answer to the latest request;
    ``served``: what the server says about its policy; ``engine``: what runs it and why."""

    last: ActionChunk | None = None

    def __init__(self, address: str, solver_steps: int | None, timeout: float = 60.0):
        from sinew_client import Client

        self.solver_steps = solver_steps
        try:
            self.client = Client(address, timeout=timeout, api_key=key_from_environment())
            metadata = self.client.metadata()
            self.served: dict[str, Any] = metadata["policy"]
            self.engine: dict[str, Any] = metadata["server"]
            self.chunk_size = int(self.served["chunk_size"])
            self.committed_rows = int(self.served.get("committed_rows") or 0)
            self.motion = self.served.get("motion")
        except Exception as error:
            raise _as_sinew(error) from error

    def start(self, env: gymnasium.Env) -> None:
        self.client.reset()

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        request = {**observation, "seed": seed, "solver_steps": self.solver_steps}
        try:
            chunk = self.client.infer(request)
        except Exception as error:
            raise _as_sinew(error) from error
        self.last = chunk
        return chunk.actions, chunk.round_trip_ms

    def close(self) -> None:
        self.client.close()


class BlocksExpert:
    """The scripted expert of the blocks task: one action per chunk, since it needs to see the state again."""

    chunk_size = 1
    committed_rows = 0
    motion: Mapping[str, Any] | None = None

    def start(self, env: gymnasium.Env) -> None:
        self._env: Any = env.unwrapped

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        from sinew.sim import blocks_expert

        begin = time.perf_counter()
        actions = blocks_expert.act(self._env.world())[None]
        return actions, 1e3 * (time.perf_counter() - begin)

    def close(self) -> None:
        """Nothing to close."""


class PenExpert:
    """What somebody could know at the moment of the newest frame: the ceiling of every policy on this task."""

    chunk_size = 24
    committed_rows = 0
    motion: Mapping[str, Any] | None = {"kind": "absolute"}

    def start(self, env: gymnasium.Env) -> None:
        self._env: Any = env.unwrapped

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        from sinew.sim import pen

        begin = time.perf_counter()
        fps, delay = self._env.camera_fps, self._env.camera_delay
        frame = max(0, int(np.floor((self._env.time - delay) * fps + 1e-9))) / fps
        actions = pen.expert_chunk(self._env.drop, frame, self.chunk_size)
        return actions[:, None], 1e3 * (time.perf_counter() - begin)

    def close(self) -> None:
        """Nothing to close."""


class EggExpert:
    """What somebody does who sees the newest frame and feels the present force: one action per chunk."""

    chunk_size = 1
    committed_rows = 0
    motion: Mapping[str, Any] | None = None

    def start(self, env: gymnasium.Env) -> None:
        self._env: Any = env.unwrapped

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        from sinew.sim import egg

        begin = time.perf_counter()
        return egg.act(self._env)[None], 1e3 * (time.perf_counter() - begin)

    def close(self) -> None:
        """Nothing to close."""


def open_policy(variant: Variant, env_id: str) -> EvalPolicy:
    """The policy that a variant names; raises :class:`SinewError` for one that cannot be opened."""
    if variant.target == EXPERT:
        if env_id.startswith("sinew/Blocks"):
            return BlocksExpert()
        if env_id.startswith("sinew/Pen"):
            return PenExpert()
        if env_id.startswith("sinew/Egg"):
            return EggExpert()
        raise SinewError(f"there is no scripted expert for {env_id}")
    if "://" in variant.target:
        return Remote(variant.target, variant.solver_steps)
    from sinew.bundle.rename import parse_renames

    return InProcess(
        variant.target,
        variant.device,
        variant.dtype,
        variant.solver_steps,
        variant.engine,
        _threads(variant),
        ignore_recipe=variant.ignore_recipe,
        rename=parse_renames(variant.rename),
        allow_missing_cameras=variant.allow_missing_cameras,
    )


def _threads(variant: Variant) -> int | None:
    """One compute thread, as in workers, so that the same episode gives the same bits."""
    return None if variant.device.startswith("cuda") else 1


def chosen(variant: Variant) -> Choice:
    """Return what will run the bundle of a variant; raises :class:`SinewError` where nothing can."""
    from sinew.bundle.rename import parse_renames, rename_cameras
    from sinew.engine.choose import choose
    from sinew.policy import open_bundle

    opened = open_bundle(variant.target)
    rename_cameras(opened.manifest.spec, parse_renames(variant.rename))
    return choose(
        opened,
        variant.engine,
        variant.device,
        variant.dtype,
        threads=_threads(variant),
        ignore_recipe=variant.ignore_recipe,
    )


def stated_motion(target: str, env_id: str) -> Mapping[str, Any] | None:
    """Return what a policy says that its actions are measured from, without loading it; None where it says nothing."""
    if target == EXPERT:
        return PenExpert.motion if env_id.startswith("sinew/Pen") else None
    if "://" in target:
        return identity(target)["motion"]
    from sinew.policy import open_bundle

    return open_bundle(target).manifest.spec.to_dict()["motion"]


@lru_cache(maxsize=64)
def identity(target: str) -> dict[str, Any]:
    """What tells one policy from another between two runs, and what a report says about it.

    A bundle is known by the SHA-256 of its bytes, a server by what it says about itself.
    """
    if target == EXPERT:
        return {"kind": "expert", "id": EXPERT}
    if "://" in target:
        from sinew_client import Client

        try:
            with Client(target, timeout=30.0, api_key=key_from_environment()) as client:
                served = client.metadata()
        except Exception as error:
            raise _as_sinew(error) from error
        server, policy = served["server"], served["policy"]
        text = f"{policy['name']} {policy['architecture']} {server['dtype']} {server['device']} {server['version']}"
        return {
            "kind": "server",
            "id": text,
            "dtype": server["dtype"],
            "hardware": server["hardware"],
            "motion": policy.get("motion"),
        }
    path = Path(target)
    if not path.exists():
        raise SinewError(f"{target}: no such bundle; expected a file, tcp://host:port or {EXPERT!r}")
    digest = hashlib.sha256()
    for part in sorted(path.iterdir()) if path.is_dir() else [path]:  # a folder is one of `sinew export`
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"kind": "bundle", "id": digest.hexdigest()}


def _as_sinew(error: Exception) -> Exception:
    """Client errors are things a user can mend; anything else is a fault here and stays as it is."""
    from sinew_client import ClientError

    return SinewError(str(error)) if isinstance(error, ClientError) else error
