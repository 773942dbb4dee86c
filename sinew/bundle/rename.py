"""Cameras by the names of the robot that a policy will run on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from sinew.bundle.schema import Seen
from sinew.core import PolicySpec, SinewError, did_you_mean
from sinew.core.hints import option, pairs


def rename_cameras(spec: PolicySpec, names: Mapping[str, str]) -> PolicySpec:
    """Return the specification with cameras renamed; ``names``: new name -> the bundle's. Their order stays.

    Raises :class:`SinewError` for a camera that the bundle does not have, and for names that would not be unique.
    """
    if not names:
        return spec
    known = [camera.name for camera in spec.cameras]
    for new, old in names.items():
        if old not in known:
            turned = f"; did you mean {option('rename', {old: new})}?" if new in known else ""
            raise SinewError(
                f"{option('rename', {new: old})}: expected one of the cameras {known} after the equals sign,"
                f" got {old!r}{turned or did_you_mean(old, known)}"
            )
    new_of = {old: new for new, old in names.items()}
    if len(new_of) < len(names):
        raise SinewError(f"{option('rename', names)}: expected each camera once")
    after = [new_of.get(name, name) for name in known]
    if len(set(after)) < len(after):
        raise SinewError(
            f"{option('rename', names)}: expected different names of all cameras, got {', '.join(after)}"
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


def renames_for(wanted: Sequence[str], shown: Sequence[str]) -> str:
    """Return example flags that map unknown cameras to the policy's missing ones, in their order; "" without any.

    It is an example, because only the user knows which camera is which.
    """
    free = [name for name in wanted if name not in shown]
    spare = [name for name in shown if name not in wanted]
    return " ".join(f"--rename {new}={name}" for name, new in zip(free, spare, strict=False))


def parse_renames(texts: Iterable[str]) -> dict[str, str]:
    """Return new name -> the bundle's, of texts such as ``front=camera1``."""
    return pairs("--rename", "NEW=CAMERA, as front=camera1", texts)


def renamed(seen: Seen | None, before: PolicySpec, after: PolicySpec) -> Seen | None:
    """Return the record with the cameras' names of ``after``, which has those of ``before`` in the same order."""
    if seen is None:
        return None
    names: Mapping[str, str] = {
        old.name: new.name for old, new in zip(before.cameras, after.cameras, strict=True)
    }
    return replace(seen, cameras={names[name]: camera for name, camera in seen.cameras.items()})
