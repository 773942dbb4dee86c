"""Check the result of a family's reader, and write it as a bundle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from sinew import __version__
from sinew.bundle.digests import sha256
from sinew.bundle.quant import BY_TYPE
from sinew.bundle.reader import TORCH_DTYPES
from sinew.bundle.schema import STATISTICS, Manifest, Processing, Provenance, Seen, SourceFile
from sinew.bundle.writer import Progress, TensorSource, write_bundle
from sinew.convert.lerobot.folder import name_of, resolve
from sinew.convert.options import ConvertOptions, Joints
from sinew.core import BundleError, ConvertError, MotionSpec, PolicySpec
from sinew.models import build_on_meta, check_agreement, mismatch
from sinew.models.base import Model


@dataclass(frozen=True)
class Conversion:
    """A checkpoint that has been read, ready to be written as a bundle.

    Attributes:
        format: Name of the checkpoint's format, which the bundle records.
        config: The configuration of the model.
        spec: The policy's inputs and outputs.
        processing: Pre- and post-processing of the policy.
        tokenizer: The text of tokenizer.json.
        tensors: Name -> source. ``rename`` maps these names to the bundle's names. The sources keep the checkpoint's
            names, for messages.
        rename: Function from a name in ``tensors`` to the bundle's name.
        dead: Prefixes of the names of tensors that inference never reads.
        sources: Files of the checkpoint. The bundle records their hashes.
        notes: Notes for the user about the conversion.
        seen: Record of the frames and states of the training data; None if it was not gathered.
        widths_assumed: True if neither the checkpoint nor --arch states the widths.
    """

    format: str
    config: Any
    spec: PolicySpec
    processing: Processing
    tokenizer: str
    tensors: dict[str, TensorSource]
    rename: Callable[[str], str] = str
    dead: tuple[str, ...] = ()
    sources: list[Path] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    seen: Seen | None = None
    widths_assumed: bool = False

    @property
    def dropped(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if name.startswith(self.dead)) if self.dead else ()

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of weights that :meth:`write` will write."""
        dropped = set(self.dropped)
        return sum(t.nbytes for name, t in self.tensors.items() if name not in dropped)

    def write(
        self,
        out: Path,
        name: str,
        options: ConvertOptions,
        progress: Progress | None = None,
        merge: bool = True,
    ) -> None:
        """Check the conversion, then write the bundle.

        Args:
            out: The file to write.
            name: Name of the policy.
            options: The user's options.
            progress: Called with the number of bytes that were just written.
            merge: False writes only the changes of an adapter to its base (``unmerged.py``).

        Raises:
            ConvertError: The checkpoint does not fit its configuration, or cannot become a valid bundle.
        """
        named = {self.rename(t): s for t, s in self.tensors.items() if not t.startswith(self.dead)}
        weights = {name: replace(source, name=name) for name, source in named.items()}
        model = self._check(weights, {name: source.name for name, source in named.items()})
        base, tokenizer = None, self.tokenizer
        if not merge:
            from sinew.convert.unmerged import unmerge

            of = name_of(resolve(options.base)) if options.base else ""
            weights, base = unmerge(weights, of, tokenizer, progress)
            tokenizer = ""
        # A second core hashes the source files while the first core copies the weights.
        with ThreadPoolExecutor(1) as pool:
            hashes = [pool.submit(sha256, path, path.stat().st_size) for path in self.sources]

            def manifest() -> Manifest:
                return Manifest(
                    architecture=self.spec.architecture,
                    name=name,
                    config=msgspec.to_builtins(self.config),
                    spec=replace(
                        self.spec,
                        name=name,
                        control_hz=options.control_hz or self.spec.control_hz,
                        motion=options.motion or self.spec.motion or _motion(self.spec, self.processing),
                        state=options.vectors.get("state", Joints()).named("state", self.spec.state),
                        action=options.vectors.get("action", Joints()).named("action", self.spec.action),
                    ),
                    processing=replace(self.processing, compat=options.compat),
                    provenance=Provenance(
                        format=self.format,
                        converter=f"sinew {__version__}",
                        sources=tuple(map(_source_file, self.sources, hashes)),
                        dropped=self.dropped,
                        notes=self.notes,
                        options=options.record(),
                    ),
                    tokenizer=tokenizer,
                    precision=_precision(weights),
                    seen=self.seen,
                    base=base,
                )

            with ConvertError.at("the checkpoint cannot become a bundle", BundleError):
                manifest().check()
                check_agreement(out, manifest(), model)
            write_bundle(out, _laid_out_first(manifest, hashes), list(weights.values()), progress)

    def _check(self, weights: dict[str, TensorSource], upstream: dict[str, str]) -> Model:
        """Compare the tensors with the model's parameters. Return the model on the meta device, which needs no memory.

        Args:
            weights: The bundle's name -> tensor.
            upstream: The bundle's name -> the checkpoint's name, for messages.

        Raises:
            ConvertError: The tensors have other names or shapes than the model's parameters.
        """
        try:
            model = build_on_meta(self.spec.architecture, self.config)
        except (ValueError, TypeError, ZeroDivisionError, OverflowError, RuntimeError) as error:
            raise ConvertError(
                f"the checkpoint's config describes no valid model: {error}; correct config.json"
            ) from None
        state = model.state_dict()
        # A uint8 parameter contains packed low-bit weights. Its shape is [rows, bytes per row].
        packed = {name for name, tensor in state.items() if tensor.dtype == torch.uint8}
        shapes = {
            name: (t.shape[0], t.nbytes // t.shape[0]) if name in packed and t.type in BY_TYPE else t.shape
            for name, t in weights.items()
        }
        if problems := mismatch(model, shapes, upstream):
            hint = (
                "; if the model does not have the published widths, pass its widths with --arch FILE"
                if self.widths_assumed
                else ""
            )
            raise ConvertError(f"the checkpoint does not fit its config: {problems}{hint}")
        for what, parts in ("state", self.processing.state_parts), ("action", self.processing.action_parts):
            recipe = getattr(self.processing, what)
            size = getattr(self.spec, what).dim * max(recipe.rows, 1)
            sizes = {name: len(recipe.stats.get(name, ())) for name in STATISTICS[recipe.mode]}
            if not parts and (wrong := [f"{got} of {name}" for name, got in sizes.items() if got != size]):
                raise ConvertError(
                    f"statistics of {what}: expected {size} numbers, got {', '.join(wrong)}; use the statistics"
                    " of the policy's training data"
                )
        if odd := next(
            (t for t in weights.values() if t.type not in (BY_TYPE if t.name in packed else TORCH_DTYPES)),
            None,
        ):
            supported = ", ".join(kind.name for kind in TORCH_DTYPES)
            raise ConvertError(f"tensor {upstream[odd.name]!r}: expected {supported}, got {odd.type.name}")
        return model


def _laid_out_first(manifest: Callable[[], Manifest], hashes: list[Future[str]]) -> Callable[[], Manifest]:
    """Return a function that returns the manifest.

    The writer needs the first manifest only to lay out the file, so the first call returns at once, with zeros in
    place of unfinished hashes. Later calls wait for all hashes.
    """
    calls = 0

    def call() -> Manifest:
        nonlocal calls
        calls += 1
        if calls > 1:
            for future in hashes:
                future.result()
        return manifest()

    return call


def _source_file(path: Path, digest: Future[str]) -> SourceFile:
    return SourceFile(
        f"{path.parent.name}/{path.name}", path.stat().st_size, digest.result() if digest.done() else "0" * 64
    )


def _motion(spec: PolicySpec, processing: Processing) -> MotionSpec | None:
    """Return the kind of motion that follows from the processing.

    If the processing adds the state to relative actions, the results are absolute targets. Dimensions without this
    addition, such as a gripper, are absolute in the model's output already.
    """
    steps = processing.action_steps
    same = all(step.reads in ((), step.dims) for step in steps)
    if any(step.reads for step in steps) and same and spec.action.dim == spec.state.dim:
        return MotionSpec("absolute")
    return None


def _precision(tensors: dict[str, TensorSource]) -> dict[str, str]:
    """Return a dict: top-level component of the model -> the storage types of its tensors, joined by "+".

    The type with the most bytes comes first.
    """
    bytes_of: dict[str, Counter[str]] = {}
    for name, tensor in tensors.items():
        bytes_of.setdefault(name.split(".")[0], Counter())[tensor.type.name] += tensor.nbytes
    return {
        component: "+".join(kind for kind, _ in counts.most_common())
        for component, counts in bytes_of.items()
    }
