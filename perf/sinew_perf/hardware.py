"""Machines and networks, from data files of the package and from files of the user."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from sinew.core import SinewError, did_you_mean
from sinew_client.untrusted import parse_toml, read_toml

from sinew_perf.operators import BITS

Kind = Literal["gpu", "cpu", "npu"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Data of a machine.

    Attributes:
        name: Name for ``--hardware``.
        title: Name for people.
        peak: The largest possible number of FLOP/s, by number format.
        bandwidth: Memory bandwidth in bytes/s.
        memory_gib: Nominal memory, in GiB.
        source: Source of the numbers.
        system_gib: Memory that the operating system and other programs use, in GiB.
        alone_gib: Memory that the operating system uses if no other program runs, in GiB. None if it is unknown.
        on_chip_bandwidth: Bandwidth between compute units and memory on the chip, in bytes/s. None to ignore this
            traffic.
        kind: "gpu", "cpu" or "npu", which determines the engines that can run.
        measured: True if peak and bandwidth were measured. False if they are from a data sheet.
    """

    name: str
    title: str
    peak: dict[str, float]
    bandwidth: float
    memory_gib: float
    source: str
    system_gib: float = 0.0
    alone_gib: float | None = None
    on_chip_bandwidth: float | None = None
    kind: Kind = "gpu"
    measured: bool = False

    def peak_flops(self, dtype: str) -> float:
        """Return the FLOP/s for operands of a format. A format without its own rate uses the rate of the next
        wider format.
        """
        if dtype in self.peak:
            return self.peak[dtype]
        bits = BITS[dtype]
        wider = [name for name in self.peak if BITS[name] >= max(bits, 16)]
        if not wider:
            raise SinewError(
                f"{self.name}: peak: expected a rate for {dtype}, got only {', '.join(self.peak)}"
            )
        return self.peak[min(wider, key=lambda name: BITS[name])]

    @property
    def free_bytes(self) -> int:
        """Return the bytes of memory that the system leaves free."""
        return round((self.memory_gib - self.system_gib) * 2**30)

    @property
    def balance(self) -> float:
        """Return the number of operations per byte of memory traffic at which computing takes as long as the traffic,
        in half precision.
        """
        return self.peak_flops("bf16") / self.bandwidth


@dataclass(frozen=True, slots=True)
class Network:
    """Data of a network link.

    Attributes:
        name: Name for ``--network``.
        title: Name for people.
        upload: Rate from the robot, in bit/s.
        download: Rate to the robot, in bit/s.
        base_ms: One-way latency for any size, in milliseconds.
        source: Source of the numbers.
        efficiency: Share of both rates that a connection reaches, above 0 and at most 1.
    """

    name: str
    title: str
    upload: float
    download: float
    base_ms: float
    source: str = field(default="")
    efficiency: float = 1.0

    def up_s(self, nbytes: float) -> float:
        """Return the seconds that are needed to send ``nbytes`` from the robot, without the base latency. 5 % are added
        for the protocol, as in VLA-Perf.
        """
        return nbytes * OVERHEAD * 8 / (self.upload * self.efficiency)

    def down_s(self, nbytes: float) -> float:
        return nbytes * OVERHEAD * 8 / (self.download * self.efficiency)


OVERHEAD = 1.05
Entry = TypeVar("Entry", Hardware, Network)


def hardware(extra: Path | None = None) -> dict[str, Hardware]:
    """Return all machines by name.

    Args:
        extra: File with further machines, which replace machines of the package with the same name.
    """
    return _table(Hardware, "hardware.toml", extra)


def networks(extra: Path | None = None) -> dict[str, Network]:
    return _table(Network, "networks.toml", extra)


def load_hardware(name: str, extra: Path | None = None) -> Hardware:
    return _find(hardware(extra), name, "hardware")


def load_machines(names: Iterable[str], extra: Path | None = None) -> list[Hardware]:
    """Load machines by name.

    Args:
        names: Names. A text may contain several names, separated by commas.
        extra: File with further machines.

    Raises:
        SinewError: A name is unknown.
    """
    return [
        load_hardware(name, extra) for name in dict.fromkeys(n for text in names for n in text.split(","))
    ]


def load_network(name: str, extra: Path | None = None) -> Network:
    return _find(networks(extra), name, "network")


def load_hops(names: Iterable[str], extra: Path | None = None) -> list[list[Network]]:
    """Load the possible links of each hop of a route.

    Args:
        names: One text for each hop. It contains the names of its possible links, separated by commas.
        extra: File with further networks.

    Raises:
        SinewError: A name is unknown.
    """
    return [[load_network(name, extra) for name in dict.fromkeys(hop.split(","))] for hop in names]


def _table(kind: type[Entry], name: str, extra: Path | None) -> dict[str, Entry]:
    raw = dict(_packaged(name))
    if extra is not None:
        try:
            raw |= read_toml(extra)
        except (OSError, ValueError) as error:
            raise SinewError(f"{extra}: {error}") from None
    return {key: _entry(kind, key, values) for key, values in raw.items()}


@cache
def _packaged(name: str) -> dict[str, Any]:
    text = (files("sinew_perf") / "data" / name).read_text("utf-8")  # own file: in an installed package
    return parse_toml(text)


def _entry(kind: type[Entry], name: str, values: Any) -> Entry:
    if not isinstance(values, dict):
        raise SinewError(f"{name}: expected a table of values, got {type(values).__name__}")
    fields_by_name: dict[str, Any] = {"title": name, "source": "user"} | values
    # A user's numbers for a machine of this package do not change the kind of the machine.
    if kind is Hardware:
        fields_by_name = {
            "kind": _packaged("hardware.toml").get(name, {}).get("kind", "gpu")
        } | fields_by_name
    try:
        made = kind(name=name, **fields_by_name)
    except TypeError as error:
        raise SinewError(f"{name}: {error}") from None
    if isinstance(made, Hardware) and not isinstance(made.peak, dict):
        raise SinewError(f"{name}: peak: expected a table of formats, got {type(made.peak).__name__}")
    if isinstance(made, Hardware) and made.kind not in KINDS:
        raise SinewError(f"{name}: kind: expected one of {', '.join(KINDS)}, got {made.kind!r}")
    numbers = list(made.peak.values()) if isinstance(made, Hardware) else []
    fields = ("bandwidth", "memory_gib") if isinstance(made, Hardware) else ("upload", "download")
    numbers += [getattr(made, each) for each in fields]
    if not numbers or not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        raise SinewError(f"{name}: rates and sizes must be numbers above 0")
    if isinstance(made, Network) and not _is_share(made.efficiency):
        raise SinewError(
            f"{name}: efficiency: expected a number above 0 and at most 1, got {made.efficiency!r}"
        )
    if isinstance(made, Hardware) and (unknown := [each for each in made.peak if each not in BITS]):
        raise SinewError(f"{name}: peak of {unknown[0]!r}: expected formats of {', '.join(BITS)}")
    return made


def _is_share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def _find(table: dict[str, Entry], name: str, what: str) -> Entry:
    if name not in table:
        # Also suggest a name for a text such as "RTX 4090".
        plain = "".join(filter(str.isalnum, name.lower()))
        raise SinewError(f"{what} {name!r}: expected one of {', '.join(table)}{did_you_mean(plain, table)}")
    return table[name]
