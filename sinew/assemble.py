"""Load a policy: all stages in order, from a bundle file to an engine that is ready to run.

This module itself does not import torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sinew.bundle import Bundle, Manifest, statistics
from sinew.bundle.adapter import check_name, fitted, open_adapter
from sinew.bundle.gguf_file import FilesInUse, watch
from sinew.bundle.rename import rename_cameras, renamed
from sinew.bundle.schema import KEY_HEADER
from sinew.capabilities import Capabilities
from sinew.core import SinewError
from sinew.engine.backend import BACKENDS, choose
from sinew.engine.capability import Capability
from sinew.engine.cpu.kernels.frame_kernels import take_kept_resize
from sinew.engine.engine import Engine
from sinew.engine.fingerprint import fingerprint
from sinew.processing import Allowed, Processor
from sinew.warm_up import WarmUp

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """The options of :func:`sinew.load`.

    Attributes:
        device: "cpu" or "cuda:N". None or "auto" selects a GPU if PyTorch has one.
        dtype: "fp32", "bf16", "fp16", or "native" for the stored type of each component. None selects the type by
            device and engine. Weights that are stored in the selected type stay in the file's memory map. All other
            weights are converted once, during the load.
        engine: "eager", the reference; "plan", the same model after the rewrites of ``sinew.engine.plan``; "cpu", the
            planned model over the stored low-bit weights, with compiled kernels; "onnx", the planned model in ONNX
            Runtime, exported next to the bundle on first use; "cuda", the planned model with Sinew's kernels in one
            CUDA graph. None or "auto" selects the fastest engine that is installed, fits the device, follows the
            bundle's recipe and is verified for the bundle. ``policy.choice`` has the reasons.
        threads: Number of computing threads. None gives ONNX Runtime one thread per usable core. For PyTorch, None lets
            ``warm_up`` measure whether one thread or PyTorch's default number is faster.
        providers: ONNX Runtime execution providers, preferred first, by their full names or by short names such as
            "cuda".
        ignore_recipe: Run a quantised bundle on an engine that does not compute the recipe of the bundle. Every report
            states this.
        rename: The robot's name of a camera -> the bundle's name. The policy then has the robot's name.
        allow_missing_cameras: Accept observations without a frame for some cameras. Each chunk then has a warning.
        allow_empty_prompt: Accept observations without an instruction if the bundle has no default instruction. Use
            this for policies that were trained without instructions.
        adapters: Name -> file of ``sinew convert --no-merge``. An observation names the adapter that computes it. The
            adapter uses its own statistics. An observation that names no adapter runs on the bundle itself.
        prepared: Also allow the selection of an engine that was faster in the measurement of ``sinew prepare``, but
            that supports fewer operations. ``sinew serve`` sets this.
        reuse: Cache the image tokens and the context of the prefix for inputs that later observations repeat byte for
            byte. The actions are the same bit for bit, and ``timing`` states which stages were skipped. The cache
            starts in ``warm_up``, or in the first inference, which then runs the vision tower two more times.
        stream: Select an engine that supports a stream (``sinew.stream``) in which each new chunk continues the
            previous one by this method: "none", "guided", "no-jacobian" or "ramp". None: no stream.
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


