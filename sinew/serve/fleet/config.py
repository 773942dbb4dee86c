"""The configuration of a fleet. The configuration comes from a YAML file, or from the arguments of the application
in a RayService.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from sinew_client.untrusted import read_yaml, shown

from sinew.core import SinewError
from sinew.core.extras import MissingPackageError
from sinew.serve.policies import DEFAULT, check_name

LARGEST = 1e6  # largest number in a configuration file
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]
Share = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of replicas of a policy, between ``min`` and ``max``.

    Attributes:
        min: Smallest number of replicas.
        max: Largest number of replicas.
        queue_ms: Waiting time of requests in milliseconds above which replicas are added.
        up_s: Seconds for which more replicas must be needed before they are started.
        down_s: Seconds for which fewer replicas must be needed before some are stopped.
    """

    min: Count = 1
    max: Count = 1
    queue_ms: Positive = 50.0
    up_s: Positive = 5.0
    down_s: Positive = 300.0


class PolicyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One policy of a fleet. ``source``, ``engine``, ``device``, ``dtype``, ``threads``, ``max_batch`` and
    ``action_limits`` have the meaning of the flags of ``sinew serve``. The file of ``source`` must exist on
    every machine.

    Attributes:
        replicas: The number of replicas.
        ongoing: Largest number of requests that a replica has at once. The replica computes one of these requests
            at a time, or a batch.
        cpus: CPU cores that a replica reserves on its machine.
        gpus: GPUs that a replica reserves on its machine.
        memory_gib: Memory that a replica reserves on its machine, GiB; None reserves no memory.
        drain_s: Seconds for the last answers of a replica that stops.
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
        """Return the largest number of replicas that the policy may have."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas.max


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of a fleet.

    Attributes:
        policies: Name -> policy. One policy must have the name ``default``.
        address: The address of a Ray cluster; "auto" for the cluster of this machine. None starts a cluster on this
            machine, which ends with the fleet.
    """

    policies: dict[str, PolicyConfig]
    address: str | None = None

    def __post_init__(self) -> None:
        if DEFAULT not in self.policies:
            raise ValueError(
                f"policies: expected a policy with the name {DEFAULT}, got none; rename one of them"
            )
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
    """Read the configuration of a fleet from a file.

    Raises:
        SinewError: The file cannot be read, or a field is wrong. The error names the field.
    """
    try:
        content = read_yaml(path)
    except ModuleNotFoundError:
        raise MissingPackageError("sinew fleet", "yaml") from None
    except OSError as error:
        raise SinewError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SinewError(f"{path}: not YAML: {error}; correct the file") from None
    return parse(content, str(path))


def parse(found: Any, what: str = "fleet") -> FleetConfig:
    """Convert plain maps and lists to a configuration.

    Args:
        found: The maps and lists.
        what: Name of the configuration, for errors.

    Raises:
        SinewError: A field is wrong. The error names the field.
    """
    try:
        return msgspec.convert(found, FleetConfig)
    except (ValueError, OverflowError, RecursionError) as error:
        # msgspec raises ValueError for a wrong field.
        raise SinewError(f"{what}: {error!s:.300}") from None
