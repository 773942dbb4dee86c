"""Serve LeRobot's own inference of a checkpoint over Sinew's native protocol, to compare it with Sinew's inference.

    python -m lerobot_policy_sinew.reference CHECKPOINT --bundle policy.gguf --port 5556
    sinew eval policy.gguf --suite libero_object --compare tcp://127.0.0.1:5556

The first command needs LeRobot and sinew in one environment (the extra ``local``). CHECKPOINT is the checkpoint from
which the bundle was converted. The bundle provides the cameras, the state and the actions, and draws the noise from the
seed of a request. LeRobot computes everything else.
"""

from __future__ import annotations

import argparse
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lerobot
import numpy as np
import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.utils import prepare_observation_for_inference
from sinew.core import ActionChunk, Observation, SinewError, Timing, machine
from sinew.policy import open_bundle
from sinew.processing import Processor
from sinew.serve.policies import Deployment
from sinew.serve.process import Process
from sinew.serve.scheduler import Scheduler
from sinew.serve.served import ServedPolicy
from sinew.serve.service import Service
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires, parse


class Reference(ServedPolicy):
    """A policy that computes with LeRobot's own inference.

    Args:
        checkpoint: LeRobot's checkpoint.
        bundle: The bundle that was converted from this checkpoint.
        device: Device of the computation, such as "cuda".

    Raises:
        SinewError: The bundle belongs to another family than the checkpoint.
    """

    def __init__(self, checkpoint: Path, bundle: Path, device: str = "cpu"):
        config = PreTrainedConfig.from_pretrained(str(checkpoint))
        config.device = device
        manifest = open_bundle(bundle).manifest
        if manifest.architecture != config.type:
            raise SinewError(
                f"--bundle {bundle}: expected a bundle of the family {config.type}, as {checkpoint} has, got"
                f" {manifest.architecture}"
            )
        self.device = torch.device(device)
        self._policy = get_policy_class(config.type).from_pretrained(str(checkpoint), config=config).eval()
        self._before, self._after = make_pre_post_processors(
            config,
            pretrained_path=str(checkpoint),
            preprocessor_overrides={"device_processor": {"device": device}},
        )
        self.dtype = str(next(self._policy.parameters()).dtype).removeprefix("torch.")
        self._processor = Processor(manifest)
        self.spec = replace(manifest.spec, name=f"{manifest.spec.name}, LeRobot's inference")

    def warm_up(self) -> None:
        """Do nothing, because LeRobot does not warm up its policies either."""

    def prepare(self, observation: Observation) -> tuple[Observation, np.ndarray, int | None]:
        """Check an observation as the bundle's own policy does, and draw its noise.

        Args:
            observation: The observation.

        Returns:
            The observation, the noise, and the seed of the noise.
        """
        self._processor.check(observation)
        return observation, *self._processor.noise(observation)

    def run(self, prepared: Any, *, cancel: threading.Event | None = None) -> ActionChunk:
        """Compute the chunk with LeRobot.

        Args:
            prepared: The result of :meth:`prepare`.
            cancel: Not used, because LeRobot's inference cannot be cancelled.

        Returns:
            The chunk, with actions float32 [H, D] in robot units.
        """
        observation, noise, seed = prepared
        begun = time.perf_counter()
        raw = {f"observation.images.{name}": frame for name, frame in observation.images.items()}
        raw["observation.state"] = observation.state
        more = {"noise": torch.from_numpy(noise)[None].to(self.device)} if self.spec.noise_dim else {}
        with torch.inference_mode():
            batch = self._before(prepare_observation_for_inference(raw, self.device, observation.prompt, ""))
            chunk = self._after(self._policy.predict_action_chunk(batch, **more))[0]
        spent = 1e3 * (time.perf_counter() - begun)
        return ActionChunk(chunk.float().cpu().numpy(), Timing(total_ms=spent), seed=seed)

    def reset(self, session: str) -> None:
        """Reset LeRobot's policy, so that it drops its queued actions. ``session`` is not used."""
        self._policy.reset()


def serve(policy: Reference, port: int) -> None:
    """Print the address, and serve the policy on ``port`` until a signal stops the process."""
    wires = open_wires(parse([f"native:{port}"]), Listen())
    scheduler = Scheduler(policy)
    scheduler.start()
    about = {
        "server": {
            "name": "lerobot",
            "version": lerobot.__version__,
            "engine": "lerobot",
            "engine_reason": "the reference",
            "device": str(policy.device),
            "device_reason": "--device",
            "dtype": policy.dtype,
            "dtype_reason": "the checkpoint's weights",
            **machine.arithmetic(torch.get_num_threads()),
        },
        "policy": policy.spec.to_dict(),
    }
    process = Process(wires)
    with process.signals():
        process.run(
            Service(Deployment(scheduler, policy.spec, about)),
            lambda: print(f"ready on {wires[0].address}", flush=True),  # noqa: T201 - scripts wait for this line
        )


def main() -> None:
    """Load a LeRobot checkpoint and serve it, with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m lerobot_policy_sinew.reference", description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--port", type=int, default=5556)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    try:
        policy = Reference(options.checkpoint, options.bundle, options.device)
    except (SinewError, OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    serve(policy, options.port)


if __name__ == "__main__":
    main()
