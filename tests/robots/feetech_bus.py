"""Six STS3215 servos on a serial port, as Feetech's protocol has them: an SO-101 for LeRobot's own driver.

Written from the published protocol: FF FF, id, length, instruction, parameters, and the complement of their sum. Each
servo goes to its goal at once. ``python -m tests.robots.feetech_bus OUT`` prints the port, and writes all goals to OUT
when its input ends.
"""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import tty
from pathlib import Path

PING, READ, WRITE, SYNC_READ, SYNC_WRITE, ALL = 1, 2, 3, 0x82, 0x83, 0xFE
MODEL, STS3215, ID, LOW, HIGH, OFFSET, GOAL, PRESENT = 3, 777, 5, 9, 11, 31, 42, 56


class Servo:
    """One servo's table of 256 bytes; numbers of two are low byte first."""

    def __init__(self, number: int):
        self.table, self.goals = bytearray(256), []
        self.table[0:3] = bytes((3, 10, 0))  # its firmware
        self.table[ID] = number
        for at, value in (
            (MODEL, STS3215),
            (LOW, 0),
            (HIGH, 4095),
            (OFFSET, 0),
            (GOAL, 2048),
            (PRESENT, 2048),
        ):
            self.write(at, value.to_bytes(2, "little"))
        self.goals.clear()

    def write(self, at: int, data: bytes) -> None:
        self.table[at : at + len(data)] = data
        if at == GOAL and len(data) == 2:
            self.goals.append(int.from_bytes(data[:2], "little"))
            self.table[PRESENT : PRESENT + 2] = data[:2]


def packet(number: int, body: bytes) -> bytes:
    """Return an answer without an error."""
    inner = bytes((number, len(body) + 2, 0)) + body
    return b"\xff\xff" + inner + bytes((~sum(inner) & 0xFF,))


def answer(servos: dict[int, Servo], data: bytes) -> tuple[bytes, bytes]:
    """Return what the bus says to the packets in ``data``, and what is left of it."""
    said = b""
    while (at := data.find(b"\xff\xff")) >= 0 and len(data) >= at + 4 and len(data) >= at + 4 + data[at + 3]:
        number, length = data[at + 2], data[at + 3]
        inner, data = data[at + 2 : at + 4 + length], data[at + 4 + length :]
        assert inner[-1] == ~sum(inner[:-1]) & 0xFF, "a packet with a wrong sum"
        kind, given = inner[2], inner[3:-1]
        if kind == PING:
            said += b"".join(packet(each, b"") for each in (servos if number == ALL else (number,)))
        elif kind == READ:
            said += packet(number, bytes(servos[number].table[given[0] : given[0] + given[1]]))
        elif kind == WRITE:
            servos[number].write(given[0], given[1:])
            said += packet(number, b"")
        elif kind == SYNC_READ:
            said += b"".join(
                packet(n, bytes(servos[n].table[given[0] : given[0] + given[1]])) for n in given[2:]
            )
        elif kind == SYNC_WRITE:
            size = given[1]
            for first in range(2, len(given), size + 1):
                servos[given[first]].write(given[0], given[first + 1 : first + 1 + size])
    return said, data


def main() -> None:
    servos = {number: Servo(number) for number in range(1, 7)}
    own, other = pty.openpty()
    tty.setraw(own)
    tty.setraw(other)
    print(os.ttyname(other), flush=True)
    data = b""
    while True:
        ready, _, _ = select.select([own, sys.stdin], [], [])
        if sys.stdin in ready:  # its end is the end
            break
        data += os.read(own, 4096)
        said, data = answer(servos, data)
        os.write(own, said)
    Path(sys.argv[1]).write_text(json.dumps({number: servo.goals for number, servo in servos.items()}))


if __name__ == "__main__":
    main()
