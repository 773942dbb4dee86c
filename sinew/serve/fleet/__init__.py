"""Policies whose replicas (copies in other processes) run on a Ray cluster, while this process answers the clients
(docs/ray.md).
"""
