"""``sinew tune``: which tiles, libraries and launches are the fast ones for a bundle on this GPU.

What is found is kept per device, and used from then on by every engine that meets the same problems. The last line
of standard output is one JSON object.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from cyclopts import Parameter, validators
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from sinew.cli import terminal
from sinew.core import Observation, SinewError

if TYPE_CHECKING:
    import torch

    from sinew.bundle import Bundle
    from sinew.engine.cuda.engine import CudaEngine
    from sinew.engine.cuda.options import CudaOptions
    from sinew.engine.cuda.tune.timing import Measure
    from sinew.engine.plan.plan import Plan
    from sinew.processing import ModelInputs

SCHEMA = "sinew.tune/1"
INPUTS = 2  # whose chunks have to be equal in every variant of the graph
INTERRUPTED = 130
Row = dict[str, Any]


def tune(
    bundle: Path,
    /,
    *,
    device: str = "cuda",
    dtype: str | None = None,
    budget: Annotated[float, Parameter(validator=validators.Number(gt=0))] = 120.0,
    prompt_tokens: Annotated[tuple[int, ...], Parameter(negative="")] = (),
    again: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Find the fastest tiles for a bundle on this GPU, and keep them for the cuda engine.

    Every problem of the bundle's program is timed with each tile of our kernel, and against cuBLAS and torch; each
    answer is compared first. Then the whole graph is timed in its variants. Ctrl-C keeps what was found.

    Args:
        bundle: as of `sinew infer`. Components that its recipe has in FP8 are tuned in FP8.
        device: cuda, or cuda:N.
        dtype: compute type; the device's default if absent.
        budget: seconds after which no further problem is begun. The graph's variants come on top.
        prompt_tokens: lengths of prompts; all that the policy takes, the longest first, if absent.
        again: also what was tuned before.
    """
    from sinew.core import dtype_word
    from sinew.engine.cuda.backend import BACKEND
    from sinew.engine.cuda.device import require
    from sinew.engine.cuda.open import cuda_options
    from sinew.engine.cuda.tune.timing import on
    from sinew.engine.loading import parse_device
    from sinew.policy import open_bundle

    opened, where = open_bundle(bundle), parse_device(device)
    if where.type == "cpu":
        raise SinewError(
            f"--device {device}: expected cuda or cuda:N; the kernels' references on a CPU have no tiles to tune"
        )
    if not opened.infos:
        raise SinewError(f"{bundle}: expected a bundle with weights, got the head of exported graphs")
    options = cuda_options(opened)
    require(where, options)
    lengths = buckets(options, opened.manifest.spec.max_prompt_tokens, prompt_tokens)
    word = BACKEND.dtype("cuda")[0] if dtype is None else dtype_word(dtype)
    session = TuningSession(opened, where, word, options, on(where), budget, again)
    return reported(session, lengths)


def reported(session: TuningSession, lengths: Sequence[int]) -> int:
    """Run, print what was found, also when interrupted; the exit code."""
    interrupted = False
    try:
        session.run(lengths)
    except KeyboardInterrupt:
        interrupted = True
    result = session.result(interrupted)
    print_report(result, terminal.console())
    terminal.emit(result)
    return INTERRUPTED if interrupted else int(result["failed"] > 0)


def buckets(options: CudaOptions, longest: int, asked: Sequence[int]) -> list[int]:
    """Padded lengths to tune for, the longest first."""
    if wrong := [length for length in asked if not 0 <= length <= longest]:
        raise SinewError(f"--prompt-tokens {wrong[0]}: expected 0 to {longest}, the policy's longest prompt")
    found = {options.bucket(length) for length in asked} if asked else options.buckets(longest)
    return sorted(found, reverse=True)


