"""Shared memory for camera frames, between a client and a server on one machine that use a Unix socket.

The client creates a memory file without a name (``memfd_create``), seals its size, and sends its descriptor through the
socket once. Each request then contains the positions of its pixels in the file, and a generation number, which is also
in the first bytes of the file. With this number, the server detects frames that were overwritten. The file can never
shrink, so reading it cannot fail. When both processes have closed the file, the system frees the memory.

This module has the code of both sides: :class:`SharedFrames` for the client, :class:`ReceivedFrames` for the server.
"""

from __future__ import annotations

import mmap
import os
import struct
from types import SimpleNamespace
from typing import Any, Callable, Sequence

import numpy as np

from sinew_client import protocol
from sinew_client.errors import ObservationError, RequestError, ServerError

try:
    import fcntl
    import socket

    PASSED = socket.CMSG_SPACE(struct.calcsize("i"))  # size of the ancillary data for one descriptor, bytes
    _CLOEXEC = socket.MSG_CMSG_CLOEXEC
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    # Python does not have these names if it was built for a C library older than glibc 2.27.
    AVAILABLE = hasattr(os, "memfd_create") and hasattr(os, "MFD_ALLOW_SEALING")
except (ImportError, AttributeError):  # systems other than Linux do not have these modules and constants
    AVAILABLE = False

SHARED, SENT = "shared memory", "in the message"
# The file begins with a header of 64 bytes, whose first eight bytes are the generation number. Each frame begins at a
# multiple of 64 bytes.
HEADER = ALIGN = 64
# If the frames of a request have fewer bytes than this, they are sent in the message. For frames that fit into the
# buffer of a socket (usually 208 KiB), shared memory is not faster.
LEAST = 1 << 18
_GENERATION = struct.Struct("<Q")


class SharedFrames:
    """The client's side of the shared memory.

    Args:
        size: Size of the space for frames, bytes.

    Attributes:
        state: :data:`SHARED` after the server has accepted the memory, else :data:`SENT` with the reason.

    Raises:
        OSError: The system has not enough memory.
    """

    def __init__(self, size: int):
        self.size, self._generation = size, 0
        self.state = f"{SENT}: the server does not support shared memory"
        self._descriptor = os.memfd_create("sinew-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._descriptor, 0, HEADER + size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._descriptor, HEADER + size)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)

    def offer(self, ask: Callable[[list], str]) -> None:
        """Offer the memory to the server, and store the server's answer in ``state``.

        Args:
            ask: Function that sends a request with ancillary data for ``sendmsg``, and returns the server's answer.
        """
        try:
            self.state = (
                ask([(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self._descriptor))])
                or self.state
            )
        except ServerError as error:
            self.state = f"{SENT}: the server rejected shared memory: {error}"
        finally:
            os.close(self._descriptor)  # the server has its own copy of the descriptor

    def placed(self, parts: Sequence) -> list:
        """Copy the raw frames of a request into the shared memory.

        Args:
            parts: The parts of the request.

        Returns:
            The parts of the request with the positions of the frames in place of their pixels.
        """
        self._generation += 1
        # Set the generation to 0 first, so that a server that still reads the last frames detects the change.
        _GENERATION.pack_into(self._map, 0, 0)
        at, results, places = HEADER, [], {}  # type: ignore[var-annotated]
        for part in parts:
            if room(head := results[-1] if results else b"", part):
                if id(part) not in places:
                    places[id(part)] = at
                    self._bytes[at : at + len(part)] = np.frombuffer(part, np.uint8)
                    at += room(head, part)
                results[-1] = protocol.image_head(*head.frame, 0, places[id(part)])
            else:
                results.append(part)
        _GENERATION.pack_into(self._map, 0, self._generation)
        return [*results, protocol.generation(self._generation)]


def offered(size: int, ask: Callable[[list], str]) -> Any:
    """Create shared memory, and offer it to the server.

    Args:
        size: Space for frames, bytes.
        ask: Function that sends a request with ancillary data for ``sendmsg``, and returns the server's answer. Its
            errors are raised.

    Returns:
        The :class:`SharedFrames`. If memory cannot be shared, an object that has only ``state`` with the reason.
    """
    if not AVAILABLE or size >> 32:
        why = "the frames have 4 GiB or more" if AVAILABLE else "this Python has no memfd_create"
        return SimpleNamespace(state=f"{SENT}: {why}")
    try:
        frames = SharedFrames(size)
    except OSError as error:
        return SimpleNamespace(state=f"{SENT}: no memory for the frames: {error}")
    frames.offer(ask)
    return frames


