"""The number of replicas of a policy, so that the waiting time of requests stays below the configured time.

Ray Serve calls :func:`by_queue_age` in its controller ten times a second, and applies bounds and delays to the
result (its "custom autoscaling policies"). The measurements come from ``Replica.record_autoscaling_stats``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

INFERENCE, TARGET = "inference_ms", "target_ms"  # names of the measurements that replicas report


def by_queue_age(context: Any) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas that the policy needs, and an empty state. ``context`` is Ray Serve's
    ``AutoscalingContext``.
    """
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
    """Return the number of replicas with which a request waits ``target_ms`` on average; None without measurements.

    If each of R replicas ends a request every s milliseconds, ``ongoing`` requests wait (ongoing / R - 1) s on
    average. This time equals the target for R = ongoing / (1 + target / s).

    Args:
        ongoing: Number of requests in progress.
        inference_ms: Duration s of an inference on each replica, milliseconds.
        target_ms: Target of each replica, milliseconds. All replicas have the same target.
    """
    times = [each for each in inference_ms if each > 0]
    targets = [each for each in target_ms if each > 0]
    if not times or not targets:
        return None
    seconds = sum(times) / len(times)
    return ongoing / (1 + max(targets) / seconds)
