"""Starts, monitors, updates and ends the replicas of policies (copies in other processes) on a Ray cluster. This
module needs ray[serve].

Ray Serve itself starts the replicas, replaces dead ones, distributes the requests, and changes the number of
replicas.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from sinew.core import BusyError, RequestError, SinewError
from sinew.core.extras import MissingPackageError
from sinew.policy import open_bundle
from sinew.serve.fleet.config import FleetConfig, PolicyConfig, Replicas, parse
from sinew.serve.fleet.remote import RemotePolicy
from sinew.serve.fleet.replica import About, Replica
from sinew.serve.policies import DEFAULT, Deployment, check_name
from sinew.serve.scheduler import Scheduler
from sinew.serve.service import Service
from sinew.serve.supervise import Supervisor
from sinew.serve.swap import Forms

logger = logging.getLogger(__name__)

DEPLOYMENT = "policy"
WATCH_S = 1.0  # seconds between two checks of the replicas
ABOUT_S = 120.0  # seconds within which the replicas of a new policy must describe the policy
# Size in bytes of the object store of a cluster that this module starts. Observations pass through this store.
OBJECT_STORE = 256 << 20
SCALING = "sinew.serve.fleet.scaling:by_queue_age"


def libraries(alone: bool = False) -> tuple[Any, Any]:
    """Import the modules ray and ray.serve.

    Args:
        alone: True for a cluster on this machine alone.

    Raises:
        MissingPackageError: Ray is not installed.
    """
    # Do not let Ray send usage statistics.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray reads these settings when it is imported. The first setting binds its ports to loopback, also on
    # Linux. The second setting requires a token.
    if alone:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise MissingPackageError("sinew fleet", "ray", f" ({error})") from None
    return ray, serve


def application(config: PolicyConfig) -> Any:
    """Return Ray Serve's application (its unit of deployment) for one policy."""
    _ray, serve = libraries()
    actor: dict[str, Any] = {"num_cpus": config.cpus, "num_gpus": config.gpus}
    if config.memory_gib is not None:
        actor["memory"] = int(config.memory_gib * 2**30)
    options: dict[str, Any] = {
        "name": DEPLOYMENT,
        "max_ongoing_requests": config.ongoing,
        "ray_actor_options": actor,
        "graceful_shutdown_timeout_s": config.drain_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": 5.0,
        "logging_config": {"enable_access_log": False},
    }
    if isinstance(config.replicas, Replicas):
        options["autoscaling_config"] = scaling(config.replicas)
    else:
        options["num_replicas"] = config.replicas
    return serve.deployment(Replica).options(**options).bind(msgspec.to_builtins(config))


def scaling(bounds: Replicas) -> dict[str, Any]:
    """Convert the allowed numbers of replicas to Ray Serve's setting ``autoscaling_config``."""
    return {
        "min_replicas": bounds.min,
        "max_replicas": bounds.max,
        "upscale_delay_s": bounds.up_s,
        "downscale_delay_s": bounds.down_s,
        "metrics_interval_s": min(1.0, bounds.up_s),
        "look_back_period_s": max(2.0, bounds.up_s),
        "policy": {"policy_function": SCALING},
    }


def build(args: dict[str, Any]) -> Any:
    """Return the application of a RayService (docker/kuberay.yaml).

    Args:
        args: The fields of a :class:`PolicyConfig`, and the ``name`` of the policy.
    """
    fields = dict(args)
    name = str(fields.pop("name", "default"))
    return application(parse({"policies": {DEFAULT: fields}}, name).policies[DEFAULT])


def app_name(policy: str) -> str:
    """Return the name under which a policy's application runs in the cluster."""
    return f"sinew-{policy}"


