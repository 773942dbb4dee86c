"""Sinew: a real-time inference runtime for vision-language-action robot policies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinew import machine

if TYPE_CHECKING:
    from sinew_client.policy import connect

    from sinew.eval.learning.exploration import Exploration
    from sinew.eval.learning.rollouts import RolloutPolicy, RolloutSample
    from sinew.eval.report.evaluation import Evaluation, evaluate
    from sinew.eval.runner import Episode
    from sinew.policy import Policy, load

machine.limit_spinning()  # here, because torch's OpenMP runtime reads the environment when it is loaded

__version__ = "0.1.0"
__all__ = [
    "Episode",
    "Evaluation",
    "Exploration",
    "Policy",
    "RolloutPolicy",
    "RolloutSample",
    "__version__",
    "connect",
    "evaluate",
    "load",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # `import sinew` must stay cheap: command-line help, clients and controllers do not need torch.
    if name in ("Policy", "load"):
        from sinew import policy

        return getattr(policy, name)
    if name in ("Episode", "Evaluation", "evaluate"):
        from sinew.extras import MissingPackageError

        try:
            from sinew.eval.report import evaluation
        except ModuleNotFoundError as error:
            raise MissingPackageError("sinew.evaluate", error.name or "gymnasium") from None
        return getattr(evaluation, name)
    if name == "Exploration":
        from sinew.eval.learning.exploration import Exploration

        return Exploration
    if name in ("RolloutPolicy", "RolloutSample"):
        from sinew.eval.learning import rollouts

        return getattr(rollouts, name)
    if name == "connect":
        from sinew_client.policy import connect

        return connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
