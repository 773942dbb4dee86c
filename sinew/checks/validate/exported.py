"""Prove a folder of graphs where its weights are not: it carries what eager float32 made of one observation.

``sinew export`` writes the chunk, ``sinew doctor FOLDER`` computes it again, on whatever machine and provider it is.
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

REFERENCE = "reference.npy"  # float32 [chunk, actions], in the robot's units


def write_reference(bundle: Bundle, folder: Path) -> None:
    """Write what eager float32 makes of the first random observation, unquantised, beside the graphs."""
    policy = Policy(bundle, "cpu", "fp32", "eager", ignore_recipe=True)
    (folder / REFERENCE).write_bytes(_bytes(policy.infer(next(random_observations(policy))).actions))


def prove_whole(
    bundle: Bundle,
    folder: Path,
    shapes: Mapping[str, Sequence[int]],
    run: Callable[[dict[str, np.ndarray]], np.ndarray],
    prompt: str = "",
) -> float:
    """Hold one graph of a whole policy against eager float32 on one random observation; return the relative L2 of the
    chunk over the spread of the statistics. Raises :class:`SinewError` where it computes something else.

    folder: of the export that it is made of. shapes: of its inputs. run: computes it, input -> actions [1, H, D].
    prompt: the only instruction of the graph, if it has one.
    """
    policy = Policy(bundle, "cpu", "fp32", "eager", ignore_recipe=True)
    spec, drawn = policy.spec, next(random_observations(policy))
    rng = np.random.default_rng(0)
    images = {name: rng.integers(0, 256, shapes[name], np.uint8) for name in drawn.images}
    prepared = policy.prepare(replace(drawn, images=images, prompt=prompt or drawn.prompt))
    given = {**images, "state": np.asarray(drawn.state, np.float32)[None], "noise": prepared.noise[None]}
    tokens, given["tokens"] = prepared.inputs.tokens, np.zeros((1, spec.max_prompt_tokens), np.int64)
    given["tokens"][0, : len(tokens)] = tokens
    given["token_mask"] = np.arange(spec.max_prompt_tokens)[None] < len(tokens)
    got = run({name: given[name] for name in shapes})[0]
    bound = bounds_of(Policy(open_bundle(folder), "cpu", engine="onnx"))["actions"]
    found = distance(got / (spread := spread_of(policy)), policy.run(prepared).actions / spread)
    if not found <= bound:  # NaN is not
        padded = "" if prompt else "; a prompt that may not be padded is fixed with --prompt"
        raise SinewError(
            f"one graph: expected what eager computes within {bound:.0e}, got {found:.1e} off{padded}"
        )
    return found


def against_reference(policy: Policy, folder: Path) -> tuple[float, float] | None:
    """Return (relative L2 of the chunk over the spread of the statistics, its bound), or None where there is no
    reference. Raises :class:`SinewError` for a file that is none of this policy."""
    path = folder / REFERENCE
    if not path.exists():
        return None
    got = policy.infer(next(random_observations(policy))).actions
    like = _bytes(np.zeros(got.shape, np.float32))
    with BundleError.at(path, OSError), open_regular(path) as file:
        data = file.read(len(like) + 1)
    head = len(like) - 4 * got.size
    wanted = np.frombuffer(data[head:], np.float32).reshape(got.shape) if len(data) == len(like) else None
    if wanted is None or data[:head] != like[:head] or not np.isfinite(wanted).all():
        expected = f"finite float32 {list(got.shape)} as numpy writes it"
        raise BundleError(f"{path}: this is not {expected}")
    spread = spread_of(policy)
    return distance(got / spread, wanted / spread), bounds_of(policy)["actions"]


def _bytes(actions: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, np.ascontiguousarray(actions, np.float32))
    return data.getvalue()
