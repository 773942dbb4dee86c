"""The policy type ``sinew`` for LeRobot: it converts batches to observations, and chunks to actions."""

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
from sinew_client.addresses import ServerAddress
from sinew_client.auth import key_from_environment
from sinew_client.control import parse_rule
from sinew_client.control.defaults import REPLAN, ensemble_of, stated
from sinew_client.control.motion import Relative, parse_motion
from sinew_client.form import Fitted
from sinew_client.history import History
from sinew_client.target import Target
from sinew_client.tls import is_loopback
from sinew_client.types import Moment

from lerobot_policy_sinew.ahead import Ahead
from lerobot_policy_sinew.configuration_sinew import SinewConfig
from lerobot_policy_sinew.rtc import AGAIN_S, Continued, said

logger = logging.getLogger(__name__)

LONGEST_NAME = 256  # messages contain at most this many characters of a policy's name
# Pixels may be outside [0, 1] by this much, because resizing can overshoot. Values further outside show that the frame
# has another range, such as 0 to 255 or -1 to 1.
SLACK = 0.1


def opened(config: SinewConfig) -> Policy:
    """Open the policy of a configuration: a server, or a bundle in this process.

    Args:
        config: The configuration.

    Returns:
        The open policy.

    Raises:
        ImportError: ``bundle`` is set, but the package sinew-vla is not installed.
        ValueError: The API key would be sent to an address that the user has not typed.
        SinewError: The policy cannot be opened.
    """
    if config.address:
        key = key_from_environment()
        _refuse_to_tell(key, config)
        return connect(config.address, timeout=config.timeout, api_key=key)
    try:
        import sinew  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"--policy.bundle needs the package sinew-vla; install it in this environment ({error})"
        ) from error
    return connect(config.bundle, engine=config.engine, device=config.compute)


