"""The configuration of the policy type ``sinew``: its options ``--policy.*`` on LeRobot's command line."""

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig


@PreTrainedConfig.register_subclass("sinew")
@dataclass
class SinewConfig(PreTrainedConfig):
    """The configuration of a Sinew policy in LeRobot. Set either ``address`` or ``bundle``.

    Attributes:
        address: Address of a Sinew server, such as "tcp://host:5555".
        bundle: A bundle, checkpoint or hub name that runs in LeRobot's process (needs ``sinew-vla``).
        engine: Engine of the bundle, as in ``sinew.load``.
        compute: Device of the bundle, as ``device`` in ``sinew.load``.
        cameras: For each camera of LeRobot, the camera of the policy, if their names differ.
        n_action_steps: Number of actions of a chunk that are executed before the next request. 0 takes the number of
            the policy's checkpoint, or a quarter of the chunk if the checkpoint states none.
        handover: The method of chunk merging, such as "auto". If it is set, Sinew's own loop requests chunks in advance
            (:mod:`lerobot_policy_sinew.ahead`).
        replan: The rule for the next request; only with ``handover``.
        motion: "absolute" if actions are goal positions and the policy does not state this itself; only with
            ``handover``.
        seed: Seed of the first chunk's noise, which grows by one per chunk. A negative number lets the policy choose.
        timeout: Seconds to wait for an answer. With ``handover``: seconds that the robot may hold.

    Raises:
        ValueError: Options contradict each other, or a value is not allowed.
    """

    address: str = ""
    bundle: str = ""
    engine: str = "auto"
    compute: str = "auto"
    cameras: dict[str, str] = field(default_factory=dict)
    n_action_steps: int = 0
    handover: str = ""
    replan: str = ""
    motion: str = ""
    seed: int = -1
    timeout: float = 10.0
    device: str = "cpu"  # device of LeRobot's own tensors; the Sinew policy computes on its own device
    push_to_hub: bool = False
    # This must stay False, because the plugin has no torch model that could be compiled.
    compile_model: bool = False

    def __post_init__(self):
        super().__post_init__()
        if bool(self.address) == bool(self.bundle):
            raise ValueError(
                "policy: expected --policy.address=tcp://HOST:PORT of a Sinew server, or --policy.bundle=FILE, got "
                + ("both" if self.address else "neither")
            )
        if self.n_action_steps < 0:
            raise ValueError(f"policy.n_action_steps: expected 0 or more, got {self.n_action_steps}")
        for name in ("replan", "motion"):
            if getattr(self, name) and not self.handover:
                raise ValueError(
                    f"policy.{name}: needs policy.handover, got {getattr(self, name)!r}; add --policy.handover=auto"
                )
        if self.handover and self.n_action_steps:
            raise ValueError(
                f"policy.n_action_steps: cannot be combined with policy.handover, got {self.n_action_steps}; use"
                " --policy.replan instead"
            )
        if self.motion not in ("", "absolute"):
            raise ValueError(
                f"policy.motion: expected absolute or nothing, got {self.motion!r}; the policy itself must state any"
                " other motion"
            )

    @property
    def observation_delta_indices(self):
        return None

    @property
    def action_delta_indices(self):
        return None

    @property
    def reward_delta_indices(self):
        return None

    def get_optimizer_preset(self):
        raise NotImplementedError("a policy of type sinew cannot be trained; train the original checkpoint")

    def get_scheduler_preset(self):
        return None

    def validate_features(self):
        """Do nothing. The policy checks its cameras and joints itself, and its errors name what does not fit."""
