"""Frames in memory that a client and a server share over a Unix socket: equal, read where they lie, and only there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ServerError, shared, zmtp
from sinew_client.protocol import encode_control, infer_parts

from sinew.cli import main
from sinew.core import ActionChunk, Observation
from sinew.serve.transport.listen import Listen
from sinew.serve.wires import open_wires
from tests.serve.puppet import GOOD, GREETING, WAIT_S, Puppet, desk, frame

pytestmark = pytest.mark.skipif(not shared.AVAILABLE, reason="memory files are Linux's")
RNG = np.random.default_rng(0)
FRAMES = [RNG.integers(0, 256, (300, 300, 3), dtype=np.uint8), RNG.random((160, 160, 3), np.float32)]
DESCRIPTORS = Path("/proc/self/fd")
READY = frame(b"\x05READY\x0bSocket-Type\0\0\0\x03REQ", 4)


class Seeing(Puppet):
    """Keeps what it saw, as it was then and as it came."""

    keeps_frames = False  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[np.ndarray, np.ndarray]] = []

    def run(self, observation: Observation, **given: Any) -> ActionChunk:
        came = observation.images["front"]
        self.seen.append((came.copy(), came))
        return super().run(observation, **given)


@contextlib.contextmanager
def served(path: Path, policy: Puppet, limit: int = 1 << 24, about: Any = None) -> Iterator[str]:
    """Yield the address of a Unix socket. No map may be left at the end."""
    with desk(policy=policy) as there:
        there.service.about()["server"].update(about or {})
        (wire,) = open_wires({"native": str(path)}, Listen(max_message_bytes=limit))
        wire.start(there.service)
        try:
            yield wire.address
        finally:
            wire.stop()
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "sinew-frames" in line]


@pytest.mark.parametrize("keeps", [False, True])
def test_frames_are_those_that_were_sent(tmp_path: Path, keeps: bool) -> None:
    policy = Seeing()
    policy.keeps_frames = keeps  # type: ignore[assignment, misc]
    with served(tmp_path / "s", policy) as address:
        for allowed in (True, False):
            with Client(address, timeout=WAIT_S, shared_memory=allowed) as client:
                for each in FRAMES * 2:  # the second kind is larger: another file
                    client.infer({**GOOD, "images": {"front": each}})
                assert client.frames == ("shared memory" if allowed else "in the message")
                for before, _ in policy.seen[:-1]:
                    assert not np.may_share_memory(before, policy.seen[-1][1])
                assert policy.seen[-1][1].flags.owndata == (allowed and keeps)
                assert policy.seen[-1][1].flags.writeable == (keeps or not allowed)
        shown = [before for before, _ in policy.seen]
        assert len(shown) == 8
        for came, sent in zip(shown, FRAMES * 4, strict=True):
            np.testing.assert_array_equal(came, sent)
            assert came.dtype == sent.dtype
        if keeps:
            for before, after in policy.seen:
                np.testing.assert_array_equal(before, after)
        policy.seen.clear()


def test_a_picture_that_moments_share_lies_there_once(tmp_path: Path) -> None:
    found = []

    class Remembering(Puppet):
        keeps_frames = False  # type: ignore[assignment]

        def run(self, observation: Observation, **given: Any) -> ActionChunk:
            one, again, other = (moment.images["front"] for moment in observation.moments)
            found.extend([np.may_share_memory(one, again), np.may_share_memory(again, other)])
            found.extend([one.copy(), again.copy(), other.copy()])
            return super().run(observation, **given)

    policy = Remembering()
    policy.spec = replace(policy.spec, history=3)
    images = FRAMES[0], FRAMES[0], FRAMES[1]
    *earlier, newest = ({"images": {"front": each}, "state": GOOD["state"]} for each in images)
    with served(tmp_path / "s", policy) as address, Client(address, timeout=WAIT_S) as client:
        client.infer({**GOOD, **newest, "earlier": earlier})
        assert client.frames == "shared memory"
    assert found[:2] == [True, False]
    _, _, file, _, again, *_ = infer_parts({**GOOD, **newest, "earlier": earlier}, 1, jpeg_quality=90)
    assert file is again  # compressed once, too
    for came, sent in zip(found[2:], images, strict=True):
        np.testing.assert_array_equal(came, sent)


def test_what_is_better_sent(tmp_path: Path) -> None:
    """Small frames, files, several observations of one message, and what a server of before does not know."""
    large = {**GOOD, "images": {"front": FRAMES[0]}}
    with served(tmp_path / "s", Puppet()) as address:
        with Client(address, timeout=WAIT_S) as client:
            client.infer(GOOD)
            assert client.frames == "in the message"
            assert all(isinstance(each, ActionChunk) for each in client.infer_all([large, large]))
            assert client.frames == "in the message"
            client.infer(large)
            assert client.frames == "shared memory"
            assert all(isinstance(each, ActionChunk) for each in client.infer_all([large, GOOD]))
        with Client(address, timeout=WAIT_S, retries=1) as client:  # frames are copied before they are sent
            client.infer(large)
            assert client.frames == "shared memory"
    limit = FRAMES[0].nbytes * 3 // 4
    with served(tmp_path / "t", Puppet(), limit) as address, Client(address, timeout=WAIT_S) as client:
        with pytest.raises(ServerError, match="request: expected at most 202500 bytes"):
            client.infer(large)
        assert client.frames == "in the message: expected 64 to 202564 bytes, got 270080"
    with desk() as there, Client(there.native, timeout=WAIT_S) as client:  # TCP
        client.infer(large)
        assert client.frames == "in the message"


def test_a_server_that_knows_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sinew.serve.transport.zeromq.Peer.receive", lambda self, room: self.socket.recv_into(room)
    )
    before = len(list(DESCRIPTORS.iterdir()))
    with served(tmp_path / "s", Puppet()) as address, Client(address, timeout=WAIT_S) as client:
        client.infer({**GOOD, "images": {"front": FRAMES[0]}})
        assert client.frames == "in the message: the server does not support shared memory"
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_frames_that_are_written_while_they_are_read(tmp_path: Path) -> None:
    policy = Seeing()
    large = {**GOOD, "images": {"front": FRAMES[0]}}
    with served(tmp_path / "s", policy) as address, Client(address, timeout=WAIT_S) as client:
        client.infer(large)

        def frames() -> Any:
            return client._link.frames

        def write(observation: Observation, **_given: Any) -> ActionChunk:
            frames().placed([])
            return ActionChunk(np.zeros((3, 2), np.float32))

        policy.run = write  # type: ignore[method-assign]
        with pytest.raises(
            ServerError,
            match="generation: expected .*, got 3: the client has overwritten the frames in shared memory",
        ):
            client.infer(large)
        for end, told in ((b"\xe0\x07\x63", 99), (b"", 0)):  # of a field of its own, or none
            frames().placed = lambda parts, end=end: [*shared.SharedFrames.placed(frames(), parts)[:-1], end]
            with pytest.raises(ServerError, match=rf"expected {told}, got \d: the client has overwritten"):
                client.infer(large)
        policy.seen.clear()  # frames where they lie


def hostile() -> Iterator[tuple[str, list[int]]]:
    """Yield (what the server says, descriptors that no client of ours would pass)."""
    yield "not sealed against shrinking", [os.memfd_create("m", os.MFD_ALLOW_SEALING)]
    sealed = os.memfd_create("m", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    yield "expected 64 to 16777280 bytes, got 0", [sealed]
    yield "expected a sealed file of memory", [os.open("/dev/zero", os.O_RDWR)]
    yield "expected a sealed file of memory", [*os.pipe()]
    with contextlib.suppress(OSError):  # needs pages of the system's
        huge = os.memfd_create("m", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
        fcntl.fcntl(huge, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        yield "expected pages of 4096 bytes", [huge]


def test_descriptors_of_somebody_else(tmp_path: Path) -> None:
    before = len(list(DESCRIPTORS.iterdir()))
    asked = zmtp.message([b"", encode_control("METADATA", 1)])
    with served(tmp_path / "s", Puppet()) as address:
        for expected, descriptors in hostile():
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(WAIT_S)
                peer.connect(address.removeprefix("ipc://"))
                peer.sendall(GREETING + READY)
                socket.send_fds(peer, [asked], descriptors * 40)
                told = b""
                while b"in the message: " not in told:
                    told += (data := peer.recv(1 << 16))
                    assert data, told
                assert expected.encode() in told
            for each in descriptors:
                os.close(each)
        with Client(address, timeout=WAIT_S) as client:
            client.infer({**GOOD, "images": {"front": FRAMES[0]}})
            assert client.frames == "shared memory"
    assert len(list(DESCRIPTORS.iterdir())) == before


def test_bench_says_how_frames_travel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(
        tmp_path / "s", Puppet(), about={"dtype": "fp32", "device": "cpu", "hardware": "x", "threads": 1}
    ) as at:
        for size, expected in (("300x300", "raw, shared memory"), ("48x64", "raw, in the message")):
            assert main(["bench", at, "--runs", "2", "--warmup", "0", "--image-size", size]) == 0
            assert f"1 frames {size.replace('x', ' x ')} ({expected})" in capsys.readouterr().out
