"""The families of policies: one line here and one folder in ``sinew/families`` for each.

Families of other distributions have an entry point ``sinew.families``, NAME = "package.of.the.folder". A folder
describes itself in its ``__init__`` (:class:`Family`). Its other files are imported only when they are needed, so a
command that needs only names imports neither torch nor a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from sinew_client.untrusted import read_json

from sinew.core import BundleError

# In the order in which their converters are asked for a checkpoint, and in which messages and tables name them.
FAMILIES = (
    "smolvla",
    "pi",
    "pi_fast",
    "gr00t",
    "evo1",
    "turbovla",  # its files end in .pth, as those that the next one takes
    "omnivla",  # before the family whose files its own look like
    "openvla",
    "bitvla",
    "cogact",
    "vla_jepa",
    "act",
    "diffusion",
    "vqbet",
    "multi_task_dit",
    "eo1",
    "wallx",
    "xvla",
)
FORMATS = ("sinew.vlacpp.read",)  # readers of another project's files of several families, asked after theirs
HOME = "sinew.families"
GROUP = "sinew.families"  # entry points of other distributions: name -> the package that is the folder
PUBLISHED = "published.json"


@dataclass(frozen=True)
class Family:
    """A folder of ``sinew/families``. Places are "FILE" or "FILE:NAME" in it.

    Attributes:
        models: Architecture -> its class (:class:`sinew.models.base.Model`).
        backbones: Architecture -> the published vision and language models that it uses, by their authors' names.
        converters: Files that read checkpoints, in the order in which they are tried. Each has NAMES (checkpoints
            that it reads, for messages), OPTIONS (fields of ``convert.options.Options`` that it reads), SETTINGS (of
            --set), recognises(path) and read(path, options) -> Conversion.
        guesses: Converters that recognise their files by missing entries. They are tried after the converters of all
            families.
        units: Architecture -> units of its actions (:class:`sinew.core.VectorSpec`), for bundles that do not state
            them.
        hints: Architecture -> expectations of its own project's clients, in the words of the protocol's codec.
        base: The family that this one extends, the only other folder that it may import.
        golden: Compares a small policy in the folder with its reference's stored answers.
        name: Name of the folder. The registry sets it.
        home: Package of the folder. The registry sets it.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    backbones: Mapping[str, str] = field(default_factory=dict)
    converters: tuple[str, ...] = ()
    guesses: tuple[str, ...] = ()
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: str = ""
    golden: str = ""
    name: str = ""
    home: str = ""

    @property
    def folder(self) -> Path:
        return Path(str(import_module(self.home).__file__)).parent

    def load(self, place: str) -> Any:
        """Return a file of the folder as a module, or what it calls NAME."""
        module, _, name = place.partition(":")
        found = import_module(f"{self.home}.{module}")
        return getattr(found, name) if name else found

    def published(self) -> dict[str, dict[str, Any]]:
        """Return the records of ``published.json`` by preset; none where the folder has no such file."""
        path = self.folder / PUBLISHED
        return read_json(path) if path.is_file() else {}


def families() -> Iterator[Family]:
    """Yield the description of each family, those of other distributions last.

    Raises :class:`BundleError` if one of theirs does not import, or has the name of another family.
    """
    for name in FAMILIES:
        yield replace(import_module(f"{HOME}.{name}").FAMILY, name=name, home=f"{HOME}.{name}")
    for name, home in _added():
        if name in FAMILIES:
            raise BundleError(f"entry point {GROUP}: {name} = {home}: a family of this name is part of sinew")
        yield replace(loaded(GROUP, name, home, "package with FAMILY", ":FAMILY"), name=name, home=home)


@cache
def _added() -> tuple[tuple[str, str], ...]:
    return tuple((point.name, point.value) for point in entry_points(group=GROUP))


def loaded(group: str, name: str, place: str, what: str, part: str = "") -> Any:
    """Return the object that an entry point of another distribution names, or a part of it. Raises
    :class:`BundleError`.
    """
    try:
        return EntryPoint(name, place + part, group).load()
    except Exception as error:  # another distribution's import may raise anything
        raise BundleError(f"entry point {group}: {name} = {place}: expected a {what}: {error}") from error


def place_of(group: str, name: str) -> str:
    """Return the MODULE:CLASS of an installed package's entry point; the name itself if there is none."""
    return next((point.value for point in entry_points(group=group, name=name)), name)


def architectures() -> dict[str, Family]:
    """Return architecture -> its family."""
    return {architecture: family for family in families() for architecture in family.models}


def model_class(architecture: str) -> Any:
    """Return the class of an architecture (:class:`sinew.models.base.Model`). Raises :class:`BundleError`."""
    known = architectures()
    if architecture not in known:
        raise BundleError(f"architecture {architecture!r} is not one of {', '.join(sorted(known))}")
    return known[architecture].load(known[architecture].models[architecture])


def action_units(architecture: str) -> tuple[str, ...]:
    """Return a family's units of its actions; () for an unknown architecture.

    Names are compared without case and punctuation, because servers of other projects spell them differently
    (GR00T-N1.6, gr00t_n1_6).
    """
    said = {plain(name): units for family in families() for name, units in family.units.items()}
    return said.get(plain(architecture), ())


def backbone(architecture: str, config: Mapping[str, Any] | None = None) -> str:
    """Return the published models that an architecture is built on, "" for one that is not one of these. Servers of
    other projects spell it their own way (``action_units``). config: of a bundle, whose towers may have other sizes.
    """
    said = {plain(name): (family, text) for family in families() for name, text in family.backbones.items()}
    if (found := said.get(plain(architecture))) is None:
        return ""
    if config is None:
        return found[1]
    vision = config.get("vision", {})
    if "blocks" in vision and vision.keys() <= {"blocks", "width", "group"}:
        # A residual network (He et al. 2016): two convolutions a block, one before them and a layer behind.
        width = vision.get("width", 64)
        wide = "" if width == 64 else f", {width} channels at first"
        return f"ResNet-{2 * sum(vision['blocks']) + 2}{wide}"
    known = [
        p["config"] for p in found[0].published().values() if plain(p["architecture"]) == plain(architecture)
    ]
    same = not known or any(_widths(each) == _widths(config) for each in known)
    return found[1] if same else f"{found[1]} in other sizes"


def _widths(config: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return width and depth of a policy's eyes and of its language model."""
    parts = [config.get(part) for part in ("vision", "language")]
    return [
        (p.get("hidden_size"), p.get("num_layers")) if isinstance(p, Mapping) else (None, None) for p in parts
    ]


def hints(architecture: str) -> tuple[str, ...]:
    """Return the protocol hints of an architecture; () for an unknown one."""
    family = architectures().get(architecture)
    return family.hints.get(architecture, ()) if family else ()


def plain(architecture: str) -> str:
    """Return an architecture's letters and digits, in lower case."""
    return "".join(letter for letter in architecture.lower() if letter.isalnum())


def presets() -> dict[str, Family]:
    """Return preset -> the family whose ``published.json`` has its sizes."""
    return {preset: family for family in families() for preset in family.published()}
