"""Find objects that the other pip distributions of this project provide through Python entry points.

Only the distributions in `PACKAGES` are searched. Reading the entry points of all installed packages takes 25 ms, which
would delay the start of each command.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from typing import Any

from sinew.core import SinewError
from sinew.core.extras import install_package

# Key: name of a package in messages. Value: (its name on PyPI, its folder in a checkout of this git repository).
PACKAGES = {"sinew-eval": ("sinew-vla-eval", "eval"), "sinew-perf": ("sinew-vla-perf", "perf")}
# Key: a group of entry points that Sinew uses. Value: the package that provides the objects of this group.
HOMES = {
    "sinew.estimates": "sinew-perf",
    "sinew.judges": "sinew-eval",
    "sinew.names": "sinew-eval",
    "sinew.robots": "sinew-eval",
}


class MissingDistributionError(SinewError):
    """The operation is part of a distribution that is not installed. The message has the command that installs it."""

    code = "missing_package"

    def __init__(self, what: str, package: str):
        super().__init__(f"{what} is in the package {package}: {how_to_install(package)}")


def how_to_install(package: str) -> str:
    """Return the command that a user types to install one of the distributions in `PACKAGES`."""
    return install_package(PACKAGES[package][1])


@cache
def entry_points_of(package: str) -> tuple[EntryPoint, ...] | None:
    """Return the entry points of one of `PACKAGES`; None if the package is not installed."""
    try:
        return tuple(distribution(PACKAGES[package][0]).entry_points)
    except PackageNotFoundError:
        return None


def provided(group: str, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name of the package and the object of each entry point of a group, in the installed packages.

    Args:
        group: The group of entry points.
        name: Name of the entry point; "" for all names.
    """
    for package in PACKAGES:
        for point in entry_points_of(package) or ():
            if point.group == group and name in ("", point.name):
                yield package, point.load()


def provider(group: str, name: str = "") -> Any | None:
    """Return the object that an entry point of a group in `HOMES` refers to; None if its package is not installed.

    ``name`` selects an entry point if the group has several.
    """
    return next((value for _, value in provided(group, name)), None)


def required(group: str, what: str, name: str = "") -> Any:
    """Return the object that an entry point of a group in `HOMES` refers to.

    Args:
        group: The group of entry points.
        what: The feature that the user requested, such as "sinew inspect --plan". The message begins with it.
        name: Name of the object, if the group has several.

    Raises:
        MissingDistributionError: Its package is not installed.
    """
    if (value := provider(group, name)) is None:
        raise MissingDistributionError(what, HOMES[group])
    return value
