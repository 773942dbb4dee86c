"""Convert checkpoints of other projects into bundles. Each model family declares the checkpoint formats that it reads
(:mod:`sinew.core.registry`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sinew_client.documentation import page

from sinew.bundle import statistics
from sinew.bundle.writer import Progress
from sinew.convert import advantage
from sinew.convert.lerobot.checkpoint import Schema
from sinew.convert.lerobot.folder import read_dataset, resolve, runs_near
from sinew.convert.lerobot.stats import seen_in
from sinew.convert.older import is_bundle, upgrade
from sinew.convert.options import COMPAT, ConvertOptions, parse_motion, parse_vectors
from sinew.convert.read.files import read_json
from sinew.convert.read.safetensors import refuse_adapter
from sinew.convert.tokenizer_files import download
from sinew.core import ConvertError, SinewError, called, registry

# conversion.py imports torch, and recognising a checkpoint does not need torch. Import it for type checkers only.
if TYPE_CHECKING:
    from sinew.convert.conversion import Conversion

# Makes this package callable as a function, `sinew.convert(...)`.
called.call(__name__, "sinew.convert:convert")
# A reader checks only the fields that users often get wrong. If another field is malformed, Python raises one of
# these errors, and the conversion reports it as a ConvertError.
MALFORMED = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    OSError,
)
CHECKPOINT_FILES = (
    "*.json *.safetensors tokenizer/* *_tokenizer/* tokenizer.model experiment_cfg/* assets/* params/*"
    " action_head--*.pt proprio_projector--*.pt mp_rank_00_model_states.pt"
)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    cameras: tuple[str, ...] = (),
    motion: Mapping[str, object] | None = None,
    vectors: Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
    name: str | None = None,
    merge: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Path:
    """Convert a checkpoint into a bundle. A bundle of an older format is rewritten in the present one.

    Args:
        source: A checkpoint folder, a hub name, a vla.cpp GGUF file, or an older bundle, which takes no options.
        out: The bundle to write. The file appears only when it is complete.
        cameras: Names of the cameras, as in ``sinew convert --cameras``.
        motion: Reference of the actions (``Settings.motion``), if the checkpoint does not state it.
        vectors: Names and units of state and action, if the checkpoint does not state them.
        settings: Names and values of ``sinew convert --set``.
        name: Name of the policy; None takes the checkpoint's.
        merge: Merge a LoRA into its base. False writes it as a separate adapter.
        progress: Called with the number of bytes that were just written.
        **options: The other fields of :class:`sinew.convert.options.ConvertOptions`, which are the options of ``sinew
            convert``.

    Returns:
        The path of the bundle.

    Raises:
        ConvertError: The checkpoint cannot be converted. Nothing is written then.

    Example:
        >>> sinew.convert("outputs/train/pick-cube", "policy.gguf")
    """
    arguments = ConvertOptions(
        cameras=tuple(cameras),
        motion=parse_motion(motion),
        vectors=parse_vectors(vectors),
        settings={key: str(value) for key, value in (settings or {}).items()},
        **options,
    )
    if is_bundle(Path(source)):
        upgrade(Path(source), Path(out), arguments, progress, name=name, no_merge=not merge)
        return Path(out)
    conversion = read(source, arguments)
    conversion.write(Path(out), name or conversion.spec.name, arguments, progress, merge)
    return Path(out)


def read(source: str | Path, options: ConvertOptions) -> Conversion:
    """Recognise a checkpoint and read all of it except the weights.

    Raises:
        ConvertError: The checkpoint or an option is not supported.
    """
    if options.control_hz is not None and not 0 < options.control_hz <= 10_000:
        raise ConvertError(
            f"--control-hz {options.control_hz}: expected actions per second, above 0 and at most 10000"
        )
    if options.compat not in COMPAT:
        raise ConvertError(f"--compat {options.compat!r} is not one of {', '.join(COMPAT)}")
    path = Path(source)
    if not path.exists():
        parts = str(source).split("/")
        if len(parts) != 2 or not all(parts):
            raise ConvertError(
                f"{source}: no such file or directory; pass a checkpoint folder, a .gguf file or a hub name OWNER/NAME"
            )
        path = download(str(source), CHECKPOINT_FILES, "download the checkpoint and pass its folder")
        conversion = _read(path, options)
        return replace(conversion, spec=replace(conversion.spec, name=parts[1]))
    return _read(resolve(path, adapters=options.base is not None), options)


def _read(path: Path, options: ConvertOptions) -> Conversion:
    family = recognise(path, adapters=options.base is not None)
    try:
        options = options.for_family(family, path, advantage.SETTINGS)
        conversion = advantage.with_advantage(family.read(path, options), options)
        notes = (*conversion.notes, *statistics.notes(conversion.spec, conversion.processing))
        if options.dataset is not None and (file := read_dataset(options.dataset).stats) is not None:
            try:
                conversion = replace(conversion, seen=seen_in(file, conversion.spec))
            except ConvertError as error:
                # The policy also runs without this record of the training data, so write a note and continue.
                notes = (*notes, f"the record of training frames and states was not stored: {error}")
    except SinewError:
        raise
    except MALFORMED as error:
        raise ConvertError(
            f"{path}: reading the files as a checkpoint of {' or '.join(family.NAMES)} failed"
            f" ({type(error).__name__}: {str(error)[:200]}). Check that the checkpoint is complete"
        ) from error
    return replace(conversion, notes=notes)


def _without_type(file: Path, record: Mapping[str, Any], modules: list[ModuleType], known: str) -> str:
    """Return the error message for a config.json that does not state the type of its policy. The message lists the
    policy types whose configuration fields the file has."""
    if "input_features" not in record:
        return (
            f'{file}: expected the key "type" (LeRobot) or "model_type" (transformers), got neither. Use the'
            f" config.json that was saved with the checkpoint. It has one of these types: {known}"
        )
    fits = [
        name
        for module in modules
        for schema in vars(module).values()
        if isinstance(schema, Schema) and schema.fits(record)
        for name in module.NAMES
    ]
    entries = ", ".join(f'"type": "{name}"' for name in dict.fromkeys(fits))
    hint = (
        f"its other keys are those of {entries}: add this line to the file"
        if entries
        else f"add the key, with one of {known}"
    )
    return f'{file}: the key "type" is missing, as in files of some versions of LeRobot; {hint}'


def _converters() -> Iterator[ModuleType]:
    """Yield the converters in the order in which they are tried."""
    for family in registry.families():
        yield from map(family.load, family.converters)
    for family in registry.families():
        yield from map(family.load, family.guesses)
    yield from map(import_module, registry.FORMATS)


def readers() -> dict[str, Path]:
    """Return a dict from family name to the folder with the code that reads the family's checkpoints."""
    return {family.name: family.folder for family in registry.families()}


