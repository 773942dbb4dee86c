"""An edge adapter: a small network on the robot that refines a late chunk with the newest observation.

The method is AsyncVLA (Hirose et al. 2026, arXiv 2602.13476). A large policy on a distant server answers late, and the
adapter corrects its chunk in every control step. The adapter's inputs are the chunk, the observation of the chunk, and
the newest observation. Actions are first made relative to the newest state. The module needs only numpy.
``research/policies/edge.py`` trains an adapter, and ``adapter_file.py`` describes its file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import numpy as np

from sinew_client.control.adapter_file import KEY, AdapterError, CameraEncoder, Form, parse
from sinew_client.control.motion import parse_motion
from sinew_client.untrusted import UntrustedError, read_bytes

LARGEST = 16 << 20  # largest size of an adapter file, bytes
WIDEST = 1 << 12  # largest number of units in a layer of the network
_EPS = 1e-5  # epsilon of the layer norm


class Adapter:
    """The network of an edge adapter.

    Call :meth:`see` once per observation to compute its features, and :meth:`refine` in each control step.

    Args:
        form: The sizes of the network, and the policy that it belongs to.
        tensors: The weights by name (:mod:`sinew_client.control.adapter_file`).

    Raises:
        AdapterError: The tensors do not match the form, or are not finite.

    Example:
        >>> adapter = Adapter.read("edge.safetensors")
        >>> features = adapter.see({"front": frame})
    """

    def __init__(self, form: Form, tensors: Mapping[str, np.ndarray]):
        self.form = form
        try:
            self._motion = parse_motion(form.motion)
            self._columns = [list(getattr(self._motion, name, ())) for name in ("action", "state")]
            self.rebased(np.zeros((form.chunk, form.action)), np.zeros(form.state), np.zeros(form.state))
        except (ValueError, TypeError, IndexError) as error:
            raise AdapterError(f"{KEY}: motion: {error}") from error
        self._t = {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}
        self._check()

    @classmethod
    def read(cls, path: Path | str) -> Adapter:
        """Read an adapter from a file.

        Args:
            path: The file; at most 16 MiB.

        Returns:
            The adapter.

        Raises:
            AdapterError: The file cannot be read, or is not an adapter.
        """
        path = Path(path)
        try:
            return cls.parse(read_bytes(path, LARGEST))
        except OSError as error:
            raise AdapterError(f"{path}: {error.strerror}") from error
        except (AdapterError, UntrustedError) as error:
            raise AdapterError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, data: bytes) -> Adapter:
        """Read an adapter from the bytes of its file.

        Raises:
            AdapterError: The bytes are not an adapter.
        """
        return cls(*parse(data))

    def check(self, policy: Mapping[str, Any], hz: float) -> None:
        """Check that the adapter was trained for this policy and this control rate.

        Args:
            policy: The policy's description.
            hz: Control steps per second.

        Raises:
            AdapterError: A size, a camera or the control rate differs from the training.
        """
        form, cameras = self.form, [each["name"] for each in policy["cameras"]]
        facts: list[tuple[str, Any, Any]] = [
            ("actions per chunk", form.chunk, policy.get("chunk_size", form.chunk)),
            ("values of an action", form.action, policy["action"]["dim"]),
            ("values of the state", form.state, policy["state"]["dim"]),
            ("control rate", form.hz, hz),
        ]
        facts += [("camera", eye.name, eye.name if eye.name in cameras else cameras) for eye in form.cameras]
        for name, expected, got in facts:
            if expected != got:
                raise AdapterError(f"edge adapter for {form.policy}: {name}: expected {expected}, got {got}")

    def see(self, images: Mapping[str, np.ndarray]) -> np.ndarray:
        """Compute the features of one observation.

        Args:
            images: One frame per camera of the adapter, uint8 [height, width, 3].

        Returns:
            The features, float32 [F].

        Raises:
            AdapterError: A camera is missing, or a frame has another shape or type.
        """
        return np.concatenate([self._look(eye, images) for eye in self.form.cameras])

    def refine(
        self,
        chunk: np.ndarray,
        then: tuple[np.ndarray, np.ndarray],
        now: tuple[np.ndarray, np.ndarray],
        age: int,
    ) -> np.ndarray:
        """Compute refined actions for the present control step and the steps after it.

        Args:
            chunk: The actions of a late answer, float [H, A].
            then: Features (:meth:`see`) and state [S] of the chunk's observation.
            now: Features and state of the newest observation.
            age: Control steps between the two observations.

        Returns:
            The actions, float32 [R, A] in the units of the chunk.

        Raises:
            AdapterError: The chunk or a state has another shape than in training.
        """
        t, form = self._t, self.form
        if chunk.shape != (form.chunk, form.action):
            raise AdapterError(f"chunk: expected shape {[form.chunk, form.action]}, got {list(chunk.shape)}")
        for name, (_, state) in (("state then", then), ("state now", now)):
            if np.shape(state) != (form.state,):
                raise AdapterError(
                    f"{name}: expected {form.state} numbers, got shape {list(np.shape(state))}"
                )
        rows = (self.rebased(chunk, then[1], now[1]) - t["rows.mean"]) / t["rows.std"]
        states = [
            (np.asarray(state, np.float32) - t["state.mean"]) / t["state.std"] for state in (then[1], now[1])
        ]
        late = np.float32(min(age, form.max_age) / form.max_age)
        x = np.concatenate([rows.ravel(), *states, [late], then[0], now[0]]).astype(np.float32)
        x = np.maximum(t["input.weight"] @ x + t["input.bias"], 0)
        for i in range(form.blocks):
            y = _norm(x, t[f"block.{i}.norm.weight"], t[f"block.{i}.norm.bias"])
            x = x + np.maximum(t[f"block.{i}.linear.weight"] @ y + t[f"block.{i}.linear.bias"], 0)
        y = t["output.weight"] @ _norm(x, t["output.norm.weight"], t["output.norm.bias"]) + t["output.bias"]
        return (y.reshape(form.rows, form.action) * t["action.std"] + t["action.mean"]).astype(np.float32)

    def rebased(self, chunk: np.ndarray, then: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Convert a chunk to targets relative to the newest state, as in training.

        Args:
            chunk: The actions, float [H, A].
            then: State of the chunk's observation, float [S].
            now: State of the newest observation, float [S].

        Returns:
            The targets, float32 [H, A]. Values that are also in the state are relative to ``now``.
        """
        targets = np.array(self._motion.targets(np.asarray(chunk, np.float32), np.asarray(then, np.float32)))
        action, state = self._columns
        if action:
            targets[:, action] -= np.asarray(now, np.float32)[state]
        return targets

    def _look(self, eye: CameraEncoder, images: Mapping[str, np.ndarray]) -> np.ndarray:
        frame = images.get(eye.name)
        if frame is None:
            raise AdapterError(f"images: expected {eye.name}, got {', '.join(images) or 'none'}")
        frame = np.asarray(frame)
        if frame.shape != (eye.height, eye.width, 3) or frame.dtype != np.uint8:
            raise AdapterError(
                f"images.{eye.name}: expected uint8 {[eye.height, eye.width, 3]}, got {frame.dtype} {list(frame.shape)}"
            )
        x = frame.astype(np.float32).transpose(2, 0, 1) / np.float32(127.5) - np.float32(1)  # [3, h, w]
        for i, stride in enumerate(eye.strides):
            if i:
                x = np.maximum(x, 0)
            x = _convolved(
                x, self._t[f"camera.{eye.name}.{i}.weight"], self._t[f"camera.{eye.name}.{i}.bias"], stride
            )
        return _points(x)

    def _check(self) -> None:
        form, shapes = self.form, {}
        features = 0
        for eye in form.cameras:
            channels = 3
            for i in range(len(eye.strides)):
                name = f"camera.{eye.name}.{i}.weight"
                shape = self._t[name].shape if name in self._t else ()
                square = len(shape) == 4 and shape[2] == shape[3] and 1 <= shape[2] <= 15
                if not square or shape[1] != channels or shape[0] < 1:
                    raise AdapterError(
                        f"{name}: expected [out, {channels}, k, k] with k up to 15, got {list(shape)}"
                    )
                if min(eye.height, eye.width) < shape[2]:
                    raise AdapterError(
                        f"{name}: expected a kernel that is not larger than the frame, got {shape[2]}"
                    )
                shapes[name], channels = shape, shape[0]
                shapes[f"camera.{eye.name}.{i}.bias"] = (channels,)
            features += 3 * channels
        width = self._t["input.bias"].shape if "input.bias" in self._t else ()
        if len(width) != 1 or not 1 <= width[0] <= WIDEST:
            raise AdapterError(f"input.bias: expected [N] with N up to {WIDEST}, got {list(width)}")
        n = width[0]
        shapes["input.bias"] = (n,)
        shapes["input.weight"] = (n, form.chunk * form.action + 2 * form.state + 1 + 2 * features)
        for i in range(form.blocks):
            shapes[f"block.{i}.linear.weight"] = (n, n)
            for name in ("linear.bias", "norm.weight", "norm.bias"):
                shapes[f"block.{i}.{name}"] = (n,)
        shapes["output.weight"], shapes["output.bias"] = (
            (form.rows * form.action, n),
            (form.rows * form.action,),
        )
        shapes["output.norm.weight"] = shapes["output.norm.bias"] = (n,)
        for kind, size in (("state", form.state), ("rows", form.action), ("action", form.action)):
            shapes[f"{kind}.mean"] = shapes[f"{kind}.std"] = (size,)
        if set(self._t) != set(shapes):
            odd = min(set(self._t) ^ set(shapes))
            raise AdapterError(f"{odd}: " + ("missing tensor" if odd in shapes else "unknown tensor"))
        for name, shape in shapes.items():
            value = self._t[name]
            if value.shape != tuple(shape):
                raise AdapterError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
            if not np.all(np.isfinite(value)):
                raise AdapterError(f"{name}: expected finite numbers")
            if name.endswith(".std") and not np.all(value > 0):
                raise AdapterError(f"{name}: expected numbers above 0")