class Fleet:
    """The policies of a fleet's configuration. Their replicas run on a Ray cluster.

    Args:
        config: The configuration.
        supervisor: Collects the problems of the server.
        attach: True if the policies already run on the cluster, and continue to run when this process ends.
        queue: Largest number of waiting requests of each policy.
    """

    def __init__(self, config: FleetConfig, supervisor: Supervisor, attach: bool = False, queue: int = 64):
        self.config, self._attach, self._queue = config, attach, queue
        self._supervisor = supervisor
        self._ray, self._serve = libraries(alone=config.address is None)
        self._configs = dict(config.policies)
        self._remotes: dict[str, RemotePolicy] = {}
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self._forms = Forms()
        self._service: Service | None = None

    def start(self) -> dict[str, Deployment]:
        """Connect to the cluster or start one, and start the policies. Return the policies when each policy has a
        replica that answers.
        """
        address = self.config.address
        if address is None:
            if self._attach:
                raise SinewError(
                    "--attach: the configuration has no `address`; add the address of the running cluster"
                )
            self._ray.init(
                include_dashboard=False,
                object_store_memory=OBJECT_STORE,
                log_to_driver=True,
                logging_level="WARNING",
            )
        else:
            try:
                self._ray.init(address=address, log_to_driver=False, logging_level="WARNING")
            except ConnectionError:
                raise SinewError(
                    f"address: no Ray cluster answers at {address!r}; start the cluster, or remove `address` to start "
                    "one on this machine"
                ) from None
        if not self._attach:
            self._serve.start(proxy_location="Disabled")
            for name, config in self._configs.items():
                self._deploy(name, config)
        names = (DEFAULT, *(name for name in self._configs if name != DEFAULT))
        deployments = {name: self._deployment(name) for name in names}
        self._supervisor.thread("sinew-fleet", self._watch)
        return deployments

    @property
    def first(self) -> RemotePolicy:
        """Return the policy that answers requests without a policy name. The fleet must have been started."""
        return self._remotes[DEFAULT]

    def stop(self) -> None:
        """End the replicas, and the cluster if this fleet started it. A second call has no effect."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._ray.is_initialized():
            if not self._attach:
                with contextlib.suppress(Exception):  # the cluster may have ended
                    for name in self._configs:
                        self._serve.delete(app_name(name))
            if self.config.address is None:
                with contextlib.suppress(Exception):
                    self._serve.shutdown()
            self._ray.shutdown()

    def _deploy(self, name: str, config: PolicyConfig) -> None:
        """Start the replicas of a policy, or replace them one after another. Return when all replicas run."""
        try:
            self._serve.run(application(config), name=app_name(name), route_prefix=None)
        except RuntimeError as error:  # a replica did not start; its log has the reason
            raise SinewError(
                f"policies.{name}: no replica started with {config.source}; read the reason in the replicas' log "
                f"({error})"
            ) from error

    def _deployment(self, name: str) -> Deployment:
        handle = self._serve.get_app_handle(app_name(name))
        about: About = handle.about.remote().result(timeout_s=ABOUT_S)
        lost = (
            self._ray.exceptions.RayActorError,  # the replica died, or cannot be reached
            self._ray.exceptions.WorkerCrashedError,
            self._ray.exceptions.ObjectLostError,
        )
        config = self._configs[name]
        policy = RemotePolicy(about, handle.infer.remote, lost, name)
        scheduler = Scheduler(
            policy,
            queue_size=self._queue,
            supervisor=self._supervisor,
            workers=config.most * config.ongoing,
        )
        scheduler.start()
        self._remotes[name] = policy
        self._supervisor.watch(policy.problem)
        return Deployment(
            scheduler,
            about.spec,
            self._metadata(name, about),
            None,
            about.padded_state_dim,
            about.padded_action_dim,
            state=policy.state,
        )

    def _metadata(self, name: str, about: About) -> dict[str, Any]:
        """Return the metadata of a policy: the metadata of a replica, with the configured number of replicas."""
        config = self._configs[name]
        fleet = {"source": config.source, "replicas": msgspec.to_builtins(config.replicas)}
        return about.metadata | {"server": about.metadata["server"] | {"fleet": fleet}}

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            try:
                applications = self._serve.status().applications
            except Exception as error:  # noqa: BLE001 - a cluster that has ended raises many types
                logger.warning("the cluster does not answer: %s", str(error)[:200])
                continue
            for name, policy in list(self._remotes.items()):
                status = applications.get(app_name(name))
                deployment = None if status is None else status.deployments.get(DEPLOYMENT)
                states = {} if deployment is None else deployment.replica_states
                policy.replicas = sum(int(count) for state, count in states.items() if str(state) in _ALIVE)

    def bind(self, service: Service) -> None:
        """Set the service whose policies :meth:`load` and :meth:`unload` change."""
        self._service = service
        service.swapper = self

    def load(self, name: str, source: str, accept: Sequence[str] = ()) -> dict[str, Any]:
        """Replace the replicas of a policy one after another by replicas of ``source``, or start the replicas of a
        new policy.

        Until the end of the replacement, old and new replicas answer requests.

        Args:
            name: Name of the policy.
            source: Source of the new replicas.
            accept: Parts of the form (cameras, sizes, units ...) that may differ from the present policy's form.

        Raises:
            BusyError: Another change is in progress.
            RequestError: The policy has another form than the present policy, or does not start. The old replicas are
                then started again.
        """
        service = self._bound()
        check_name(name)
        before = self._configs.get(name)
        config = msgspec.structs.replace(before or self._configs[DEFAULT], source=source)
        with self._only():
            begun = time.perf_counter()
            changed: tuple[str, ...] = ()
            if before is not None:
                changed = self._forms.check(
                    name, service.policies.get(name).spec, open_bundle(source).manifest.spec, accept
                )
            self._configs[name] = config
            try:
                self._deploy(name, config)
                if before is None:
                    service.policies.put(name, self._deployment(name))
                else:
                    self._renew(service, name, changed)
            except Exception as error:
                if before is None:
                    del self._configs[name]
                    self._serve.delete(app_name(name))
                else:
                    self._configs[name] = before
                    self._deploy(name, before)
                raise RequestError(f"source: {source} could not be started: {str(error)[:300]}") from error
            self._forms.put(name, service.policies.get(name).spec)
        took: dict[str, Any] = {"name": name, "policy": service.policies.get(name).spec.name}
        took |= {"changed": changed} if changed else {}
        return took | {"load_s": round(time.perf_counter() - begun, 3)}

    def unload(self, name: str) -> dict[str, Any]:
        """Remove a policy, and end its replicas when they have answered the last request.

        Raises the errors of :meth:`sinew.serve.swap.Swapper.unload`.
        """
        service = self._bound()
        with self._only():
            begun = time.perf_counter()
            scheduler = service.policies.take(name)
            scheduler.drain()
            service.policies.retired(scheduler)
            del self._configs[name], self._remotes[name]
            self._forms.forget(name)
            self._serve.delete(app_name(name))
        return {"name": name, "drain_s": round(time.perf_counter() - begun, 3)}

    def _renew(self, service: Service, name: str, changed: tuple[str, ...]) -> None:
        """Replace the description of a policy after its replicas were replaced. Requests use the same scheduler as
        before.

        Args:
            service: The service of this process, which answers the clients.
            name: Name of the policy.
            changed: Differences from the replaced policy, one sentence each.
        """
        old = service.policies.get(name)
        handle = self._serve.get_app_handle(app_name(name))
        about: About = handle.about.remote().result(timeout_s=ABOUT_S)
        service.policies.put(
            name,
            replace(
                old,
                spec=about.spec,
                metadata=self._metadata(name, about),
                padded_state_dim=about.padded_state_dim,
                padded_action_dim=about.padded_action_dim,
                changed=changed,
            ),
        )

    def _bound(self) -> Service:
        if self._attach:
            raise RequestError(
                "this gateway is attached to replicas of another process; change the policies in that process"
            )
        assert self._service is not None
        return self._service

    @contextlib.contextmanager
    def _only(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise BusyError("another change of the policies is in progress; try again later")
        try:
            yield
        finally:
            self._changing.release()


_ALIVE = {"RUNNING", "ReplicaState.RUNNING"}