def recognise(path: Path, adapters: bool = False) -> ModuleType:
    """Return the module of the family that can read ``path``.

    Args:
        path: A checkpoint.
        adapters: True accepts a LoRA adapter without its base.

    Raises:
        ConvertError: No family can read ``path``, or it is an adapter without its base.
    """
    if path.is_dir() and not adapters:
        refuse_adapter(path)
    modules = []
    for module in _converters():
        modules.append(module)
        if module.recognises(path):
            return module
    if not (path / "config.json").exists():
        got = "a folder without config.json" if path.is_dir() else "a file"
        runs = runs_near(path)
        near = (
            f"; training runs in folders near it: {', '.join(map(str, runs))}; pass one of these folders"
            if runs
            else ""
        )
        raise ConvertError(f"{path}: expected a checkpoint, a folder with config.json, got {got}{near}")
    record = read_json(path / "config.json")
    kind = record.get("type", record.get("model_type"))
    types = ", ".join(name for module in modules for name in module.NAMES)
    if kind is None:
        raise ConvertError(_without_type(path / "config.json", record, modules, types))
    raise ConvertError(
        f"{path / 'config.json'}: checkpoint type {kind!r} is not one of {types}; {page('families')} lists the"
        f" supported types, and {page('adding-a-model')} explains how to add one"
    )
