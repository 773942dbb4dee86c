"""The families of policies. Each family has one line in this file and one folder in ``sinew/families``.

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

# Converters are tried in this order, and messages and tables list the families in this order.
FAMILIES = (
    "smolvla",
    "pi",
    "pi_fast",
    "gr00t",
    "evo1",
    "turbovla",  # comes before omnivla, because omnivla also accepts every file that ends in .pth
    "omnivla",  # comes before openvla, because the files of both families look similar
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
    "molmoact2",
    "xvla",
)
# Readers of file formats that several families share. The registry tries these readers after all families.
FORMATS = ("sinew.vlacpp.read",)
HOME = "sinew.families"
# Group of entry points with which other pip distributions add families. Name of an entry point: the family. Its value:
# the package of the family's folder.
GROUP = "sinew.families"
PUBLISHED = "published.json"


@dataclass(frozen=True)
class Family:
    """A folder of ``sinew/families``. References have the form "FILE" or "FILE:NAME", relative to the folder.

    Attributes:
        models: Architecture -> its class (:class:`sinew.models.base.Model`).
        backbones: Architecture -> the published vision and language models that it uses, by their authors' names.
        converters: Files that read checkpoints, in the order in which they are tried. Each has NAMES (checkpoints
            that it reads, for messages), OPTIONS (fields of ``convert.options.Options`` that it reads), SETTINGS (of
            --set), recognises(path) and read(path, options) -> Conversion.
        guesses: Converters that recognise a checkpoint because some entries are absent. They are tried after the
            converters of all families.
        units: Architecture -> units of its actions (:class:`sinew.core.VectorSpec`), for bundles that do not state
            them.
        hints: Architecture -> texts that select how the server's protocol treats clients of the architecture's own
            project.
        base: The family that this family extends. A family may import code from the folder of its base, but not from
            other families.
        golden: Compares a small policy in the folder with stored answers of the reference implementation.
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
        """Import a file of the family's folder. Return its module, or the object NAME in it. ``place`` is "FILE" or
        "FILE:NAME"."""
        module, _, name = place.partition(":")
        imported = import_module(f"{self.home}.{module}")
        return getattr(imported, name) if name else imported

    def published(self) -> dict[str, dict[str, Any]]:
        """Return the records in the family's ``published.json`` by the name of their preset; {} if there is no such
        file."""
        path = self.folder / PUBLISHED
        return read_json(path) if path.is_file() else {}


def families() -> Iterator[Family]:
    """Yield the description of each family. Families of other pip distributions are last.

    Raises:
        BundleError: A family of another distribution cannot be imported, or has the name of another family.
    """
    for name in FAMILIES:
        yield replace(import_module(f"{HOME}.{name}").FAMILY, name=name, home=f"{HOME}.{name}")
    for name, home in _added():
        if name in FAMILIES:
            raise BundleError(
                f"entry point {GROUP}: {name} = {home}: a family of this name is part of sinew; rename or uninstall it"
            )
        yield replace(loaded(GROUP, name, home, "package with FAMILY", ":FAMILY"), name=name, home=home)


@cache
def _added() -> tuple[tuple[str, str], ...]:
    return tuple((point.name, point.value) for point in entry_points(group=GROUP))


def loaded(group: str, name: str, place: str, what: str, part: str = "") -> Any:
    """Import the object of an entry point of another distribution.

    Args:
        group: The group of entry points.
        name: Name of the entry point.
        place: Its value, MODULE or MODULE:NAME.
        what: The expected object, for the message.
        part: Appended to ``place``, to import a part of the object.

    Raises:
        BundleError: The import fails.
    """
    try:
        return EntryPoint(name, place + part, group).load()
    # The import of another distribution may raise any error.
    except Exception as error:
        raise BundleError(
            f"entry point {group}: {name} = {place}: expected a {what}: {error}; update or uninstall this package"
        ) from error


def place_of(group: str, name: str) -> str:
    """Return the value, MODULE:CLASS, of the installed entry point ``name`` of a group; ``name`` itself if there is
    no such entry point."""
    return next((point.value for point in entry_points(group=group, name=name)), name)


def architectures() -> dict[str, Family]:
    """Return a dict: name of an architecture -> the family whose folder has its model."""
    return {architecture: family for family in families() for architecture in family.models}


def model_class(architecture: str) -> Any:
    """Return the Python class (:class:`sinew.models.base.Model`) that implements an architecture.

    Raises:
        BundleError: The architecture is unknown.
    """
    supported = architectures()
    if architecture not in supported:
        raise BundleError(
            f"architecture {architecture!r} is not one of {', '.join(sorted(supported))}; install the package that adds"
            " it, or a newer Sinew"
        )
    return supported[architecture].load(supported[architecture].models[architecture])


def action_units(architecture: str) -> tuple[str, ...]:
    """Return the units of the actions of an architecture, such as "rad"; () for an unknown architecture.

    Names are compared without case and punctuation, because servers of other projects spell them differently
    (GR00T-N1.6, gr00t_n1_6).
    """
    units_of = {plain(name): units for family in families() for name, units in family.units.items()}
    return units_of.get(plain(architecture), ())


def backbone(architecture: str, config: Mapping[str, Any] | None = None) -> str:
    """Return the published models on which an architecture is built, as text; "" for an unknown architecture.

    Args:
        architecture: The architecture. Servers of other projects may spell it differently (``action_units``).
        config: The configuration of a bundle, whose vision tower may have other sizes; None to ignore sizes.
    """
    backbones = {
        plain(name): (family, text) for family in families() for name, text in family.backbones.items()
    }
    if (entry := backbones.get(plain(architecture))) is None:
        return ""
    if config is None:
        return entry[1]
    vision = config.get("vision", {})
    if "blocks" in vision and vision.keys() <= {"blocks", "width", "group"}:
        # A residual network (He et al. 2016) has two convolutions in each block, one layer before and one after them.
        width = vision.get("width", 64)
        wide = "" if width == 64 else f", {width} channels at first"
        return f"ResNet-{2 * sum(vision['blocks']) + 2}{wide}"
    presets_of = [
        p["config"] for p in entry[0].published().values() if plain(p["architecture"]) == plain(architecture)
    ]
    same = not presets_of or any(_widths(each) == _widths(config) for each in presets_of)
    return entry[1] if same else f"{entry[1]} in other sizes"


def _widths(config: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return (width, depth) of the vision tower and of the language model in a bundle's configuration."""
    parts = [config.get(part) for part in ("vision", "language")]
    return [
        (p.get("hidden_size"), p.get("num_layers")) if isinstance(p, Mapping) else (None, None) for p in parts
    ]


def hints(architecture: str) -> tuple[str, ...]:
    """Return the texts with which an architecture selects the server's behaviour towards clients of its own
    project (:attr:`Family.hints`); () for an unknown architecture.
    """
    family = architectures().get(architecture)
    return family.hints.get(architecture, ()) if family else ()


def plain(architecture: str) -> str:
    """Return only the letters and digits of a name, in lower case, so that different spellings of the name
    are equal.
    """
    return "".join(letter for letter in architecture.lower() if letter.isalnum())


def presets() -> dict[str, Family]:
    """Return a dict: name of a preset -> the family whose ``published.json`` contains this preset."""
    return {preset: family for family in families() for preset in family.published()}
