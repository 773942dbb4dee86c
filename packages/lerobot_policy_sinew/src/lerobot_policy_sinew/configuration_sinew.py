"""The flags ``--policy.*`` of the type ``sinew``."""

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig


@PreTrainedConfig.register_subclass("sinew")
@dataclass
class SinewConfig(PreTrainedConfig):
    """The source of actions: ``address`` of a server, or ``bundle`` in this process.

    cameras: LeRobot's camera -> the policy's, for those whose names differ. n_action_steps: rows of a chunk that are
    executed before the next one is asked for; 0: as many as the policy's checkpoint names, and a quarter of the chunk
    where it names none. handover, replan: chunks are asked for and played by Sinew's own loop instead, while LeRobot's
    goes on (:mod:`lerobot_policy_sinew.ahead`); motion: "absolute" where the policy does not say what its actions are
    measured from, and they are goal positions. seed: of the first chunk's noise, counted on from there; negative: the
    policy draws it. timeout: seconds to wait for an answer. engine, compute: of a bundle, as ``sinew.load`` has them.
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
                    f"policy.{name}: expected none without policy.handover, got {getattr(self, name)!r}"
                )
        if self.handover and self.n_action_steps:
            raise ValueError(
                f"policy.n_action_steps: expected 0 beside policy.handover, got {self.n_action_steps}; policy.replan"
                " says when to ask"
            )
        if self.motion not in ("", "absolute"):
            raise ValueError(
                f"policy.motion: expected absolute or nothing, got {self.motion!r}; what else there is, the policy says"
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
        raise NotImplementedError("a policy of type sinew is served, not trained")

    def get_scheduler_preset(self):
        return None

    def validate_features(self):
        """Leave it to the policy, which knows its cameras and joints and names what does not fit."""
