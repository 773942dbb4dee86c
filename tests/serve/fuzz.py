"""Mutated messages for every decoder of the server, in one process: ``python -m tests.serve.fuzz --cases 20000``.

Each case is a good message with a few bytes changed, cut, doubled or moved. What may come out is a value or a
SinewError (ZmtpError for the framing); anything else is printed with the seed that makes it again, and the exit code is
1. Time and memory are looked at as well: the slowest case and the growth of the process are printed.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import pickle
import random
import sys
import time
from collections.abc import Callable

import msgpack
import numpy as np
from PIL import Image
from sinew_client import protocol

from sinew.core import ObservationError, SinewError
from sinew.serve.decode.array import pack
from sinew.serve.decode.frames import PixelBudget, compressed_frame
from sinew.serve.decode.npy import dump_npy, load_npy
from sinew.serve.decode.pickle.machine import load
from sinew.serve.transport import zmtp
from sinew.serve.wires import evo1, http, openpi
from sinew.serve.wires.groot.codec import GrootCodec
from sinew.serve.wires.groot.names import Names
from sinew.serve.wires.native import NativeCodec
from tests.serve.puppet import FRAME, GREETING, SPEC, frame, request, resident


def mutate(rng: random.Random, data: bytes) -> bytes:
    """A few changes anywhere, most of them near the beginning, where the structure is."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        if not changed:
            break
        at = rng.randrange(min(len(changed), 300) if rng.random() < 0.7 else len(changed))
        kind = rng.randrange(5)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)]
        else:
            changed[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x80\0\0\0")
            )
    return bytes(changed)


def image(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(FRAME).save(buffer, kind)
    return buffer.getvalue()


def targets() -> dict[str, tuple[bytes, Callable[[bytes], object]]]:
    """Name -> (a good message, what reads it)."""
    native, groot = NativeCodec(), GrootCodec()
    native.spec, native.padded_state_dim, native.padded_action_dim = SPEC, 2, 2
    groot.names = Names.of(SPEC)

    def read_native(data: bytes) -> object:
        header = native.peek(memoryview(data))
        if header.error is not None:
            raise header.error
        return native.decode(data)

    def read_groot(data: bytes) -> object:
        header = groot.peek(memoryview(data))
        if header.error is not None:
            raise header.error
        if header.endpoint != "get_action":
            return header
        return [decode(PixelBudget()) for decode in groot.decoders(header, memoryview(data))]

    def read_zmtp(data: bytes) -> object:
        framing = zmtp.Framing(1 << 16)
        found = []
        while data:
            room = framing.room()
            part = data[: len(room)]
            room[: len(part)] = part
            framing.take(len(part))
            data = data[len(part) :]
            while (message := framing.next()) is not None:
                found.append(message)
        return found

    ready = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)
    picture = {"__numpy__": base64.b64encode(FRAME.tobytes()).decode(), "dtype": "|u1", "shape": [48, 64, 3]}
    body = {"images": {"front": picture}, "state": [0, 0], "prompt": "go", "session": "a", "deadline_ms": 5}
    flat = {"images": {"front": FRAME}, "state": np.zeros(2), "prompt": "go", "seed": 1}
    nested = {
        "endpoint": "get_action",
        "data": {
            "observation": {
                "video": {"front": {"__ndarray_class__": True, "as_npy": dump_npy(FRAME[None, None])}},
                "state": {
                    "state": {"__ndarray_class__": True, "as_npy": dump_npy(np.zeros((1, 1, 2), np.float32))}
                },
                "language": {"annotation.human.task_description": [["go"]]},
            },
            "options": {"seed": 1},
        },
    }
    pictures = {
        "image": [[[[1, 2, 3]] * 3] * 2, [[[0, 0, 0]]]],
        "image_mask": [1, 0],
        "state": [0, 0],
        "action_mask": [[1, 1, 0]],
        "prompt": "go",
        "arm_key": "arm",
    }
    return {
        "evo1": (json.dumps(pictures).encode(), lambda data: evo1.observation(evo1.read(data), SPEC)),
        "zmtp": (GREETING + ready + zmtp.message([b"", request(1)[:300]]), read_zmtp),
        "native": (request(1, session="arm", seed=3, deadline_ms=5), read_native),
        "openpi": (pack(flat), lambda data: openpi.observation(openpi.read(data), SPEC)),
        "http": (json.dumps(body).encode(), lambda data: http.observation(http.read(data, http.JSON), SPEC)),
        "act": (
            json.dumps({"full_image": picture, "instruction": "go", "state": [0, 0]}).encode(),
            lambda data: http.act_observation(http.read_act(data), SPEC),
        ),
        "groot": (msgpack.packb(nested), read_groot),
        "npy": (dump_npy(np.array(["go", "on"])), lambda data: load_npy("x", memoryview(data))),
        "pickle": (
            pickle.dumps({"a.pos": 1.5, "task": "go", "n": [1, 2, (3,)]}, 4),
            lambda data: load(data, {}),
        ),
        "jpeg": (image("JPEG"), lambda data: compressed_frame("f", data, PixelBudget())),
        "png": (image("PNG"), lambda data: compressed_frame("f", data, PixelBudget())),
        "reply": (
            protocol.schema.PredictResponse(
                request_id=1, actions=[0.0] * 6, horizon=3, dim=2
            ).SerializeToString(),
            lambda data: protocol.decode_chunk(protocol.decode_reply(data, 1)),
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000, help="of each decoder")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    bad = total = 0
    expected = (SinewError, ObservationError, zmtp.ZmtpError, protocol.ClientError)
    for name, (good, read) in targets().items():
        read(good)
        before, taken, refused, slowest = resident(), 0, 0, 0.0
        for number in range(given.cases):
            data = mutate(random.Random(f"{name} {given.seed} {number}"), good)
            begin = time.perf_counter()
            try:
                read(data)
                taken += 1
            except expected:
                refused += 1
            except BaseException as error:  # noqa: BLE001 - that is what is looked for
                bad += 1
                print(f"{name}, seed {given.seed}, case {number}: {type(error).__name__}: {error}")
            slowest = max(slowest, time.perf_counter() - begin)
        total += given.cases
        grown = (resident() - before) / (1 << 20)
        print(
            f"{name}: {taken} taken, {refused} refused, slowest {1e3 * slowest:.0f} ms, {grown:+.0f} MiB",
            flush=True,
        )
    print(f"{total} inputs, {bad} unexpected")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