def _norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Apply layer normalisation over all values of x [N]."""
    centred = x - x.mean()
    return centred / np.sqrt(np.mean(centred * centred) + np.float32(_EPS)) * weight + bias


def _convolved(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int) -> np.ndarray:
    """Convolve x [C, h, w] with weight [O, C, k, k], after padding each side with (k - 1) // 2 zeros. The result is [O,
    h', w'].
    """
    k = weight.shape[2]
    edge = (k - 1) // 2
    x = np.pad(x, ((0, 0), (edge, edge), (edge, edge)))
    windows = np.lib.stride_tricks.as_strided(
        x,
        (x.shape[0], k, k, (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1),
        (*x.strides[:1], *x.strides[1:], stride * x.strides[1], stride * x.strides[2]),
        writeable=False,
    )
    columns = windows.reshape(-1, windows.shape[3] * windows.shape[4])  # [C k k, h' w']
    y = weight.reshape(len(weight), -1) @ columns + bias[:, None]
    return y.reshape(len(weight), *windows.shape[3:])


def _points(x: np.ndarray) -> np.ndarray:
    """Reduce an image x [C, h, w] to three values per channel, float32 [3 C].

    The first two values are the mean horizontal and vertical position in [-1, 1], weighted with the softmax over all
    pixels (spatial softmax). The third value is the mean of the positive part.
    """
    channels, height, width = x.shape
    flat = x.reshape(channels, -1)
    share = np.exp(flat - flat.max(axis=1, keepdims=True))
    share = (share / share.sum(axis=1, keepdims=True)).reshape(x.shape)
    across = share.sum(axis=1) @ np.linspace(-1, 1, width, dtype=np.float32)
    down = share.sum(axis=2) @ np.linspace(-1, 1, height, dtype=np.float32)
    return np.concatenate([across, down, np.maximum(flat, 0).mean(axis=1)])
