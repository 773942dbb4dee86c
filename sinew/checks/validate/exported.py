"""Verify a folder of exported graphs on a machine that does not have the weights. The folder contains the actions of
the reference engine (eager float32) for one observation.

``sinew export`` writes these actions. ``sinew doctor FOLDER`` computes the actions again, on any machine and
execution provider, and compares them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from sinew_client.untrusted import open_regular

from sinew.bundle import Bundle
from sinew.checks.validate.observations import random_observations
from sinew.checks.validate.parity import bounds_of, distance, spread_of
from sinew.core import BundleError, SinewError
from sinew.policy import Policy, open_bundle

REFERENCE = "reference.npy"  # float32 [chunk, actions], in robot units


def write_reference(bundle: Bundle, folder: Path) -> None:
    """Compute the actions for the first random observation with the reference engine (eager, in float32, without
    quantisation), and write them next to the graphs.
    """
    policy = Policy(bundle, "cpu", "fp32", "eager", ignore_recipe=True)
    (folder / REFERENCE).write_bytes(_bytes(policy.infer(next(random_observations(policy))).actions))


def prove_whole(
    bundle: Bundle,
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    run: Callable[[dict[str, np.ndarray]], np.ndarray],
    prompt: str = "",
) -> float:
    """Compare one graph of a whole policy with the reference engine (eager, in float32) on one random observation.

    Args:
        bundle: The bundle.
        folder: The export from which the graph was made.
        shapes: Name -> shape of the graph's inputs.
        run: Computes the graph: inputs -> actions [1, H, D].
        prompt: The only instruction of the graph; "" if the graph reads any instruction.

    Returns:
        The relative L2 error of the chunk, with actions divided by their spread in training.

    Raises:
        SinewError: The error is above the bound.
    """
    policy = Policy(bundle, "cpu", "fp32", "eager", ignore_recipe=True)
    spec, drawn = policy.spec, next(random_observations(policy))
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, shapes[name], np.uint8) for name in drawn.images}
    prepared = policy.prepare(replace(drawn, images=images, prompt=prompt or drawn.prompt))
    inputs = {**images, "state": np.asarray(drawn.state, np.float32)[None], "noise": prepared.noise[None]}
    tokens, inputs["tokens"] = prepared.inputs.tokens, np.zeros((1, spec.max_prompt_tokens), np.int64)
    inputs["tokens"][0, : len(tokens)] = tokens
    inputs["token_mask"] = np.arange(spec.max_prompt_tokens)[None] < len(tokens)
    got = run({name: inputs[name] for name in shapes})[0]
    bound = bounds_of(Policy(open_bundle(folder), "cpu", engine="onnx"))["actions"]
    error = distance(got / (spread := spread_of(policy)), policy.run(prepared).actions / spread)
    # Use `not error <= bound` in place of `error > bound`, because an error of NaN must fail too.
    if not error <= bound:
        padded = (
            "" if prompt else "; if this policy cannot read a padded prompt, fix the prompt with --prompt"
        )
        raise SinewError(
            f"one graph: expected the actions of eager within {bound:.0e}, got a relative error of {error:.1e}{padded}"
        )
    return error


def against_reference(policy: Policy, folder: Path) -> tuple[float, float] | None:
    """Compare a policy with the reference actions in its folder.

    Args:
        policy: The policy.
        folder: The folder of graphs.

    Returns:
        The relative L2 error of the chunk, with actions divided by their spread in training, and its bound. None if the
        folder has no reference.

    Raises:
        BundleError: The file is not a reference of this policy.
    """
    path = folder / REFERENCE
    if not path.exists():
        return None
    got = policy.infer(next(random_observations(policy))).actions
    like = _bytes(np.zeros(got.shape, np.float32))
    with BundleError.at(path, OSError), open_regular(path) as file:
        data = file.read(len(like) + 1)
    head = len(like) - 4 * got.size
    reference = np.frombuffer(data[head:], np.float32).reshape(got.shape) if len(data) == len(like) else None
    if reference is None or data[:head] != like[:head] or not np.isfinite(reference).all():
        raise BundleError(
            f"{path}: expected finite float32 {list(got.shape)} as numpy writes it; run `sinew export` again"
        )
    spread = spread_of(policy)
    return distance(got / spread, reference / spread), bounds_of(policy)["actions"]


def _bytes(actions: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, np.ascontiguousarray(actions, np.float32))
    return data.getvalue()
