"""LeRobot's processor pipelines for the policy. They add a batch dimension and do not change values."""

from lerobot.processor import (
    AddBatchDimensionProcessorStep,
    DeviceProcessorStep,
    PolicyProcessorPipeline,
    RenameObservationsProcessorStep,
)
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action
from lerobot.utils.constants import POLICY_POSTPROCESSOR_DEFAULT_NAME, POLICY_PREPROCESSOR_DEFAULT_NAME


def make_sinew_pre_post_processors(config, dataset_stats=None):  # noqa: ARG001 - LeRobot passes it
    """Create LeRobot's pipelines before and after a policy of the type ``sinew``.

    The pipelines do not normalise, because the policy's inputs and outputs are in robot units.

    Args:
        config: The configuration of the policy.
        dataset_stats: Not used.

    Returns:
        The preprocessor and the postprocessor.
    """
    before = [
        RenameObservationsProcessorStep(rename_map={}),
        AddBatchDimensionProcessorStep(),
        DeviceProcessorStep(device=config.device),
    ]
    return (
        PolicyProcessorPipeline(steps=before, name=POLICY_PREPROCESSOR_DEFAULT_NAME),
        PolicyProcessorPipeline(
            steps=[DeviceProcessorStep(device="cpu")],
            name=POLICY_POSTPROCESSOR_DEFAULT_NAME,
            to_transition=policy_action_to_transition,
            to_output=transition_to_policy_action,
        ),
    )
