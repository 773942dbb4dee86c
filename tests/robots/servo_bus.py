"""Servos on serial ports, as two makers' published protocols have them: arms for LeRobot's own drivers.

Feetech's (STS3215, an SO-101): FF FF, id, length, instruction, parameters, and the complement of their sum. Dynamixel's
2.0 (XL430 and XL330, a Koch): FF FF FD 00, id, a length and addresses of two bytes, an error in each answer, and a
CRC-16; what begins like a packet inside one is followed by an FD. Each servo goes to its goal at once; a Dynamixel
refuses its EEPROM while it has torque and stays where it is without.

``python -m tests.robots.servo_bus MAKER ARMS OUT`` prints a port for each arm, and writes all goals to OUT when its
input ends.
"""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import tty
from dataclasses import dataclass
from pathlib import Path

PING, READ, WRITE, STATUS, SYNC_READ, SYNC_WRITE, ALL = 1, 2, 3, 0x55, 0x82, 0x83, 0xFE
ACCESS = 7  # Dynamixel's error of a register that may not be written now


@dataclass(frozen=True)
class Maker:
    """Where a maker's table has what, and how wide: numbers are low byte first.

    models: of the servos 1 to 6. begins: registers of a new servo. torque: its register where it counts.
    """

    models: tuple[int, ...]
    model: int
    number: int
    goal: int
    present: int
    width: int  # of a position
    begins: dict[int, bytes]
    wide: int  # of addresses and lengths in a packet
    torque: int | None = None
    eeprom: int = 0  # registers below are kept without power


FEETECH = Maker((777,) * 6, 3, 5, 42, 56, 2, {0: b"\x03\x0a\x00", 11: b"\xff\x0f"}, 1)
DYNAMIXEL = Maker((1060,) * 2 + (1200,) * 4, 0, 7, 116, 132, 4, {48: b"\xff\x0f\0\0"}, 2, 64, 64)


class Servo:
    """One servo's table of 256 bytes, and the goals that it was given."""

    def __init__(self, maker: Maker, number: int):
        self.maker, self.table, self.goals = maker, bytearray(256), []
        middle = (2048).to_bytes(maker.width, "little")
        model = maker.models[number - 1].to_bytes(2, "little")
        begins = {
            maker.model: model,
            maker.number: bytes((number,)),
            maker.goal: middle,
            maker.present: middle,
        }
        for at, value in (begins | maker.begins).items():
            self.table[at : at + len(value)] = value

    def write(self, at: int, data: bytes) -> int:
        """Take a register's bytes; returns the error."""
        maker = self.maker
        powered = maker.torque is None or self.table[maker.torque] == 1
        if at < maker.eeprom and powered:
            return ACCESS
        self.table[at : at + len(data)] = data
        if at == maker.goal and len(data) == maker.width:
            self.goals.append(int.from_bytes(data, "little", signed=maker.width == 4))
            if powered:
                self.table[maker.present : maker.present + len(data)] = data
        return 0


def feetech(number: int, body: bytes, error: int = 0) -> bytes:
    """Return an answer of Feetech's."""
    inner = bytes((number, len(body) + 2, error)) + body
    return b"\xff\xff" + inner + bytes((~sum(inner) & 0xFF,))


def dynamixel(number: int, body: bytes, error: int = 0) -> bytes:
    """Return an answer of Dynamixel's."""
    body = bytes((STATUS, error)) + body.replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
    whole = b"\xff\xff\xfd\x00" + bytes((number,)) + (len(body) + 2).to_bytes(2, "little") + body
    return whole + crc16(whole).to_bytes(2, "little")


def crc16(data: bytes) -> int:
    """Return the CRC of polynomial 8005 from zero, highest bit first."""
    found = 0
    for byte in data:
        found ^= byte << 8
        for _ in range(8):
            found = (found << 1 ^ (0x8005 if found & 0x8000 else 0)) & 0xFFFF
    return found


def packets(maker: Maker, data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Return the whole packets in ``data``, each with its id, instruction and parameters, and what is left."""
    found = []
    start, at = (b"\xff\xff\xfd\x00", 7) if maker is DYNAMIXEL else (b"\xff\xff", 4)
    while (first := data.find(start)) >= 0 and len(data) >= first + at:
        data = data[first:]
        end = at + int.from_bytes(data[at - maker.wide : at], "little")
        if len(data) < end:
            break
        packet, data = data[:end], data[end:]
        if maker is DYNAMIXEL:
            assert crc16(packet[:-2]) == int.from_bytes(packet[-2:], "little"), "a packet with a wrong CRC"
            body = packet[at:-2].replace(b"\xff\xff\xfd\xfd", b"\xff\xff\xfd")
        else:
            assert packet[-1] == ~sum(packet[2:-1]) & 0xFF, "a packet with a wrong sum"
            body = packet[at:-1]
        found.append((packet[at - maker.wide - 1], body[0], body[1:]))
    return found, data


def answer(maker: Maker, servos: dict[int, Servo], data: bytes) -> tuple[bytes, bytes]:
    """Return what the bus says to the packets in ``data``, and what is left of it."""
    asked, left = packets(maker, data)
    status, wide, said = (dynamixel if maker is DYNAMIXEL else feetech), maker.wide, b""
    for number, kind, given in asked:
        at, rest = int.from_bytes(given[:wide], "little"), given[wide:]
        size = int.from_bytes(rest[:wide], "little")
        ones = [number] if number in servos else list(servos) if number == ALL else []
        if kind == PING:
            for each in ones:  # a Dynamixel says its model and firmware
                model = servos[each].table[maker.model : maker.model + 2] + b"\x2d"
                said += status(each, bytes(model) if maker is DYNAMIXEL else b"")
        elif kind == READ:
            said += b"".join(status(each, bytes(servos[each].table[at : at + size])) for each in ones)
        elif kind == WRITE:
            said += b"".join(status(each, b"", servos[each].write(at, rest)) for each in ones)
        elif kind == SYNC_READ:
            there = [each for each in rest[wide:] if each in servos]
            said += b"".join(status(each, bytes(servos[each].table[at : at + size])) for each in there)
        elif kind == SYNC_WRITE:
            rest = rest[wide:]
            for first in range(0, len(rest), size + 1):
                servos[rest[first]].write(at, rest[first + 1 : first + 1 + size])
    return said, left


def main() -> None:
    maker = {"feetech": FEETECH, "dynamixel": DYNAMIXEL}[sys.argv[1]]
    arms: dict[int, dict[int, Servo]] = {}
    for _ in range(int(sys.argv[2])):
        own, other = pty.openpty()
        tty.setraw(own)
        tty.setraw(other)
        arms[own] = {number: Servo(maker, number) for number in range(1, 7)}
        print(os.ttyname(other), flush=True)
    data = dict.fromkeys(arms, b"")
    while True:
        ready, _, _ = select.select([*arms, sys.stdin], [], [])
        if sys.stdin in ready:  # its end is the end
            break
        for own in ready:
            data[own] += os.read(own, 4096)
            said, data[own] = answer(maker, arms[own], data[own])
            os.write(own, said)
    goals = [{number: servo.goals for number, servo in servos.items()} for servos in arms.values()]
    Path(sys.argv[3]).write_text(json.dumps(goals))


if __name__ == "__main__":
    main()