class TuningSession:
    """``rows``: of the problems, as they are kept. ``measure``: of calls; ``whole``: of an engine's chunk, both in
    milliseconds."""

    def __init__(
        self,
        bundle: Bundle,
        device: torch.device,
        dtype: str,
        options: CudaOptions,
        measure: Measure,
        budget: float,
        again: bool = False,
        whole: Callable[[Callable[[], Any]], float] | None = None,
    ):
        from sinew.engine.cuda.tune.timing import wall_ms

        self.bundle, self.device, self.dtype, self.options = bundle, device, dtype, options
        self.measure, self.whole, self.again = measure, whole or wall_ms, again
        self.budget, self.start = budget, time.monotonic()
        self.rows: list[Row] = []
        self.launch: Row = {"reason": "not reached"}
        self.unsettled = False
        self.lengths: dict[int, Row] = {}

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.start)

    def run(self, lengths: Sequence[int]) -> None:
        """Problems of the longest prompt, the graph's variants, then what the other prompts add."""
        from sinew.engine.cuda.open import cuda_plan

        with self._progress() as show:
            show("load")
            plan = cuda_plan(self.bundle, self.device, self.dtype)
            self.start = time.monotonic()
            for length in lengths:
                if self.lengths and self.left() <= 0:
                    break
                self._problems(plan, length, show)
                if len(self.lengths) == 1:
                    show("the whole graph")
                    self.launch = self._variants(plan, length)

    def _problems(self, plan: Plan, length: int, show: Callable[[str], None]) -> None:
        from sinew.engine.cuda.tune.trials import Trials
        from sinew.engine.cuda.tune.tuner import tune as tune_engine

        engine = self._engine(plan, replace(self.options, graph=False))
        (sample, *_) = self._samples(engine, length)
        trying = lambda text: show(f"{length} prompt tokens, {text}")  # noqa: E731
        trials = Trials(self.device, self.measure, self.left, self.rows.append, trying, self.again)
        try:
            # One step: the others ask for the same.
            tune_engine(engine, lambda: engine.run(*sample, 1), trials)
        finally:
            self.lengths[length] = trials.summary()

    def _variants(self, plan: Plan, length: int) -> Row:
        from sinew.engine.cuda.variants import choose

        steps = self.bundle.manifest.spec.solver_steps

        def chunks(engine: CudaEngine) -> list[np.ndarray]:
            return [engine.run(*sample, steps) for sample in self._samples(engine, length)]

        def whole(engine: CudaEngine) -> float:
            sample = self._samples(engine, length)[0]
            return self.whole(lambda: engine.run(*sample, steps))

        try:
            return choose(self.options, self.device, plan.model, partial(self._engine, plan), chunks, whole)
        except Exception as error:  # noqa: BLE001 - what was tuned is kept; the report says what failed
            self.unsettled = True
            return {"reason": f"not settled: {type(error).__name__}: {error}"[:600]}

    def _engine(self, plan: Plan, options: CudaOptions) -> CudaEngine:
        from sinew.engine.cuda.open import cuda_engine

        gc.collect()  # the engine before: it and its programs hold each other
        return cuda_engine(self.bundle, self.device, self.dtype, options, plan)

    def _samples(self, engine: CudaEngine, length: int) -> list[tuple[ModelInputs, np.ndarray]]:
        """Random frames of the declared sizes, states and noise; prompts of ``length`` tokens."""
        from sinew.cli.bench import make_observation
        from sinew.processing import Processor

        spec, processor = self.bundle.manifest.spec, Processor(self.bundle.manifest)
        found = []
        for seed in range(INPUTS):
            rng = np.random.default_rng(seed)
            given = make_observation(spec, None, "a", None) | {"seed": seed}
            observation = Observation.from_mapping(given)
            inputs = processor.inputs(observation, pixels=not engine.facts.takes_frames)
            state = rng.standard_normal(inputs.state.shape).astype(np.float32)
            tokens = rng.integers(0, processor.recipe.prompt.vocab_size, length)
            mask = np.ones(length, bool)
            inputs = replace(inputs, tokens=tokens, token_mask=mask, state=state)
            found.append((inputs.batched(), processor.noise(observation)[0][None]))
        return found

    def result(self, interrupted: bool) -> Row:
        from sinew.engine.cuda.kernels import choices, tuning

        failed = sum(summary["failed"] for summary in self.lengths.values())
        return {
            "schema": SCHEMA,
            "bundle": str(self.bundle.path),
            "device": str(self.device),
            "dtype": self.dtype,
            "fp8": list(self.options.fp8),
            "seconds": round(time.monotonic() - self.start, 1),
            "interrupted": interrupted,
            "prompt_tokens": {str(length): summary for length, summary in self.lengths.items()},
            "problems": self.rows,
            "launch": self.launch,
            "failed": failed + self.unsettled,
            "kept_in": [str(tuning.cache_file(self.device)), str(choices.cache_file(self.device))],
        }

    @contextmanager
    def _progress(self) -> Iterator[Callable[[str], None]]:
        """A line with what is tried, the number of problems that are kept, and how much of the budget is used."""
        errors = terminal.console(stderr=True)
        columns = (TextColumn("{task.fields[kept]} kept"), BarColumn(), TextColumn("{task.description}"))
        # Without a terminal a progress bar is only noise in a log.
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
            task = progress.add_task("load", total=self.budget, kept=0)

            def show(text: str) -> None:
                used = min(self.budget, self.budget - self.left())
                progress.update(task, description=escape(text), completed=used, kept=len(self.rows))

            yield show


def print_report(result: Row, console: Console) -> None:
    table = Table(title=f"tuned on {result['device']} in {result['seconds']:.0f} s")
    for name in ("problem", "tile", "tiles", "way", "us", "default us"):
        table.add_column(name, justify="right" if name.endswith("us") or name == "tiles" else "left")
    table.add_column("reason", overflow="fold")
    for row in result["problems"]:
        problem = f"{row['kernel']} {'x'.join(map(str, row['dims']))}"
        tile = " ".join(f"{name}{size}" for name, size in (row.get("tile") or {}).items()) or "-"
        times = (f"{row[name]:.1f}" if name in row else "-" for name in ("us", "default_us"))
        cells = (problem, tile, str(row.get("tiles", "-")), row.get("way", "-"), *times, row["reason"])
        table.add_row(*map(escape, cells))
    console.print(table)
    lines = [f"launch   {result['launch'].get('way', '-')}: {result['launch']['reason']}"]
    for length, summary in result["prompt_tokens"].items():
        counts = ", ".join(f"{count} {name}" for name, count in summary.items())
        lines.append(f"{length} prompt tokens: {counts}")
    lines += [f"kept in  {path}" for path in result["kept_in"]]
    if result["interrupted"]:
        lines.append("interrupted: what is in the table is kept")
    console.print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)