class SinewPolicy(PreTrainedPolicy):
    """A Sinew policy with LeRobot's interface for policies.

    Args:
        config: The configuration.
        dataset_stats: Not used, because Sinew policies contain their own statistics.
        dataset_meta: Not used.

    Attributes:
        backend: The open Sinew policy.

    Raises:
        ValueError: The configuration does not fit the policy.
    """

    config_class = SinewConfig
    name = "sinew"

    def __init__(self, config: SinewConfig, dataset_stats=None, dataset_meta=None):
        super().__init__(config)
        if config.compile_model:
            raise ValueError(
                "use_torch_compile: expected false, because the policy has no torch model here, got true"
            )
        self.backend = opened(config)
        spec = self.backend.spec
        dim, name = spec.action.dim, spec.name[:LONGEST_NAME]
        self._form, self._called = (spec.chunk_size, dim), name
        self._fitted = Fitted(spec.to_dict())
        feature = (config.output_features or {}).get(ACTION)
        if feature is not None and tuple(feature.shape) != (dim,):
            raise ValueError(
                f"action: expected shape {feature.shape}, as the robot or environment has, got [{dim}] from {name}"
            )
        camera_names = [camera.name for camera in spec.cameras]
        strange = [camera for camera in config.cameras.values() if camera not in camera_names]
        if strange:
            raise ValueError(
                f"policy.cameras: expected cameras of {name} ({', '.join(camera_names)}), got {strange[0]!r}"
            )
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
        """Create the policy from a configuration, or from the configuration in a folder or repository.

        This method reads no weights, because the server or the bundle has the weights. LeRobot calls it in
        ``lerobot-rollout``, even if the user passes only ``--policy.type`` and no path.

        Args:
            pretrained_name_or_path: The folder or repository; used if ``config`` is None.
            config: The configuration.
            revision: Revision of the repository.
            **given: Further arguments of the class.

        Returns:
            The policy.
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
        """Begin new episodes. Earlier observations, requests and answers are dropped."""
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
        """Return True.

        If the policy does not support real-time chunking, :meth:`init_rtc_processor` raises the reason.
        """
        return True

    def init_rtc_processor(self) -> None:
        """Prepare real-time chunking with the settings of LeRobot's rtc engine (``config.rtc_config``).

        Raises:
            ValueError: The policy does not support these settings, or ``policy.handover`` is set too.
        """
        if self._ahead is not None:
            raise ValueError(
                "policy.handover: cannot be combined with --inference.type=rtc, which merges chunks itself; omit one of"
                " them"
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
        """Compute the chunks for a batch of observations.

        A policy with an observation history gets only the present observation. Use :meth:`select_action` for such
        policies, which stores the history.

        Args:
            batch: ``observation.images.CAMERA`` uint8 or float in [0, 1], [B, 3, height, width];
                ``observation.state`` [B, D]; ``task``, the instructions.
            noise: float [B, H, noise_dim]; None draws the noise.
            inference_delay: From LeRobot's rtc engine: expected number of actions until the answer arrives.
            prev_chunk_left_over: From LeRobot's rtc engine: remaining actions of the running chunk, [R, action_dim].

        Returns:
            The chunks, float32 [B, H, action_dim] in robot units. With the rtc engine, H is 0 if the observation or the
            answer belongs to the time before the last reset, so that the engine has nothing to execute.

        Raises:
            ValueError: The parts of the batch do not fit each other, or a chunk has another shape than the policy
                states.
        """
        rtc = self._rtc
        # Read the episode before the observation, because another thread may call `reset` at any time.
        episode = rtc.episode if rtc is not None else 0
        seen = self._seen(batch)
        if rtc is None:
            if prev_chunk_left_over is not None:
                raise ValueError(
                    "prev_chunk_left_over: call init_rtc_processor first, as --inference.type=rtc does"
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
        """Extract the frames, uint8 [B, height, width, 3], and the states [B, D] of a batch.

        Raises:
            ValueError: The frames or the states have another shape or range.
        """
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
        """Request the chunks for a batch.

        Args:
            batch: The batch, for its instructions.
            seen: Frames and states of the present observations.
            earlier: Frames and states of the earlier observation steps, oldest first.
            noise: float [B, H, noise_dim]; None draws the noise.
            more: Further fields of each observation.

        Returns:
            The chunks, float32 [B, H, action_dim]. Relative actions are converted to goal positions.

        Raises:
            ValueError: The number of instructions is wrong, or a chunk has another shape than the policy states.
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
                    f"actions: expected shape {list(self._form)}, as the policy {self._called} states,"
                    f" got {list(chunk.shape)}"
                )
            # LeRobot's robots expect goal positions, so convert actions that are relative to the observed state.
            if isinstance(self._motion, Relative):
                chunk = self._motion.targets(chunk, newest.state)
            chunks.append(chunk)
        return torch.from_numpy(np.stack(chunks)).to(batch[OBS_STATE].device)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Any], noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return the actions of one control step. LeRobot calls this method once per control step.

        If the running chunks have no action left, it requests new chunks. For a policy with an observation history, it
        stores the observations. With ``policy.handover``, Sinew's own loop chooses the action
        (:class:`~lerobot_policy_sinew.ahead.Ahead`).

        Args:
            batch: As in :meth:`predict_action_chunk`.
            noise: As in :meth:`predict_action_chunk`; not allowed with ``policy.handover``.

        Returns:
            The actions, float32 [B, action_dim] in robot units.
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
        """Return the action of Sinew's control loop, float32 [1, action_dim]. The arguments ``batch`` and ``noise`` are
        those of :meth:`select_action`.


        Raises:
            ValueError: The batch contains several robots.
        """
        if noise is not None:
            raise ValueError("noise: cannot be combined with policy.handover; pass --policy.seed instead")
        seen, task = self._seen(batch), batch.get("task") or ""
        tasks = [task] if isinstance(task, str) else list(task)
        if len(seen.state) != 1 or len(tasks) != 1:
            raise ValueError(f"{OBS_STATE}: expected one robot with policy.handover, got {len(seen.state)}")
        self._sessions = 1
        row = ahead.step({name: frames[0] for name, frames in seen.images.items()}, seen.state[0], tasks[0])
        return torch.from_numpy(row)[None].to(batch[OBS_STATE].device)

    def forward(self, batch):
        raise NotImplementedError("a policy of type sinew cannot be trained; train the original checkpoint")

    def get_optim_params(self):
        raise NotImplementedError("a policy of type sinew cannot be trained; train the original checkpoint")

    @staticmethod
    def _session(index: int) -> str:
        return f"lerobot-{os.getpid()}-{index}"

    def _camera(self, key: str) -> str:
        name = (
            key[len(OBS_IMAGES) + 1 :] if key.startswith(OBS_IMAGES) else key[len(OBS_IMAGE) + 1 :] or "image"
        )
        return self.config.cameras.get(name, name)


