"""Rename a policy's cameras to the names of the robot that runs the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sinew.bundle.schema import Seen
from sinew.core import PolicySpec, SinewError, did_you_mean
from sinew.core.hints import option, pairs


def rename_cameras(spec: PolicySpec, names: Mapping[str, str]) -> PolicySpec:
    """Rename the cameras of a specification. The order of the cameras stays the same.

    Args:
        spec: The specification.
        names: New name -> the bundle's name.

    Raises:
        SinewError: The bundle has no such camera, or two cameras would have the same name.
    """
    if not names:
        return spec
    old_names = [camera.name for camera in spec.cameras]
    for new, old in names.items():
        if old not in old_names:
            turned = f"; did you mean {option('rename', {old: new})}?" if new in old_names else ""
            raise SinewError(
                f"{option('rename', {new: old})}: expected one of the cameras {old_names} after the equals sign,"
                f" got {old!r}{turned or did_you_mean(old, old_names)}"
            )
    new_of = {old: new for new, old in names.items()}
    if len(new_of) < len(names):
        raise SinewError(f"{option('rename', names)}: expected each camera once; remove one of the two")
    after = [new_of.get(name, name) for name in old_names]
    if len(set(after)) < len(after):
        raise SinewError(
            f"{option('rename', names)}: expected a different name for each camera, got {', '.join(after)}"
        )
    cameras = tuple(
        replace(c, name=name, slot=c.slot or (c.name if c.name != name else ""))
        for c, name in zip(spec.cameras, after, strict=True)
    )
    keys = tuple(
        replace(keys, images={key: new_of.get(camera, camera) for key, camera in keys.images.items()})
        for keys in spec.keys
    )
    return replace(spec, cameras=cameras, keys=keys)


def renames_for(cameras: Sequence[str], shown: Sequence[str]) -> str:
    """Return example flags that map an observation's unknown cameras to the policy's missing cameras; "" if there are
    none.

    The flags are only an example, because only the user knows which camera is which.

    Args:
        cameras: Names of the policy's cameras.
        shown: Names of the cameras in the observation.
    """
    free = [name for name in cameras if name not in shown]
    spare = [name for name in shown if name not in cameras]
    return " ".join(f"--rename {new}={name}" for name, new in zip(free, spare, strict=False))


def parse_renames(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts such as ``front=camera1``. Return a dict: the new name -> the bundle's name."""
    return pairs("--rename", "NEW=CAMERA, as front=camera1", texts)


def renamed(seen: Seen | None, before: PolicySpec, after: PolicySpec) -> Seen | None:
    """Rename the cameras of a record of the training data (:class:`Seen`).

    Args:
        seen: The record; None if there is none.
        before: The specification with the old names.
        after: The specification with the new names, in the same order.
    """
    if seen is None:
        return None
    names: Mapping[str, str] = {
        old.name: new.name for old, new in zip(before.cameras, after.cameras, strict=True)
    }
    return replace(seen, cameras={names[name]: camera for name, camera in seen.cameras.items()})
