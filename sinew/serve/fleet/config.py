"""What a fleet is made of: a YAML file, or the same as arguments of the application in a RayService."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from sinew_client.untrusted import read_yaml, shown

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew.serve.policies import DEFAULT, check_name

LARGEST = 1e6  # largest number in a file
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]
Share = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas a policy has, between ``min`` and ``max``.

    queue_ms: the wait, before an inference begins, that more replicas are to prevent. up_s, down_s: how long fewer or
    more of them must have been wanted.
    """

    min: Count = 1
    max: Count = 1
    queue_ms: Positive = 50.0
    up_s: Positive = 5.0
    down_s: Positive = 300.0


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy of a fleet. source, engine, device, dtype, threads, max_batch, action_limits: as flags of
    ``sinew serve``; the file must be there on every machine.

    ongoing: requests that a replica has at once, one of which or a batch of which it computes.
    cpus, gpus, memory_gib: what a replica takes of its machine. drain_s: what one that is stopped has for its answers.
    """

    source: str
    replicas: Count | Replicas = 2
    ongoing: Count = 4
    engine: str = "auto"
    device: str = "auto"
    dtype: str | None = None
    threads: Count | None = None
    max_batch: Count | Literal["auto"] = 1
    action_limits: Literal["refuse", "clamp", "off"] = "refuse"
    cpus: Share = 1.0
    gpus: Share = 0.0
    memory_gib: Positive | None = None
    drain_s: Positive = 30.0

    @property
    def most(self) -> int:
        """Return the number of replicas at most."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """policies: by name, the first one of which is ``default``. address: of a Ray cluster, "auto" for the one that this
    machine belongs to; None: one of this machine alone, begun here and ended here."""

    policies: dict[str, PolicyConfig]
    address: str | None = None

    def __post_init__(self) -> None:
        if DEFAULT not in self.policies:
            raise ValueError(f"policies: expected one with the name {DEFAULT}")
        for name, policy in self.policies.items():
            check_name(name)
            for key in ("source", "engine", "device", "dtype"):
                if not str(getattr(policy, key)).isprintable():
                    raise ValueError(f"policies.{name}.{key}: expected printable text")
            if "\0" in policy.source:
                raise ValueError(
                    f"policies.{name}.source: expected a file or a name, got {shown(policy.source)}"
                )
            bounds = policy.replicas
            if isinstance(bounds, Replicas) and bounds.min > bounds.max:
                raise ValueError(
                    f"policies.{name}.replicas: expected min of at most {bounds.max}, got {bounds.min}"
                )


def read(path: Path) -> FleetConfig:
    """Read a file. Raises SinewError with the field that is wrong."""
    try:
        found = read_yaml(path)
    except ModuleNotFoundError:
        raise MissingPackageError("sinew fleet", "yaml") from None
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SinewError(f"{path}: not YAML: {error}") from None
    return parse(found, str(path))


def parse(found: Any, what: str = "fleet") -> FleetConfig:
    """Return the configuration in plain maps and lists. Raises SinewError with the field that is wrong."""
    try:
        return msgspec.convert(found, FleetConfig)
    except (ValueError, OverflowError, RecursionError) as error:  # msgspec's are ValueErrors
        raise SinewError(f"{what}: {error!s:.300}") from None
