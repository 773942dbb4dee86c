"""Load a policy: every stage in order, from a bundle to an open engine. Imports no torch itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from sinew.bundle import Bundle, Manifest, statistics
from sinew.bundle.adapter import check_name, fitted, open_adapter
from sinew.bundle.gguf_file import FilesInUse, watch
from sinew.bundle.rename import rename_cameras, renamed
from sinew.bundle.schema import KEY_HEADER
from sinew.capabilities import Capabilities
from sinew.core import PolicySpec, SinewError
from sinew.engine.backend import BACKENDS, EngineChoice, choose
from sinew.engine.capability import Capability
from sinew.engine.cpu.kernels.frame_kernels import take_kept_resize
from sinew.engine.engine import Engine, Facts
from sinew.engine.fingerprint import fingerprint
from sinew.processing import Allowed, Processor
from sinew.warm_up import WarmUp

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """The options of :func:`sinew.load`.

    Attributes:
        device: "cpu" or "cuda:N". None or "auto" takes a GPU where PyTorch has one.
        dtype: "fp32", "bf16", "fp16", or "native" for what the bundle stores, component by component. None chooses by
            device and engine. Weights that are stored in the chosen type stay in the file's memory map. The others are
            converted once, during the load.
        engine: "eager", the reference; "plan", the same model after the rewrites of ``sinew.engine.plan``; "cpu", that
            over low-bit weights as the bundle stores them, with compiled kernels; "onnx", the planned model in ONNX
            Runtime, exported next to the bundle on first use; "cuda", the planned model with our kernels in one CUDA
            graph. None or "auto" takes the fastest engine that is installed, fits the device, follows the bundle's
            recipe and is verified for it. ``policy.choice`` has the reasons.
        threads: Number of threads that compute. None gives ONNX Runtime one per usable core, and lets ``warm_up``
            measure whether PyTorch is faster with one thread or with its own choice.
        providers: ONNX Runtime execution providers, preferred first, by their names or short ones such as "cuda".
        ignore_recipe: Run a quantised bundle on an engine that does not compute its recipe. Every report says so.
        rename: The robot's name of a camera -> the bundle's. The camera then has the robot's name.
        allow_missing_cameras: Accept observations without a frame for some cameras. Each chunk then has a warning.
        allow_empty_prompt: Accept observations without an instruction if the bundle has none of its own. For policies
            that were trained without one.
        adapters: Name -> file of ``sinew convert --no-merge``. Each adapter computes the observations that name it,
            with its own statistics. Observations that name none get the bundle itself.
        prepared: Also take an engine that ``sinew prepare`` measured to be faster and that can do less, as ``sinew
            serve`` does.
        reuse: Keep what observations repeat byte for byte, image tokens and the context of the prefix. Answers have
            the same bits, and ``timing`` states what was not computed. It begins with ``warm_up``, or with the first
            inference, which then takes two more passes of the vision tower.
        stream: Take an engine that runs a stream (``sinew.stream``) whose whole chunks are continued in this way:
            "none", "guided", "no-jacobian" or "ramp". None: no stream.
    """

    device: str | None = None
    dtype: str | None = None
    engine: str | None = None
    threads: int | None = None
    providers: Sequence[str] = ()
    ignore_recipe: bool = False
    rename: Mapping[str, str] | None = None
    allow_missing_cameras: bool = False
    allow_empty_prompt: bool = False
    adapters: Mapping[str, str | Path] | None = None
    prepared: bool = False
    reuse: bool = False
    stream: str | None = None


@dataclass(eq=False, repr=False)
class PolicyParts:
    """The parts of a loaded policy.

    Attributes:
        bundle: The file.
        manifest: Its manifest, with the cameras under the robot's names.
        adapters: The bundles of its adapters, by name.
        choice: The engine, device and precision, with reasons.
        opened: The engine; None after the policy is closed.
        facts: Facts of the open engine.
        capabilities: The operations that the policy supports.
        processors: Preprocessing and postprocessing, by adapter. "" is the bundle itself.
        identity: The bundle's ``hash``, ``version``, ``date`` and ``source``.
        files: The files of weights, which must not change.
        start: Measurements and caches that the first inference sets up.
        spec: The manifest's specification: cameras, state, actions, solver.
        lock: Held while the engine computes. A run may begin between two steps of another, on the same thread.
    """

    bundle: Bundle
    manifest: Manifest
    adapters: Mapping[str, Bundle]
    choice: EngineChoice
    opened: Engine | None
    facts: Facts
    capabilities: Capabilities
    processors: Mapping[str, Processor]
    identity: dict[str, str]
    files: FilesInUse
    start: WarmUp
    lock: threading.RLock = field(default_factory=threading.RLock)

    spec: PolicySpec = field(init=False)

    def __post_init__(self) -> None:
        self.spec = self.manifest.spec


def assemble(bundle: Bundle, options: LoadOptions) -> PolicyParts:
    """Load a policy. The stages are in the order in which they run.

    Args:
        bundle: The file. Only its header has been read.
        options: The user's choices.

    Returns:
        The parts of a policy that is ready to prepare observations and to run.

    Raises:
        SinewError: An option does not fit the bundle or this machine. Nothing else is taken in its place.
    """
    # Which file this is, before anybody can change it
    which = identity(bundle)

    # The inputs and outputs of the policy, under the robot's names
    manifest = _renamed(bundle.manifest, options.rename)
    for note in statistics.notes(manifest.spec, bundle.manifest.processing):
        log.warning("%s: %s", manifest.name, note)

    # The adapters over its weights
    adapters = open_adapters(bundle, options.adapters or {})

    # Which engine computes it, where and in which precision
    choice = choose(
        bundle,
        options.engine,
        None if options.device is None else str(options.device),  # torch.device's, too
        options.dtype,
        threads=options.threads,
        providers=options.providers,
        ignore_recipe=options.ignore_recipe,
        adapters=adapters,
        prepared=options.prepared,
        stream=options.stream,
    )

    # How observations become model inputs, and model outputs actions
    allowed: Allowed = {
        "allow_missing_cameras": options.allow_missing_cameras,
        "allow_empty_prompt": options.allow_empty_prompt,
    }
    processors = {"": Processor(manifest, **allowed)}
    for name, each in adapters.items():
        adapted = fitted(each, manifest)
        processors[name] = Processor(adapted, beside=processors[""], adapter=name, **allowed)

    # The model, its weights in memory, and the engine, with compiled kernels for frames and for low-bit weights
    take_kept_resize()
    engine = BACKENDS[choice.engine].open(bundle, replace(choice.options, kernels=_compiled_products))

    # The operations that all of this supports, found once for all requests
    capabilities = Capabilities.of(manifest, engine.facts, choice.engine)
    if options.reuse and (problem := capabilities.why_not(Capability.REUSE)):
        raise SinewError(f"reuse: {problem}")

    files = [bundle.file.in_use, *(each.file.in_use for each in adapters.values())]
    return PolicyParts(
        bundle=bundle,
        manifest=manifest,
        adapters=adapters,
        choice=choice,
        opened=engine,
        facts=engine.facts,
        capabilities=capabilities,
        processors=processors,
        identity=which,
        files=FilesInUse((*files, *map(watch, engine.facts.files))),
        start=WarmUp(options.threads, options.reuse),
    )


def _compiled_products() -> None:
    """Compile and install the kernels for low-bit weights, once."""
    from sinew.engine.cpu.kernels.library import extension  # needs torch

    extension()


def open_adapters(bundle: Bundle, files: Mapping[str, str | Path]) -> dict[str, Bundle]:
    """Open the adapters of a bundle by name. Reads no weights. Raises :class:`BundleError` for adapters of another
    bundle.
    """
    for name in files:
        check_name(name)
    return {name: open_adapter(Path(file), bundle) for name, file in files.items()}


def identity(bundle: Bundle) -> dict[str, str]:
    """Return the identity of a bundle, ready for JSON.

    Returns:
        ``hash``: SHA-256 of the header, which contains the hash of every tensor. For a bundle without hashes,
            :func:`sinew.engine.fingerprint.fingerprint`. ``version``: the version of Sinew that wrote it. ``date``:
            date of the file, in UTC. ``source``: the file.
    """
    written = datetime.fromtimestamp(bundle.path.stat().st_mtime, UTC)
    header = bundle.file.metadata.get(KEY_HEADER)
    return {
        "hash": fingerprint(bundle.path) if bundle.hashes is None else str(header),
        "source": shown_source(str(bundle.path)),
        "version": bundle.manifest.provenance.converter,
        "date": written.isoformat(timespec="seconds"),
    }


def shown_source(source: str) -> str:
    """Return the source of a policy as clients may see it: a relative path or name as typed, of an absolute path the
    last part.
    """
    return Path(source).name if Path(source).is_absolute() else source


def _renamed(manifest: Manifest, rename: Mapping[str, str] | None) -> Manifest:
    """Return a manifest with its cameras under the robot's names."""
    if not rename:
        return manifest
    spec = rename_cameras(manifest.spec, rename)
    return replace(manifest, spec=spec, seen=renamed(manifest.seen, manifest.spec, spec))
