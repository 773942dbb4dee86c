"""Policies whose replicas run on a Ray cluster, while this process answers the clients (docs/ray.md)."""