def _refuse_to_tell(key: str, config: SinewConfig) -> None:
    """Check that the API key is not sent to an address that only a folder or repository names.

    Args:
        key: The key in ``SINEW_API_KEY``.
        config: The configuration.

    Raises:
        ValueError: The configuration comes from a folder or repository, and its address is another machine.
    """
    origin = config.pretrained_path
    addresses = Target.parse(config.address).addresses
    here = bool(addresses) and all(is_loopback(ServerAddress.parse(each).host) for each in addresses)
    if origin is None or here:
        return
    if key:
        raise ValueError(
            f"policy.address: {config.address} comes from the configuration of {origin}, so SINEW_API_KEY is not sent"
            f" there. If you trust this address, pass --policy.type=sinew --policy.address={config.address}. Otherwise"
            " unset SINEW_API_KEY"
        )
    logger.warning("sinew: the configuration of %s sends camera frames to %s", origin, config.address)


def rows_executed(config: SinewConfig, spec: PolicySpec) -> int:
    """Choose the number of actions that are executed before the next request, and log the reason.

    Args:
        config: The configuration.
        spec: The specification of the policy.

    Returns:
        The number of actions.

    Raises:
        ValueError: ``n_action_steps`` is larger than a chunk.
    """
    chunk = spec.chunk_size
    if config.n_action_steps > chunk:
        raise ValueError(
            f"policy.n_action_steps: expected at most {chunk}, the actions of a chunk of {spec.name[:LONGEST_NAME]},"
            f" got {config.n_action_steps}"
        )
    if config.n_action_steps:
        rows, why = config.n_action_steps, "as policy.n_action_steps states"
    elif spec.n_action_steps:
        rows, why = spec.n_action_steps, "as the policy's checkpoint states"
    else:
        rows, why = parse_rule(REPLAN).horizon(chunk), f"{REPLAN}, because its checkpoint states no number"
    logger.info("sinew: %d of the %d actions of a chunk are executed, %s", rows, chunk, why)
    if (blend := ensemble_of(spec.to_dict())) is not None:
        logger.warning(
            "sinew: the checkpoint was trained for temporal ensembling (coefficient %g), which needs policy.handover;"
            " pass --policy.handover=ensemble:%g --policy.replan=1",
            blend,
            blend,
        )
    return rows


def _is_image(key: str) -> bool:
    return key.startswith((f"{OBS_IMAGES}.", f"{OBS_IMAGE}.")) or key == OBS_IMAGE


def _frames(key: str, value: torch.Tensor) -> np.ndarray:
    """Convert frames [B, 3, height, width] to uint8 [B, height, width, 3].

    LeRobot divides camera frames by 255. Rounding restores the original values exactly.

    Args:
        key: Name of the camera in the batch, for error messages.
        value: uint8, or float in [0, 1].

    Raises:
        ValueError: The frames have another shape or range.
    """
    if value.ndim != 4 or value.shape[1] != 3:
        raise ValueError(f"{key}: expected [B, 3, height, width], got {list(value.shape)}")
    if value.is_floating_point():
        low, high = (value.min().item(), value.max().item()) if value.numel() else (0.0, 0.0)
        # If a pixel is NaN, torch's minimum and maximum are NaN too, and the comparison is False.
        if not (low >= -SLACK and high <= 1 + SLACK):
            raise ValueError(f"{key}: expected floats in [0, 1], got {low:g} to {high:g}")
        value = (value * 255).round().clamp(0, 255).to(torch.uint8)
    return value.permute(0, 2, 3, 1).contiguous().cpu().numpy()
