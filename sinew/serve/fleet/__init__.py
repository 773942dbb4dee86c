"""Policies on replicas of a Ray cluster behind the wires of this process (docs/ray.md)."""
