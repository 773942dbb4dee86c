"""Benchmarks of vla-eval as one gymnasium environment. vla-eval's own program normally plays these classes.

An observation has the frames in ``images`` under their names, the state in ``states`` or ``state``, and the
instruction in ``task_description``. Actions go to the benchmark unchanged. An episode's task is its seed modulo the
number of tasks. Its ``episode_idx`` is the quotient, which determines the initial state.

Sources: vla-eval 0.8.0, ``benchmarks/base.py``, ``orchestrator.py`` (observation parameters, limits, end of an
episode), ``runners/sync_runner.py``, ``benchmarks/libero/benchmark.py`` (its gripper closes at +1, its frames are
upright).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping as AnyMapping
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from sinew.core import SinewError
from sinew_client.modules import ModuleError, load_named

from sinew_eval.suites import VLA_EVAL, VLA_EVAL_PREFIX, libero
from sinew_eval.suites.mapping import Mapping

# Maximum number of control steps if a benchmark's metadata state none. vla-eval's orchestrator has the same default.
MAX_STEPS = 300
DATA_ARGUMENTS = (
    "send_state",
    "send_wrist_image",
)  # arguments of constructors that add data to the observation
# Key: camera frame of a benchmark with LIBERO's scenes. Value: the names that policies use for this camera.
_LIBERO = {
    "images/agentview": libero.MAPPING.known_as["agentview_image"] + ("image",),
    "images/wrist": libero.MAPPING.known_as["robot0_eye_in_hand_image"] + ("image2",),
}
MAPPING = Mapping(images={}, state=("state",), clip=False)


class Simulator(gymnasium.Env):
    """Environment of a benchmark.

    Args:
        tasks: Name of the benchmark, as the only entry.
        params: Arguments of the benchmark's constructor.
        control_hz: Control steps per second, if Sinew does not know the rate.
        render: "gpu" or "cpu", for drawing.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        params: AnyMapping[str, Any] | None = None,
        control_hz: float | None = None,
        render: str = "gpu",
    ):
        (name,) = tasks
        benchmark = VLA_EVAL.get(name.removeprefix(VLA_EVAL_PREFIX))
        place = benchmark[0] if benchmark else name.removeprefix(VLA_EVAL_PREFIX)
        hz = control_hz or (benchmark[1] if benchmark else None)
        if hz is None:
            raise SinewError(
                f"{name}: vla-eval does not state the control rate; pass it with --env-options"
                """ '{"control_hz": 20}'"""
            )
        self.control_hz = float(hz)
        kind = _load(name, place)
        _draw_with(kind, render, name)
        accepted = _accepted(kind)
        arguments = {each: True for each in DATA_ARGUMENTS if each in accepted} | dict(params or {})
        try:
            self.benchmark = kind(**arguments)
        except TypeError as error:
            raise SinewError(f"{name}: params: {error}") from error
        self._loop = asyncio.new_event_loop()
        self._tasks = list(self.benchmark.get_tasks())
        if not self._tasks:
            raise SinewError(f"{name}: the benchmark has no tasks; check its params")
        self.max_steps = int(self.benchmark.get_metadata().get("max_steps", MAX_STEPS))
        self.action_space = _action_space(self.benchmark)
        self.task_description = ""
        self._steps = 0
        # The first observation contains the names of the frames.
        seen, _ = self.reset(seed=0)
        images = {camera: f"images/{camera}" for camera in seen["images"]}
        of_libero = bool(benchmark) and set(images.values()) <= set(_LIBERO)
        self.mapping = Mapping(
            images=images,
            state=("state",),
            known_as=_LIBERO if of_libero else {},
            unseen=libero.MAPPING.unseen if of_libero else (),
            action=libero.MAPPING.action if of_libero else "as_is" if not benchmark else {},
            clip=False,
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            raise SinewError("reset: these environments need a seed, which determines the task; pass one")
        if options:
            raise SinewError("--reset-options: not supported by benchmarks of vla-eval; omit it")
        task = self._tasks[seed % len(self._tasks)]
        self._steps = 0
        self._wait(self.benchmark.start_episode({**task, "episode_idx": seed // len(self._tasks)}))
        label = "/".join(str(task[key]) for key in ("suite", "name") if task.get(key))
        self._info = {"task": label, "is_success": False}
        return self._seen(), self._info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._wait(self.benchmark.apply_action({"actions": np.asarray(action, np.float32)}))
        self._steps += 1
        done = bool(self._wait(self.benchmark.is_done()))
        over = done or self._steps >= self.max_steps
        if over:
            result = self._wait(self.benchmark.get_result())
            self._info = {**self._info, "is_success": bool(result.get("success", False))}
        return {} if done else self._seen(), 0.0, done, False, self._info

    def hold_action(self, last: np.ndarray | None) -> np.ndarray:
        """Return the action that holds the benchmark's robot.

        Raises:
            SinewError: The benchmark has no such action.
        """
        try:
            action = self.benchmark.get_hold_action(None if last is None else {"actions": last})
        except NotImplementedError:
            raise SinewError(
                f"{type(self.benchmark).__name__} has no action that holds its robot; omit --latency"
            ) from None
        return np.asarray(action["actions"], np.float32)

    def close(self) -> None:
        self.benchmark.cleanup()
        self._loop.close()

    def _seen(self) -> dict[str, Any]:
        observation = self._wait(self.benchmark.get_observation())
        self.task_description = str(observation.get("task_description", ""))
        state = observation.get("states", observation.get("state", ()))
        parts = list(state.values()) if isinstance(state, dict) else [state]
        flat = np.concatenate([np.ravel(np.asarray(each, np.float32)) for each in parts])
        return {"images": dict(observation.get("images", {})), "state": flat}

    def _wait(self, what: Any) -> Any:
        return self._loop.run_until_complete(what)


def _load(name: str, place: str) -> Any:
    try:
        return load_named(place, name)
    except ModuleError as error:
        raise SinewError(str(error)) from error


def _draw_with(kind: Any, mode: str, name: str) -> None:
    """Choose how a simulator draws: "gpu" or "cpu" (``mode``). This must happen before the simulator is imported."""
    from vla_eval.render import apply_render_mode

    try:
        apply_render_mode(kind, mode, name)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise SinewError(f"{name}: render: {error}") from error


def _accepted(kind: Any) -> set[str]:
    """Return the names of the arguments that a constructor accepts, including those that it passes on to its base
    classes.
    """
    found: set[str] = set()
    for each in kind.__mro__:
        if "__init__" not in vars(each) or each is object:
            continue
        parameters = inspect.signature(each.__init__).parameters.values()
        found |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found - {"self"}


def _action_space(benchmark: Any) -> gymnasium.spaces.Box:
    """Return a space with the total size of the benchmark's action parts, or of any size if the benchmark leaves one
    open.
    """
    try:
        dims = [int(part.dims) for part in benchmark.get_action_spec().values()]
    except NotImplementedError:
        dims = [0]
    shape = (sum(dims),) if dims and all(dims) else ()
    return gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
