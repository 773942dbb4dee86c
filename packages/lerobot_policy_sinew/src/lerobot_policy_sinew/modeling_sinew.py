"""The policy: LeRobot's batches to Sinew's observations, chunks to actions."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.utils.constants import ACTION, OBS_IMAGE, OBS_IMAGES, OBS_STATE
from sinew_client import Policy, PolicySpec, connect
from sinew_client.auth import key_from_environment
from sinew_client.control import parse_rule
from sinew_client.control.defaults import REPLAN, ensemble_of, stated
from sinew_client.control.motion import Relative, parse_motion
from sinew_client.form import Fitted
from sinew_client.history import History
from sinew_client.tls import host_of, is_loopback
from sinew_client.types import Moment

from lerobot_policy_sinew.ahead import Ahead
from lerobot_policy_sinew.configuration_sinew import SinewConfig
from lerobot_policy_sinew.rtc import AGAIN_S, Continued, said

logger = logging.getLogger(__name__)

LONGEST_NAME = 256  # longest name of a policy in messages, characters
# Pixels may be outside [0, 1] by this much, because resizing can overshoot. Values further outside show that the frame
# has another range, such as 0 to 255 or -1 to 1.
SLACK = 0.1


def opened(config: SinewConfig) -> Policy:
    """Return the policy of a configuration: a server's, or one that computes in this process."""
    if config.address:
        key = key_from_environment()
        _refuse_to_tell(key, config)
        return connect(config.address, timeout=config.timeout, api_key=key)
    try:
        import sinew  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"--policy.bundle needs the package sinew-vla, and its import failed: {error}"
        ) from error
    return connect(config.bundle, engine=config.engine, device=config.compute)