def room(head: Any, part: Any) -> int:
    """Compute the space that a part of a request needs in shared memory.

    Args:
        head: The part before this part.
        part: The part.

    Returns:
        The size in bytes, rounded up to 64; 0 if the part is not a frame of raw pixels.
    """
    return -(-len(part) // ALIGN) * ALIGN if isinstance(head, protocol.FrameHead) else 0


def size_of(parts: Sequence) -> int:
    """Return the space that all frames of a request need in shared memory, bytes."""
    return sum(map(room, parts, parts[1:]))


class ReceivedFrames:
    """The server's side of the shared memory of one connection, mapped for reading.

    If the descriptor cannot be used, the constructor does not raise an error. ``state`` then has the reason.

    Args:
        descriptor: The received descriptor. The constructor closes it.
        limit: Largest size of the frames, bytes.

    Attributes:
        state: :data:`SHARED` if the memory can be used, else :data:`SENT` with the reason.
    """

    def __init__(self, descriptor: int, limit: int):
        self._bytes = np.empty(0, np.uint8)
        try:
            self.state = self._open(descriptor, limit)
        # These errors mean that the descriptor is not a memory file, or that no address space is free.
        except (OSError, ValueError) as error:
            self.state = f"{SENT}: expected a sealed file of memory, got {error}"
        finally:
            os.close(descriptor)

    def _open(self, descriptor: int, limit: int) -> str:
        # Accept only a memory file whose size is sealed. Reading beyond the end of a file that has become smaller would
        # kill this process with SIGBUS.
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            return f"{SENT}: the shared memory is not sealed against shrinking"
        about = os.fstat(descriptor)
        if about.st_blksize != mmap.PAGESIZE:
            return f"{SENT}: expected pages of {mmap.PAGESIZE} bytes, got {about.st_blksize}"
        if not HEADER <= about.st_size <= HEADER + limit:
            return f"{SENT}: expected {HEADER} to {HEADER + limit} bytes, got {about.st_size}"
        mapping = mmap.mmap(descriptor, about.st_size, access=mmap.ACCESS_READ)
        self._bytes = np.frombuffer(mapping, np.uint8)
        return SHARED

    def pixels(self, name: str, at: int, size: int) -> memoryview:
        """Return the bytes of a frame, without a copy.

        Args:
            name: Name of the camera, for error messages.
            at: Position of the frame in the memory, bytes.
            size: Size of the frame, bytes.

        Raises:
            ObservationError: The frame is not inside the memory.
        """
        if not (at >= HEADER and at + size <= len(self._bytes)):
            place = f"{size} bytes from {HEADER} to {len(self._bytes)} in shared memory"
            raise ObservationError(name, place, f"bytes at {at}")
        return self._bytes[at : at + size].data

    def generation(self) -> int:
        """Return the generation number of the present frames; 0 while the client writes frames, or without memory."""
        return int(_GENERATION.unpack_from(self._bytes.data)[0]) if len(self._bytes) else 0


class LentFrames:
    """Reads the frames of one request from shared memory, and detects if the client has overwritten them.

    Args:
        frames: The shared memory of the connection.
        generation: The generation number in the request.

    Attributes:
        taken: True if the request has frames in shared memory.
    """

    def __init__(self, frames: ReceivedFrames, generation: int):
        self._frames, self._generation, self.taken = frames, generation, False

    def pixels(self, name: str, at: int, size: int) -> memoryview:
        """Return the bytes of a frame (:meth:`ReceivedFrames.pixels`)."""
        self.taken = True
        return self._frames.pixels(name, at, size)

    def check(self) -> None:
        """Raise :class:`RequestError` if the client has overwritten the frames of this request."""
        if (now := self._frames.generation()) != self._generation:
            raise RequestError(
                f"generation: expected {self._generation}, got {now}: the client has overwritten the frames in shared"
                " memory before the answer; write new frames only after the answer"
            )


def receive(made: Any, buffer: memoryview, limit: int) -> tuple[int, ReceivedFrames | None]:
    """Receive bytes, and perhaps a descriptor of shared memory, from a Unix socket.

    Args:
        made: The socket.
        buffer: Buffer for the bytes.
        limit: Largest size of shared memory, bytes.

    Returns:
        The number of received bytes, and the shared memory; None if no descriptor has arrived.

    Raises:
        OSError: The connection broke.
    """
    count, beside, _, _ = made.recvmsg_into([buffer], PASSED, _CLOEXEC)
    frames = None
    for _, _, data in beside:
        for (descriptor,) in struct.iter_unpack("i", data):
            # ReceivedFrames closes each descriptor. If there are several descriptors, only the last one is used.
            frames = ReceivedFrames(descriptor, limit)
    return count, frames