class LoadedPolicy:
    """The parts of a loaded policy. The constructor loads them, stage by stage.

    Args:
        bundle: The file. Only its header has been read.
        options: The user's choices.

    Attributes:
        bundle: The file.
        identity: The bundle's ``hash``, ``version``, ``date`` and ``source``.
        manifest: The manifest of the file, with the cameras under the robot's names.
        spec: The manifest's specification: cameras, state, actions, solver.
        adapters: The bundles of the adapters, by name.
        choice: The engine, device and precision, with reasons.
        processors: Preprocessing and postprocessing, by adapter. The key "" is the bundle itself.
        opened: The engine. None after the policy is closed.
        facts: Properties of the open engine, such as its threads and precision.
        capabilities: The operations that the policy supports.
        files: The files of weights, which must not change while the policy is open.
        start: The choices that the first inference makes: the number of threads, and the cache of repeated inputs.
        lock: Locked while the engine computes. The thread that holds it may start another run between two solver steps
            of a run.

    Raises:
        SinewError: An option does not fit the bundle or this machine. No other option is selected instead.
    """

    def __init__(self, bundle: Bundle, options: LoadOptions):
        # Compute the identity of the file first, so that another process has no time to change the file before that.
        self.bundle, self.identity = bundle, identity(bundle)

        # Rename the cameras of the policy to the robot's names.
        self.manifest = _renamed(bundle.manifest, options.rename)
        self.spec = self.manifest.spec
        for note in statistics.notes(self.spec, bundle.manifest.processing):
            log.warning("%s: %s", self.manifest.name, note)

        # Open the bundles of the LoRA adapters.
        self.adapters = open_adapters(bundle, options.adapters or {})

        # Select the engine, the device and the precision.
        self.choice = choose(
            bundle,
            options.engine,
            # Convert to a text, because the caller may pass a torch.device.
            None if options.device is None else str(options.device),
            options.dtype,
            threads=options.threads,
            providers=options.providers,
            ignore_recipe=options.ignore_recipe,
            adapters=self.adapters,
            prepared=options.prepared,
            stream=options.stream,
        )

        # Create the processors, which convert observations to model inputs and model outputs to actions.
        allowed: Allowed = {
            "allow_missing_cameras": options.allow_missing_cameras,
            "allow_empty_prompt": options.allow_empty_prompt,
        }
        own = Processor(self.manifest, **allowed)
        self.processors = {"": own}
        for name, each in self.adapters.items():
            adapted = fitted(each, self.manifest)
            self.processors[name] = Processor(adapted, beside=own, adapter=name, **allowed)

        # Open the engine, which builds the model and loads its weights. Compiled kernels resize frames and multiply
        # low-bit weights.
        take_kept_resize()
        engine = BACKENDS[self.choice.engine].open(
            bundle, replace(self.choice.options, kernels=_compiled_products)
        )
        self.opened: Engine | None = engine
        self.facts = engine.facts

        # Find the supported operations once, so that requests need no check of the engine.
        self.capabilities = Capabilities.of(self.manifest, self.facts, self.choice.engine)
        if options.reuse and (problem := self.capabilities.why_not(Capability.REUSE)):
            raise SinewError(f"reuse: {problem}")

        # Watch the files of weights, and leave the remaining choices to the first inference.
        bundles = (bundle, *self.adapters.values())
        self.files = FilesInUse((*(each.file.in_use for each in bundles), *map(watch, self.facts.files)))
        self.start = WarmUp(options.threads, options.reuse)
        self.lock = threading.RLock()


def _compiled_products() -> None:
    """Compile the kernels that multiply low-bit weights, and install the kernels in the classes that store
    such weights. Only the first call has an effect.
    """
    # Import here, because this module imports torch.
    from sinew.engine.cpu.kernels.library import extension

    extension()


def open_adapters(bundle: Bundle, files: Mapping[str, str | Path]) -> dict[str, Bundle]:
    """Open the adapters of a bundle by name. Reads no weights.

    Args:
        bundle: The bundle.
        files: Name of an adapter -> its file.

    Returns:
        Name -> the open adapter.

    Raises:
        BundleError: A name is not valid, or an adapter belongs to another bundle.
    """
    for name in files:
        check_name(name)
    return {name: open_adapter(Path(file), bundle) for name, file in files.items()}


def identity(bundle: Bundle) -> dict[str, str]:
    """Return the facts that identify a bundle, such as its hash and version, ready for JSON.

    Returns:
        ``hash``: SHA-256 of the header, which contains the hash of every tensor. For a bundle without hashes, the
            result of :func:`sinew.engine.fingerprint.fingerprint`. ``version``: the version of Sinew that wrote the
            bundle. ``date``: date of the file, in UTC. ``source``: path or name of the file.
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
    """Return the source of a policy (path or name) in a form that does not reveal this machine's folders to clients.

    A relative path or a name is returned as typed. Of an absolute path, only the last part is returned.
    """
    return Path(source).name if Path(source).is_absolute() else source


def _renamed(manifest: Manifest, rename: Mapping[str, str] | None) -> Manifest:
    """Return a manifest with its cameras under the robot's names."""
    if not rename:
        return manifest
    spec = rename_cameras(manifest.spec, rename)
    return replace(manifest, spec=spec, seen=renamed(manifest.seen, manifest.spec, spec))
