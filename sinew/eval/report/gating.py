"""The success gate that belongs to a bundle, played with the engine that will serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sinew.core import SinewError, progress
from sinew.core.extras import MissingPackageError
from sinew.engine.backend import EngineChoice
from sinew.eval.outside import TypedNames
from sinew.eval.report.gate import GATES, Gate, read_gate
from sinew.eval.settings import Latency, Variant
from sinew.policy import open_bundle
from sinew.processing import Processor


def gate_of(bundle: Path) -> tuple[Path | None, str]:
    """Return the embedded gate whose task this bundle can play, and what was found otherwise."""
    try:
        from sinew.eval.fitting import check_observation
    except ModuleNotFoundError as error:
        return None, str(MissingPackageError("the gates of embedded tasks", error.name or "mujoco"))
    processor = Processor(open_bundle(bundle).manifest)
    for path in sorted(GATES.glob("*.json")):
        task = read_gate(path).task()
        try:
            check_observation(task, [processor])
        except SinewError:
            continue
        return path, f"the policy takes the observations of {task.env}"
    return None, "the policy takes the observations of no embedded task; --gate names another"


def play_gate(
    gate: Gate,
    bundle: Path,
    choice: EngineChoice,
    episodes: int,
    ignore_recipe: bool = False,
    typed: TypedNames | None = None,
) -> dict[str, Any]:
    """Play the first ``episodes`` of a gate with the engine of ``choice``; return the verdict, ready for JSON.

    Raises:
        UntypedNameError: the gate uses names that are not built in, and that are not among the ``typed`` ones.
    """
    from sinew.eval import campaign

    protocol = gate.protocol
    count = min(episodes, gate.episodes)
    variant = Variant(
        str(bundle),
        protocol["replan"],
        Latency(protocol["latency"]),
        protocol["handover"],
        protocol["solver_steps"],
        choice.options.dtype,
        choice.options.device,
        choice.engine,
        ignore_recipe,
    )
    seeds = range(gate.first_seed, gate.first_seed + count)
    with progress.task(f"playing {count} episodes of {protocol['env']}", count) as advance:
        (played,) = campaign.run(gate.task(typed), [variant], seeds, on_episode=lambda *_: advance(""))
    passed, text = gate.judge(played)
    recorded = gate.outcomes
    return {
        "env": protocol["env"],
        "episodes": count,
        "wins": sum(episode.success for episode in played),
        "recorded_wins": sum(recorded[episode.seed] for episode in played),
        "passed": passed,
        "text": text,
    }
