"""What the other distributions of this project add, by their entry points, and the sentence for when one is missing.

Only the distributions of `PACKAGES` are asked. To read the entry points of everything that is installed takes 25 ms,
which the start of each command would pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any

from sinew.core import SinewError
from sinew.core.extras import install_package

# Name of a package in messages -> its name on package indexes, and its folder in a checkout.
PACKAGES = {"sinew-eval": ("sinew-vla-eval", "eval"), "sinew-perf": ("sinew-vla-perf", "perf")}
# Group of entry points that the core asks for one object, or for an object by its name -> the package that has it.
HOMES = {
    "sinew.estimates": "sinew-perf",
    "sinew.judges": "sinew-eval",
    "sinew.names": "sinew-eval",
    "sinew.robots": "sinew-eval",
}


class MissingDistributionError(SinewError):
    """The operation is part of a distribution that is not installed; the message has the command that installs it."""

    code = "missing_package"

    def __init__(self, what: str, package: str):
        super().__init__(f"{what} is in the package {package}: {how_to_install(package)}")


def how_to_install(package: str) -> str:
    """Return the command that installs one of `PACKAGES`."""
    return install_package(PACKAGES[package][1])


@cache
def entry_points_of(package: str) -> tuple[EntryPoint, ...] | None:
    """Return the entry points of one of `PACKAGES`. None if it is not installed."""
    try:
        return tuple(distribution(PACKAGES[package][0]).entry_points)
    except PackageNotFoundError:
        return None


def provided(group: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (package, what its entry point leads to) for each entry point of a group in the installed packages.

    Args:
        group: The group of entry points.
        name: Name of the entry point. All names if it is empty.
    """
    for package in PACKAGES:
        for point in entry_points_of(package) or ():
            if point.group == group and name in ("", point.name):
                yield package, point.load()


def provider(group: str, name: str = "") -> Any | None:
    """Return the object of a group of `HOMES`, by its name if the group has several. None if its package is not
    installed."""
    return next((value for _, value in provided(group, name)), None)


def required(group: str, what: str, name: str = "") -> Any:
    """Return the object of a group of `HOMES`.

    Args:
        group: The group of entry points.
        what: What the user asked for, as "sinew inspect --plan". It begins the message.
        name: Name of the object, if the group has several.

    Raises:
        MissingDistributionError: Its package is not installed.
    """
    if (value := provider(group, name)) is None:
        raise MissingDistributionError(what, HOMES[group])
    return value
