"""Simulated servos on serial ports, with the published protocols of two makers, as arms for LeRobot's own drivers.

Feetech (STS3215, an SO-101): FF FF, id, length, instruction, parameters, and the complement of their sum. Dynamixel
2.0 (XL430 and XL330, a Koch): FF FF FD 00, id, a length and addresses of two bytes, an error in each answer, and a
CRC-16. If the start of a packet occurs inside a packet, an FD follows it. Each servo moves to its goal at once. A
Dynamixel rejects writes to its EEPROM while its torque is on, and does not move while its torque is off.

``python -m tests.robots.servo_bus MAKER ARMS OUT`` prints a port for each arm. It writes all goals to OUT when its
standard input ends.
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
ACCESS = 7  # Dynamixel's error for a register that cannot be written at present


@dataclass(frozen=True)
class Maker:
    """The register table of a maker. Numbers have their low byte first.

    Attributes:
        models: Model numbers of the servos 1 to 6.
        model: Register of the model number.
        number: Register of the id.
        goal: Register of the goal position.
        present: Register of the present position.
        width: Bytes of a position.
        begins: Content of the registers of a new servo.
        wide: Bytes of the addresses and lengths in a packet.
        torque: Register of the torque. None if the torque has no effect.
        eeprom: Registers below this one are in the EEPROM.
    """

    models: tuple[int, ...]
    model: int
    number: int
    goal: int
    present: int
    width: int  # bytes of a position
    begins: dict[int, bytes]
    wide: int  # bytes of the addresses and lengths in a packet
    torque: int | None = None
    eeprom: int = 0  # registers below this one keep their value without power


FEETECH = Maker((777,) * 6, 3, 5, 42, 56, 2, {0: b"\x03\x0a\x00", 11: b"\xff\x0f"}, 1)
DYNAMIXEL = Maker((1060,) * 2 + (1200,) * 4, 0, 7, 116, 132, 4, {48: b"\xff\x0f\0\0"}, 2, 64, 64)


class Servo:
    """The register table of one servo, 256 bytes, and the goals that it has received."""

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
        """Write bytes to a register. Returns the error."""
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
    """Return an answer in Feetech's protocol."""
    inner = bytes((number, len(body) + 2, error)) + body
    return b"\xff\xff" + inner + bytes((~sum(inner) & 0xFF,))


def dynamixel(number: int, body: bytes, error: int = 0) -> bytes:
    """Return an answer in Dynamixel's protocol."""
    body = bytes((STATUS, error)) + body.replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
    whole = b"\xff\xff\xfd\x00" + bytes((number,)) + (len(body) + 2).to_bytes(2, "little") + body
    return whole + crc16(whole).to_bytes(2, "little")


def crc16(data: bytes) -> int:
    """Return the CRC with polynomial 8005, initial value zero and the highest bit first."""
    found = 0
    for byte in data:
        found ^= byte << 8
        for _ in range(8):
            found = (found << 1 ^ (0x8005 if found & 0x8000 else 0)) & 0xFFFF
    return found


def packets(maker: Maker, data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Return the complete packets in ``data``, each with its id, instruction and parameters, and the remaining
    bytes."""
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
    """Return the answer of the bus to the packets in ``data``, and the remaining bytes."""
    asked, left = packets(maker, data)
    status, wide, said = (dynamixel if maker is DYNAMIXEL else feetech), maker.wide, b""
    for number, kind, given in asked:
        at, rest = int.from_bytes(given[:wide], "little"), given[wide:]
        size = int.from_bytes(rest[:wide], "little")
        ones = [number] if number in servos else list(servos) if number == ALL else []
        if kind == PING:
            for each in ones:  # a Dynamixel answers with its model and firmware
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
        if sys.stdin in ready:  # the program ends when its input ends
            break
        for own in ready:
            data[own] += os.read(own, 4096)
            said, data[own] = answer(maker, arms[own], data[own])
            os.write(own, said)
    goals = [{number: servo.goals for number, servo in servos.items()} for servos in arms.values()]
    Path(sys.argv[3]).write_text(json.dumps(goals))


if __name__ == "__main__":
    main()
