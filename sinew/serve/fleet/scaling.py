"""The number of replicas of a policy: enough to keep the wait for an inference below the configured one.

Ray Serve calls :func:`by_queue_age` in its controller ten times a second, and applies bounds and delays to the result
(its "custom autoscaling policies"). The measurements come from ``Replica.record_autoscaling_stats``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

INFERENCE, TARGET = "inference_ms", "target_ms"  # names of the measurements that replicas report


def by_queue_age(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the wanted number of replicas, and an empty state. ``context`` is Ray Serve's ``AutoscalingContext``."""
    metrics = context.aggregated_metrics or {}
    count = replicas_wanted(
        float(context.total_num_requests or 0.0),
        list((metrics.get(INFERENCE) or {}).values()),
        list((metrics.get(TARGET) or {}).values()),
    )
    return (context.target_num_replicas if count is None else count), {}


def replicas_wanted(
    ongoing: float, inference_ms: Iterable[float], target_ms: Iterable[float]
) -> float | None:
    """Return the number of replicas with which a request waits ``target_ms`` on average; None if nothing was measured
    yet.

    If each of R replicas ends a request every s milliseconds, ``ongoing`` requests wait (ongoing / R - 1) s. This wait
    equals the target for R = ongoing / (1 + target / s). ``inference_ms`` has s of each replica; ``target_ms`` has the
    target of each replica, which is the same for all.
    """
    times = [each for each in inference_ms if each > 0]
    targets = [each for each in target_ms if each > 0]
    if not times or not targets:
        return None
    seconds = sum(times) / len(times)
    return ongoing / (1 + max(targets) / seconds)