class SinewPolicy(PreTrainedPolicy):
    """Actions of a Sinew policy under LeRobot's interface."""

    config_class = SinewConfig
    name = "sinew"

    def __init__(self, config: SinewConfig, dataset_stats=None, dataset_meta=None):
        super().__init__(config)
        if config.compile_model:
            raise ValueError("use_torch_compile: expected false, got true: the policy computes elsewhere")
        self.backend = opened(config)
        spec = self.backend.spec
        dim, name = spec.action.dim, spec.name[:LONGEST_NAME]
        self._form, self._called = (spec.chunk_size, dim), name
        self._fitted = Fitted(spec.to_dict())
        wanted = (config.output_features or {}).get(ACTION)
        if wanted is not None and tuple(wanted.shape) != (dim,):
            raise ValueError(
                f"action: expected {wanted.shape} as the robot or environment takes it, got [{dim}] of {name}"
            )
        known = [camera.name for camera in spec.cameras]
        strange = [camera for camera in config.cameras.values() if camera not in known]
        if strange:
            raise ValueError(f"policy.cameras: expected cameras of {name}: {known}, got {strange[0]!r}")
        self._motion = parse_motion(stated(spec.to_dict()))
        self._ahead: Ahead | None = None
        self._rows = 0
        if config.handover:
            self._ahead = Ahead(
                self.backend,
                spec,
                config.handover,
                config.replan,
                config.motion,
                config.timeout,
                self._session(0),
                config.seed,
            )
        else:
            self._rows = rows_executed(config, spec)
        self._rtc: Continued | None = None
        self._queue: deque = deque()
        self._history, self._steps = History.of(spec.to_dict()), 0
        self._asked = 0
        self._sessions = 0
        # LeRobot reads the device of a policy from its tensors, so the policy needs at least one tensor.
        self.register_buffer("_anchor", torch.zeros(()), persistent=False)

    @classmethod
    def from_pretrained(cls, pretrained_name_or_path=None, *, config=None, revision=None, **given):
        """Return the policy of a configuration, or of the one in a folder or repository.

        There are no weights to read: they are the server's or the bundle's. LeRobot makes every policy of
        ``lerobot-rollout`` this way, also one that ``--policy.type`` names and that has no path.
        """
        if config is None:
            config = PreTrainedConfig.from_pretrained(pretrained_name_or_path, revision=revision)
            config.pretrained_path = pretrained_name_or_path
        if not isinstance(config, SinewConfig):
            raise ValueError(f"policy: expected a configuration of the type sinew, got {config.type}")
        policy = cls(config, **given)
        policy.to(config.device)
        return policy.eval()

    def reset(self) -> None:
        """Begin new episodes: of what was seen, asked or answered before, nothing counts any more."""
        if self._rtc is not None:
            self._rtc.begin()
        if self._ahead is not None:
            self._ahead.begin()
        self._queue.clear()
        self._history.clear()
        for index in range(self._sessions):
            self.backend.reset(self._session(index))
        self._sessions = 0

    def supports_rtc(self) -> bool:
        """Return True: a policy that cannot is refused by :meth:`init_rtc_processor`, which says why."""
        return True

    def init_rtc_processor(self) -> None:
        """Take what LeRobot's rtc engine is set to, ``config.rtc_config``, before it starts. Raises ValueError."""
        if self._ahead is not None:
            raise ValueError(
                "policy.handover: expected none beside --inference.type=rtc, which plays chunks itself"
            )
        self._rtc = Continued(getattr(self.config, "rtc_config"), self.backend.spec, said(self.backend))  # noqa: B009

    @torch.no_grad()
    def predict_action_chunk(
        self,
        batch: dict[str, Any],
        noise: torch.Tensor | None = None,
        *,
        inference_delay: int | None = None,
        prev_chunk_left_over: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the chunks for a batch of observations, float32 [B, H, action_dim] in world units.

        batch: ``observation.images.CAMERA`` float in [0, 1] or uint8 [B, 3, height, width], ``observation.state``
        [B, D], ``task``: instructions. noise: float [B, H, noise_dim]. A policy that reads several moments is given
        this one for those before it, which :meth:`select_action` keeps. inference_delay, prev_chunk_left_over [R,
        action_dim]: of LeRobot's rtc engine, for which a chunk of no rows stands where there is none to play, as of an
        observation or an answer from before the last reset. Raises ValueError for observations that do not go together,
        and for a chunk of another form than the policy says of itself.
        """
        rtc = self._rtc
        # Read the episode before the observation, because another thread may call `reset` at any time.
        episode = rtc.episode if rtc is not None else 0
        seen = self._seen(batch)
        if rtc is None:
            if prev_chunk_left_over is not None:
                raise ValueError(
                    "prev_chunk_left_over: expected --inference.type=rtc, of whose settings nobody told"
                )
            return self._chunks(batch, seen, (), noise)
        if len(seen.state) != 1:
            raise ValueError(
                f"{OBS_STATE}: expected one robot with --inference.type=rtc, got {len(seen.state)}"
            )
        nothing = torch.zeros(1, 0, self._form[1], device=batch[OBS_STATE].device)
        if not rtc.fresh(seen, episode):
            rtc.skipped()
            time.sleep(AGAIN_S)
            return nothing
        left = None if prev_chunk_left_over is None else prev_chunk_left_over.detach().cpu().numpy()
        more = rtc.fields(left, inference_delay, seen.state[0])
        chunks = self._chunks(batch, seen, (), noise, more)
        return chunks if rtc.answered(chunks[0].cpu().numpy(), seen.state[0], episode) else nothing

    def _seen(self, batch: dict[str, Any]) -> Moment:
        """Return the frames, uint8 [B, height, width, 3], and states [B, D] of a batch. Raises ValueError."""
        if OBS_STATE not in batch:
            raise ValueError(f"{OBS_STATE}: expected a tensor [B, D], got nothing")
        states = batch[OBS_STATE].detach().cpu().numpy()
        if states.ndim != 2 or not len(states):
            raise ValueError(f"{OBS_STATE}: expected [B, D] with B of 1 or more, got {list(states.shape)}")
        images = {key: _frames(key, value) for key, value in batch.items() if _is_image(key)}
        for key, given in images.items():
            if len(given) != len(states):
                raise ValueError(
                    f"{key}: expected {len(states)} frames, one for each state, got {len(given)}"
                )
        return Moment({self._camera(key): given for key, given in images.items()}, states)

    def _chunks(
        self,
        batch: dict[str, Any],
        seen: Moment,
        earlier: tuple[Moment, ...],
        noise: torch.Tensor | None,
        more: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the chunks for what was seen now and at the control steps before, oldest first, as a robot takes them.

        more: what else goes with each observation.
        """
        count = len(seen.state)
        tasks = batch.get("task") or ""
        tasks = [tasks] * count if isinstance(tasks, str) else list(tasks)
        if len(tasks) != count:
            raise ValueError(f"task: expected {count} instructions, one for each state, got {len(tasks)}")
        self._sessions = max(self._sessions, count)
        chunks = []
        for index in range(count):
            *before, newest = (
                Moment({camera: frames[index] for camera, frames in each.images.items()}, each.state[index])
                for each in (*earlier, seen)
            )
            observation = {
                "images": newest.images,
                "state": newest.state,
                "earlier": before,
                "prompt": tasks[index],
                "session": self._session(index),
                **(more or {}),
            }
            if noise is not None:
                observation["noise"] = noise[index].detach().cpu().numpy()
            elif self.config.seed >= 0:
                observation["seed"] = self.config.seed + self._asked
            self._asked += 1
            chunk = self.backend.infer(observation).actions
            self._fitted.check(self.backend)
            # A server may have replaced its policy after the plugin read the policy's specification.
            if chunk.shape != self._form:
                raise ValueError(
                    f"actions: expected {list(self._form)} as the policy {self._called} says of itself,"
                    f" got {list(chunk.shape)}"
                )
            # LeRobot's robots expect goal positions, so convert actions that are relative to the observed state.
            if isinstance(self._motion, Relative):
                chunk = self._motion.targets(chunk, newest.state)
            chunks.append(chunk)
        return torch.from_numpy(np.stack(chunks)).to(batch[OBS_STATE].device)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next row of the running chunks, [B, action_dim]; ask for new ones when they are used up.

        LeRobot calls this at every control step: what a policy of several moments has seen is kept here. With
        ``policy.handover`` Sinew's own loop says which row is next (:class:`~lerobot_policy_sinew.ahead.Ahead`).
        """
        if self._ahead is not None:
            return self._next(self._ahead, batch, noise)
        asks, self._steps = not self._queue, self._steps + 1
        if asks or self._history.moments > 1:
            seen = self._seen(batch)
            self._history.see(self._steps, seen.images, seen.state)
        if asks:
            chunks = self._chunks(batch, seen, self._history.before(self._steps), noise)
            self._queue.extend(chunks[:, : self._rows].unbind(1))
        return self._queue.popleft()

    def _next(self, ahead: Ahead, batch: dict[str, Any], noise: torch.Tensor | None) -> torch.Tensor:
        """Return the row of Sinew's loop, [1, action_dim], for the one robot that it plays."""
        if noise is not None:
            raise ValueError("noise: expected none with policy.handover, whose chunks nobody waits for")
        seen, task = self._seen(batch), batch.get("task") or ""
        tasks = [task] if isinstance(task, str) else list(task)
        if len(seen.state) != 1 or len(tasks) != 1:
            raise ValueError(f"{OBS_STATE}: expected one robot with policy.handover, got {len(seen.state)}")
        self._sessions = 1
        row = ahead.step({name: frames[0] for name, frames in seen.images.items()}, seen.state[0], tasks[0])
        return torch.from_numpy(row)[None].to(batch[OBS_STATE].device)

    def forward(self, batch):
        raise NotImplementedError("a policy of type sinew is served, not trained")

    def get_optim_params(self):
        raise NotImplementedError("a policy of type sinew is served, not trained")

    @staticmethod
    def _session(index: int) -> str:
        return f"lerobot-{os.getpid()}-{index}"

    def _camera(self, key: str) -> str:
        name = (
            key[len(OBS_IMAGES) + 1 :] if key.startswith(OBS_IMAGES) else key[len(OBS_IMAGE) + 1 :] or "image"
        )
        return self.config.cameras.get(name, name)


def _refuse_to_tell(key: str, config: SinewConfig) -> None:
    """Raise ValueError where the key of SINEW_API_KEY would go to another machine that a folder or repository names."""
    origin = config.pretrained_path
    if origin is None or is_loopback(host_of(config.address)):
        return
    if key:
        raise ValueError(
            f"policy.address: {config.address} is what the configuration of {origin} says, and SINEW_API_KEY is not"
            " sent where you did not say:"
            f" give --policy.type=sinew --policy.address={config.address}, or take the key away"
        )
    logger.warning("sinew: %s says that %s sees the cameras and drives the robot", origin, config.address)


def rows_executed(config: SinewConfig, spec: PolicySpec) -> int:
    """Return the rows of a chunk that are executed before the next one is asked for."""
    chunk = spec.chunk_size
    if config.n_action_steps > chunk:
        raise ValueError(
            f"policy.n_action_steps: expected at most {chunk}, the rows of a chunk of {spec.name[:LONGEST_NAME]},"
            f" got {config.n_action_steps}"
        )
    if config.n_action_steps:
        rows, why = config.n_action_steps, "as policy.n_action_steps says"
    elif spec.n_action_steps:
        rows, why = spec.n_action_steps, "as the policy's checkpoint says"
    else:
        rows, why = parse_rule(REPLAN).horizon(chunk), f"{REPLAN}: its checkpoint does not say"
    logger.info("sinew: %d of the %d rows of a chunk are executed, %s", rows, chunk, why)
    if (blend := ensemble_of(spec.to_dict())) is not None:
        logger.warning(
            "sinew: the checkpoint was made for temporal ensembling (coefficient %g), which does not happen without"
            " policy.handover: give --policy.handover=ensemble:%g --policy.replan=1",
            blend,
            blend,
        )
    return rows


def _is_image(key: str) -> bool:
    return key.startswith((f"{OBS_IMAGES}.", f"{OBS_IMAGE}.")) or key == OBS_IMAGE


def _frames(key: str, value: torch.Tensor) -> np.ndarray:
    """uint8 [B, height, width, 3]. LeRobot divides camera frames by 255; rounding gives them back exactly."""
    if value.ndim != 4 or value.shape[1] != 3:
        raise ValueError(f"{key}: expected [B, 3, height, width], got {list(value.shape)}")
    if value.is_floating_point():
        low, high = (value.min().item(), value.max().item()) if value.numel() else (0.0, 0.0)
        # If a pixel is NaN, torch's minimum and maximum are NaN too, and the comparison is False.
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise ValueError(f"{key}: expected floats in [0, 1], got {low:g} to {high:g}")
        value = (value * 255).round().clamp(0, 255).to(torch.uint8)
    return value.permute(0, 2, 3, 1).contiguous().cpu().numpy()
