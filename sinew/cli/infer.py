"""``sinew infer``: compute one action chunk for one observation from files and flags, and print it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.markup import escape

from sinew.cli import terminal
from sinew.cli.options import CAMERAS, RUNS, Cameras, Flag, Runs
from sinew.core import ActionChunk, Observation, progress
from sinew.core.hints import short_reason

if TYPE_CHECKING:
    from sinew.policy import Policy
    from sinew.serve.replay import Replay

ROWS = 10  # this many actions of a chunk are printed


def infer(
    bundle: Path,
    /,
    *,
    image: Annotated[list[str], Parameter(negative="")],
    state: Annotated[str, Parameter(allow_leading_hyphen=True)] = "",
    prompt: str = "",
    seed: int | None = None,
    solver_steps: int | None = None,
    subtask: Flag = False,
    question: str = "",
    advantage: str | None = None,
    guidance_scale: float | None = None,
    cameras: Cameras = CAMERAS,
    runs: Runs = RUNS,
) -> int:
    """Run a policy once on image files and a state, and print the action chunk.

    Args:
        bundle: Policy to run: a bundle, a folder of `sinew export`, a checkpoint or training run, or a hub
            name.
        image: Picture file of a camera, as CAMERA=FILE. Repeatable. A policy with one camera also takes FILE
            alone.
        state: State values in the robot's units, separated by commas. Omit it for a policy without a state.
        prompt: The instruction. Default: the bundle's own. Omit it for a policy without an instruction.
        seed: Seed of the noise that starts the solver. Default: a random seed, which the report states.
        solver_steps: Number of solver steps. Default: the bundle's own number.
        subtask: Let the language head first state a subtask of the prompt, then act on it. The bundle must
            contain the head (`sinew convert --set lm_head=true`).
        question: Question that the language head answers in words. Sinew then computes no actions.
        advantage: Advantage label to put into the prompt, for example positive. '' states none. Default: the
            bundle's usual label.
        guidance_scale: Scale of classifier-free guidance towards the advantage, 0 to 100. Default: 1, the
            prompt with the advantage alone.
    """
    from sinew.bundle.rename import rename_cameras
    from sinew.policy import Policy, open_bundle
    from sinew.processing import Processor
    from sinew.processing.files import parse_vector, read_images

    options = cameras.keywords()
    opened = open_bundle(bundle)
    spec = rename_cameras(opened.manifest.spec, options["rename"])
    manifest = replace(opened.manifest, spec=spec)
    observation = Observation(
        images=read_images(image, spec),
        state=parse_vector("--state", state),
        prompt=prompt,
        seed=seed,
        solver_steps=solver_steps,
        subtask=subtask,
        question=question,
        advantage=advantage,
        guidance_scale=guidance_scale,
    )
    # Check the observation first, so that an error appears before torch is imported and gigabytes are read.
    Processor(manifest, **cameras.allowed).check(observation)
    with progress.task(f"loading {bundle}"):
        policy = Policy(opened, **runs.keywords(), **options)
    with progress.task("the first inference"):
        chunk = policy.infer(observation)
    record = chunk_to_dict(chunk) | {"policy": policy.describe()}
    print_chunk(chunk, policy)
    if not prompt and spec.default_prompt:
        terminal.console(markup=False).print(f"prompt {spec.default_prompt!r}, the bundle's default")
    terminal.emit(record)
    return 0


def chunk_to_dict(chunk: ActionChunk) -> dict[str, object]:
    return {
        "actions": chunk.actions.tolist(),
        **({"text": chunk.text} if chunk.timing.text_ms else {}),
        "seed": chunk.seed,
        "timing": asdict(chunk.timing),
        "warnings": list(chunk.warnings),
    }


def print_chunk(chunk: ActionChunk, policy: Policy) -> None:
    """Print a table of the chunk's first :data:`ROWS` actions, and the times of the stages."""
    spec = policy.spec
    names = spec.action.labels or tuple(map(str, range(spec.action.dim)))
    table = terminal.table(
        f"action chunk of {spec.name}: {len(chunk.actions)} actions, seed {chunk.seed}", ">step"
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    shown = chunk.actions[:ROWS]
    for step, action in enumerate(shown):
        table.add_row(str(step), *(f"{value:.4f}" for value in action))
    if len(shown) < len(chunk.actions):
        table.caption = f"the first {len(shown)} of {len(chunk.actions)}; --json has all"
    console = terminal.console()
    # A robot with many joints needs more columns than a terminal has. Let the lines wrap instead of cutting off digits.
    if len(chunk.actions):
        console.print(table, width=max(console.width, 12 * len(names)), soft_wrap=True)
    timing = chunk.timing
    words = f" text {timing.text_ms:.1f}," if timing.text_ms else ""
    if words:
        console.print(f"text: {json.dumps(chunk.text, ensure_ascii=False)}", soft_wrap=True, markup=False)
    for warning in chunk.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}")
    console.print(running(policy), markup=False)
    console.print(
        f"total {timing.total_ms:.1f} ms: preprocess {timing.preprocess_ms:.1f}, vision {timing.vision_ms:.1f},"
        f" prefix {timing.prefix_ms:.1f},{words} head {timing.head_ms:.1f} in {len(timing.step_ms)} steps,"
        f" postprocess {timing.postprocess_ms:.1f} (first inference of this process)"
    )


def running(policy: Policy | Replay) -> str:
    """Return a line with a policy's engine, precision and device, and the reason for each choice."""
    about = policy.describe()
    assigned = f", {about['assigned']}" if about.get("assigned") else ""
    return (
        f"engine {about['engine']} ({short_reason(about['engine_reason'])}),"
        f" {about['dtype']} ({about['dtype_reason']}), device {about['device']} ({about['device_reason']}){assigned}"
    )
