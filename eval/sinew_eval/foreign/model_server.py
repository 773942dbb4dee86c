"""Use a model server of vla-eval as the policy of an episode: ``vla-eval://HOST:PORT``.

Such a server answers each observation with one action and manages its chunks itself. Source: vla-eval 0.8.0,
``connection.py``, ``protocol/*.py``, ``model_servers/{serve,predict}.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew_client.target import Target
from sinew_client.untrusted import named, raw_array, shown, unpack_msgpack

if TYPE_CHECKING:
    import gymnasium

PROTOCOL = 1  # the `protocol_version` of vla-eval
TIMEOUT_S = 60.0
MAX_BYTES = 1 << 20  # largest answer in bytes, which also limits the numbers in the answer
MAX_NUMBERS = 1 << 16  # largest number of values in an action
MAX_VALUES = 1 << 17  # largest number of values in an answer
KINDS = "biuf"  # kinds of numpy dtypes that an action may have


class ModelServer:
    """Policy on a model server of vla-eval, see :class:`sinew_eval.episodes.policies.EvalPolicy`.

    Args:
        address: ``vla-eval://HOST:PORT``.

    Attributes:
        hello: The server's description of itself.

    Raises:
        SinewError: The server does not answer, or uses another protocol.
    """

    chunk_size, committed_rows = 1, 0
    motion: Mapping[str, Any] | None = None

    def __init__(self, address: str):
        try:
            import aiohttp
            import msgpack
        except ModuleNotFoundError as error:
            raise MissingPackageError("a model server of vla-eval", error.name or "aiohttp") from None
        self.address, self.served = address, dict[str, Any]()
        self._seq, self._begun = 0, False
        self._loop = asyncio.new_event_loop()
        self._aiohttp, self._msgpack = aiohttp, msgpack
        try:
            self._loop.run_until_complete(self._connect(f"ws://{Target.parse(address).place}"))
            self.hello: dict[str, Any] = self._ask("hello", {"protocol_version": PROTOCOL}, "hello")
        except BaseException:
            self.close()
            raise
        version = self.hello.get("protocol_version")
        if not (isinstance(version, int) and version == PROTOCOL):
            self.close()
            raise SinewError(f"{address}: expected protocol_version {PROTOCOL}, got {shown(version, 40)}")

    async def _connect(self, url: str) -> None:
        self._session = self._aiohttp.ClientSession()
        try:
            self._socket = await asyncio.wait_for(
                self._session.ws_connect(url, max_msg_size=MAX_BYTES), TIMEOUT_S
            )
        except (self._aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise SinewError(
                f"{self.address}: cannot connect ({type(error).__name__}: {error}); start the server, or check the"
                " address"
            ) from None

    def start(self, env: gymnasium.Env) -> None:
        self._end()
        self._send("episode_start", {"task": {"name": str(getattr(env.unwrapped, "task", ""))}})
        self._begun = True

    def infer(self, observation: Mapping[str, Any], seed: int) -> tuple[np.ndarray, float]:
        """Request one action.

        Args:
            observation: Images, state and prompt.
            seed: Not used, because the protocol has no field for a seed. The server draws its own noise.

        Returns:
            The action, float32 [1, D], and the milliseconds of the request.
        """
        begun = time.perf_counter()
        seen = {
            "images": {name: np.asarray(frame) for name, frame in observation["images"].items()},
            "states": np.asarray(observation["state"], np.float32),
            "task_description": str(observation.get("prompt", "")),
        }
        answer = self._ask("observation", seen, "action")
        try:
            action = np.asarray(_array(answer.get("actions")))
        except (ValueError, TypeError, OverflowError) as error:
            raise SinewError(
                f"{self.address}: actions: expected an array of numbers, got {named(str(error))}"
            ) from None
        if action.dtype.kind not in KINDS or action.ndim != 1 or not 1 <= action.size <= MAX_NUMBERS:
            raise SinewError(
                f"{self.address}: expected one action for an observation, got {action.dtype} {list(action.shape)};"
                " start the server with a chunk_size, so that it returns one action per request"
            )
        row = action.astype(np.float32)
        if not np.isfinite(row).all():
            raise SinewError(f"{self.address}: expected finite actions, got NaN or infinity")
        return row[None], 1e3 * (time.perf_counter() - begun)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(SinewError, AttributeError):
            self._end()
        with contextlib.suppress(AttributeError):
            self._loop.run_until_complete(self._session.close())
        self._loop.close()

    def _end(self) -> None:
        if self._begun:
            self._send("episode_end", {})
            self._begun = False

    def _ask(self, kind: str, payload: Mapping[str, Any], expected_kind: str) -> dict[str, Any]:
        self._send(kind, payload)
        answer = self._loop.run_until_complete(self._receive())
        if not isinstance(answer, dict) or not isinstance(answer.get("payload"), dict):
            raise SinewError(
                f"{self.address}: expected a message with a payload, got {type(answer).__name__}"
            )
        type_, seq = answer.get("type"), answer.get("seq")
        if isinstance(type_, str) and type_ == "error":
            raise SinewError(
                f"{self.address}: the server reports an error: {named(answer['payload'].get('error'), 500)}"
            )
        # Check the types before comparing, because an answer may contain arrays, which compare element by element.
        if not (
            isinstance(type_, str) and isinstance(seq, int) and (type_, seq) == (expected_kind, self._seq)
        ):
            got = f"{shown(type_, 40)} {shown(seq, 40)}"
            raise SinewError(f"{self.address}: expected {expected_kind!r} {self._seq}, got {got}")
        return dict(answer["payload"])

    def _send(self, kind: str, payload: Mapping[str, Any]) -> None:
        self._seq += 1
        message = {"type": kind, "payload": payload, "seq": self._seq, "timestamp": time.time()}
        try:
            self._loop.run_until_complete(
                self._socket.send_bytes(self._msgpack.packb(message, default=_to_map))
            )
        except (ConnectionError, self._aiohttp.ClientError) as error:
            raise SinewError(
                f"{self.address}: the server closed the connection ({error}); read the server's log"
            ) from None

    async def _receive(self) -> Any:
        try:
            message = await asyncio.wait_for(self._socket.receive(), TIMEOUT_S)
        except TimeoutError:
            raise SinewError(
                f"{self.address}: no answer within {TIMEOUT_S:g} s; check that the server is running"
            ) from None
        if message.type != self._aiohttp.WSMsgType.BINARY:
            raise SinewError(
                f"{self.address}: the server closed the connection ({named(message.extra or message.data, 200)});"
                " read the server's log"
            )
        try:
            return unpack_msgpack(message.data, max_values=MAX_VALUES, max_text=MAX_BYTES)
        except ValueError as error:
            raise SinewError(f"{self.address}: the answer is not a msgpack message: {error}") from None


def _to_map(value: Any) -> Any:
    """Convert an array to the map that model servers of vla-eval read."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send a value of type {type(value).__name__}")
    dense = np.ascontiguousarray(value)
    return {
        "__ndarray__": True,
        "data": dense.tobytes(),
        "dtype": dense.dtype.str,
        "shape": list(dense.shape),
    }


def _array(value: Any) -> Any:
    """Convert a map that contains an array to this array. Other values stay unchanged.

    Raises:
        ValueError: The map is not valid.
        TypeError: An entry of the map has a wrong type.
    """
    if not isinstance(value, dict) or value.get("__ndarray__") is not True:
        return value
    shape, data, dtype = (value.get(name) for name in ("shape", "data", "dtype"))
    if not isinstance(data, memoryview) or not isinstance(dtype, str):
        raise ValueError("expected an array with bytes and a type")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"expected a shape of whole numbers from 0, got {shown(shape)}")
    return raw_array(data, dtype, shape)


def said(address: str) -> dict[str, Any]:
    """Return a model server's description of itself.

    Raises:
        SinewError: The server does not answer.
    """
    policy = ModelServer(address)
    try:
        return policy.hello
    finally:
        policy.close()
