# This file does not use `from __future__ import annotations`, because cyclonedds evaluates the types of the fields.
"""The message types that the bridge uses, as DDS structures of rmw_cyclonedds and rmw_fastrtps.

Definitions: common_interfaces and rcl_interfaces of ROS 2 (the same from Humble to Kilted), lifecycle_msgs, bond,
control_msgs, franka_msgs and interbotix_xs_msgs. tests/ros compares the bytes of each message with the bytes that
rosbags writes.
"""

from dataclasses import dataclass, field
from types import new_class

from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float32, float64, int8, int32, int64, sequence, uint8, uint32, uint64


@dataclass
class Time(IdlStruct, typename="builtin_interfaces.msg.dds_.Time_"):
    sec: int32 = 0
    nanosec: uint32 = 0


@dataclass
class Duration(IdlStruct, typename="builtin_interfaces.msg.dds_.Duration_"):
    sec: int32 = 0
    nanosec: uint32 = 0


@dataclass
class Header(IdlStruct, typename="std_msgs.msg.dds_.Header_"):
    stamp: Time = field(default_factory=Time)
    frame_id: str = ""


@dataclass
class String(IdlStruct, typename="std_msgs.msg.dds_.String_"):
    data: str = ""


@dataclass
class Bool(IdlStruct, typename="std_msgs.msg.dds_.Bool_"):
    data: bool = False


@dataclass
class MultiArrayDimension(IdlStruct, typename="std_msgs.msg.dds_.MultiArrayDimension_"):
    label: str = ""
    size: uint32 = 0
    stride: uint32 = 0


@dataclass
class MultiArrayLayout(IdlStruct, typename="std_msgs.msg.dds_.MultiArrayLayout_"):
    dim: sequence[MultiArrayDimension] = field(default_factory=list)
    data_offset: uint32 = 0


@dataclass
class Float64MultiArray(IdlStruct, typename="std_msgs.msg.dds_.Float64MultiArray_"):
    layout: MultiArrayLayout = field(default_factory=MultiArrayLayout)
    data: sequence[float64] = field(default_factory=list)


@dataclass
class Image(IdlStruct, typename="sensor_msgs.msg.dds_.Image_"):
    header: Header = field(default_factory=Header)
    height: uint32 = 0
    width: uint32 = 0
    encoding: str = ""
    is_bigendian: uint8 = 0
    step: uint32 = 0
    data: sequence[uint8] = b""


@dataclass
class CompressedImage(IdlStruct, typename="sensor_msgs.msg.dds_.CompressedImage_"):
    header: Header = field(default_factory=Header)
    format: str = ""
    data: sequence[uint8] = b""


@dataclass
class JointState(IdlStruct, typename="sensor_msgs.msg.dds_.JointState_"):
    header: Header = field(default_factory=Header)
    name: sequence[str] = field(default_factory=list)
    position: sequence[float64] = field(default_factory=list)
    velocity: sequence[float64] = field(default_factory=list)
    effort: sequence[float64] = field(default_factory=list)


@dataclass
class JointTrajectoryPoint(IdlStruct, typename="trajectory_msgs.msg.dds_.JointTrajectoryPoint_"):
    positions: sequence[float64] = field(default_factory=list)
    velocities: sequence[float64] = field(default_factory=list)
    accelerations: sequence[float64] = field(default_factory=list)
    effort: sequence[float64] = field(default_factory=list)
    time_from_start: Duration = field(default_factory=Duration)


@dataclass
class JointTrajectory(IdlStruct, typename="trajectory_msgs.msg.dds_.JointTrajectory_"):
    header: Header = field(default_factory=Header)
    joint_names: sequence[str] = field(default_factory=list)
    points: sequence[JointTrajectoryPoint] = field(default_factory=list)


@dataclass
class JointGroupCommand(IdlStruct, typename="interbotix_xs_msgs.msg.dds_.JointGroupCommand_"):
    name: str = ""
    cmd: sequence[float32] = field(default_factory=list)


@dataclass
class JointSingleCommand(IdlStruct, typename="interbotix_xs_msgs.msg.dds_.JointSingleCommand_"):
    name: str = ""
    cmd: float32 = 0.0


@dataclass
class KeyValue(IdlStruct, typename="diagnostic_msgs.msg.dds_.KeyValue_"):
    key: str = ""
    value: str = ""


@dataclass
class DiagnosticStatus(IdlStruct, typename="diagnostic_msgs.msg.dds_.DiagnosticStatus_"):
    level: uint8 = 0
    name: str = ""
    message: str = ""
    hardware_id: str = ""
    values: sequence[KeyValue] = field(default_factory=list)


@dataclass
class DiagnosticArray(IdlStruct, typename="diagnostic_msgs.msg.dds_.DiagnosticArray_"):
    header: Header = field(default_factory=Header)
    status: sequence[DiagnosticStatus] = field(default_factory=list)


# Services in the format of rmw_cyclonedds: each call begins with the caller's id (guid) and the
# call's number (seq).


@dataclass
class GetActionChunkRequest(IdlStruct, typename="sinew_msgs.srv.dds_.GetActionChunk_Request_"):
    guid: uint64 = 0
    seq: int64 = 0
    cameras: sequence[str] = field(default_factory=list)
    images: sequence[CompressedImage] = field(default_factory=list)
    state: sequence[float64] = field(default_factory=list)
    prompt: str = ""
    seed: int64 = -1


@dataclass
class GetActionChunkResponse(IdlStruct, typename="sinew_msgs.srv.dds_.GetActionChunk_Response_"):
    guid: uint64 = 0
    seq: int64 = 0
    error: str = ""
    trajectory: JointTrajectory = field(default_factory=JointTrajectory)
    server_ms: float64 = 0.0


@dataclass
class BondStatus(IdlStruct, typename="bond.msg.dds_.Status_"):
    header: Header = field(default_factory=Header)
    id: str = ""
    instance_id: str = ""
    active: bool = False
    heartbeat_timeout: float32 = 0.0
    heartbeat_period: float32 = 0.0


@dataclass
class State(IdlStruct, typename="lifecycle_msgs.msg.dds_.State_"):
    id: uint8 = 0
    label: str = ""


@dataclass
class Transition(IdlStruct, typename="lifecycle_msgs.msg.dds_.Transition_"):
    id: uint8 = 0
    label: str = ""


@dataclass
class TransitionDescription(IdlStruct, typename="lifecycle_msgs.msg.dds_.TransitionDescription_"):
    transition: Transition = field(default_factory=Transition)
    start_state: State = field(default_factory=State)
    goal_state: State = field(default_factory=State)


@dataclass
class TransitionEvent(IdlStruct, typename="lifecycle_msgs.msg.dds_.TransitionEvent_"):
    timestamp: uint64 = 0
    transition: Transition = field(default_factory=Transition)
    start_state: State = field(default_factory=State)
    goal_state: State = field(default_factory=State)


def _half(name, member="structure_needs_at_least_one_member", kind=uint8, default=int, **more):
    """Create the request or the response of a service as a DDS structure.

    Args:
        name: Name such as ``package/srv/Name_Request``.
        member: Name of the first member. ROS adds a byte to a structure without members.
        kind: Type of the first member.
        default: Creates the default value of the first member.
        **more: Further members, which are structures or sequences of structures.
    """

    def fill(body):
        body["__annotations__"] = {"guid": uint64, "seq": int64, member: kind, **more}
        body.update({"guid": 0, "seq": 0, member: field(default_factory=default)})
        for name, each in more.items():
            body[name] = field(default_factory=list if hasattr(each, "__metadata__") else each)

    package, sort, short = name.split("/")
    typename = f"{package}.{sort}.dds_.{short}_"
    return dataclass(new_class(short.replace("_", ""), (IdlStruct,), {"typename": typename}, fill))


# Actions: the types of the services and topics that transport goals.


@dataclass
class Uuid(IdlStruct, typename="unique_identifier_msgs.msg.dds_.UUID_"):
    uuid: array[uint8, 16] = field(default_factory=lambda: [0] * 16)


@dataclass
class GripperCommand(IdlStruct, typename="control_msgs.msg.dds_.GripperCommand_"):
    position: float64 = 0.0
    max_effort: float64 = 0.0


@dataclass
class GripperCommandGoal(IdlStruct, typename="control_msgs.action.dds_.GripperCommand_Goal_"):
    command: GripperCommand = field(default_factory=GripperCommand)


@dataclass
class MoveGoal(IdlStruct, typename="franka_msgs.action.dds_.Move_Goal_"):
    width: float64 = 0.0
    speed: float64 = 0.0


@dataclass
class GoalInfo(IdlStruct, typename="action_msgs.msg.dds_.GoalInfo_"):
    goal_id: Uuid = field(default_factory=Uuid)
    stamp: Time = field(default_factory=Time)


@dataclass
class GoalStatus(IdlStruct, typename="action_msgs.msg.dds_.GoalStatus_"):
    goal_info: GoalInfo = field(default_factory=GoalInfo)
    status: int8 = 0


@dataclass
class GoalStatusArray(IdlStruct, typename="action_msgs.msg.dds_.GoalStatusArray_"):
    status_list: sequence[GoalStatus] = field(default_factory=list)


@dataclass
class RunPolicyGoal(IdlStruct, typename="sinew_msgs.action.dds_.RunPolicy_Goal_"):
    prompt: str = ""
    time_limit: Duration = field(default_factory=Duration)
    hold_limit: Duration = field(default_factory=Duration)
    limit_succeeds: bool = False


@dataclass
class RunPolicyResult(IdlStruct, typename="sinew_msgs.action.dds_.RunPolicy_Result_"):
    outcome: uint8 = 0
    message: str = ""
    elapsed: Duration = field(default_factory=Duration)
    steps: uint32 = 0
    held: uint32 = 0
    chunks: uint32 = 0
    failed_requests: uint32 = 0


@dataclass
class RunPolicyFeedback(IdlStruct, typename="sinew_msgs.action.dds_.RunPolicy_Feedback_"):
    elapsed: Duration = field(default_factory=Duration)
    steps: uint32 = 0
    held: uint32 = 0
    message: str = ""
    age_ms: float64 = 0.0
    command: sequence[float64] = field(default_factory=list)


@dataclass
class RunPolicyFeedbackMessage(IdlStruct, typename="sinew_msgs.action.dds_.RunPolicy_FeedbackMessage_"):
    goal_id: Uuid = field(default_factory=Uuid)
    feedback: RunPolicyFeedback = field(default_factory=RunPolicyFeedback)


def _sends(action, goal):
    """Create the DDS structures for the service that receives the goals of an action: the request and the response."""
    return (
        _half(f"{action}_SendGoal_Request", "goal_id", Uuid, Uuid, goal=goal),
        _half(f"{action}_SendGoal_Response", "accepted", bool, bool, stamp=Time),
    )


RUN = "sinew_msgs/action/RunPolicy"
ACTIONS = {
    name: (*_sends(name, goal), goal)
    for name, goal in (
        ("control_msgs/action/GripperCommand", GripperCommandGoal),
        ("franka_msgs/action/Move", MoveGoal),
    )
}
SERVICES = {
    "sinew_msgs/srv/GetActionChunk": (GetActionChunkRequest, GetActionChunkResponse),
    f"{RUN}_SendGoal": _sends(RUN, RunPolicyGoal),
    f"{RUN}_GetResult": (
        _half(f"{RUN}_GetResult_Request", "goal_id", Uuid, Uuid),
        _half(f"{RUN}_GetResult_Response", "status", int8, int, result=RunPolicyResult),
    ),
    "action_msgs/srv/CancelGoal": (
        _half("action_msgs/srv/CancelGoal_Request", "goal_info", GoalInfo, GoalInfo),
        _half(
            "action_msgs/srv/CancelGoal_Response",
            "return_code",
            int8,
            int,
            goals_canceling=sequence[GoalInfo],
        ),
    ),
    "lifecycle_msgs/srv/ChangeState": (
        _half("lifecycle_msgs/srv/ChangeState_Request", "transition", Transition, Transition),
        _half("lifecycle_msgs/srv/ChangeState_Response", "success", bool, bool),
    ),
    "lifecycle_msgs/srv/GetState": (
        _half("lifecycle_msgs/srv/GetState_Request"),
        _half("lifecycle_msgs/srv/GetState_Response", "current_state", State, State),
    ),
    "lifecycle_msgs/srv/GetAvailableStates": (
        _half("lifecycle_msgs/srv/GetAvailableStates_Request"),
        _half("lifecycle_msgs/srv/GetAvailableStates_Response", "available_states", sequence[State], list),
    ),
    "lifecycle_msgs/srv/GetAvailableTransitions": (
        _half("lifecycle_msgs/srv/GetAvailableTransitions_Request"),
        _half(
            "lifecycle_msgs/srv/GetAvailableTransitions_Response",
            "available_transitions",
            sequence[TransitionDescription],
            list,
        ),
    ),
}

# Key: name of the message type in ROS. Value: DDS structure.
TYPES = {
    "std_msgs/msg/String": String,
    "std_msgs/msg/Bool": Bool,
    "std_msgs/msg/Float64MultiArray": Float64MultiArray,
    "sensor_msgs/msg/Image": Image,
    "sensor_msgs/msg/CompressedImage": CompressedImage,
    "sensor_msgs/msg/JointState": JointState,
    "trajectory_msgs/msg/JointTrajectory": JointTrajectory,
    "interbotix_xs_msgs/msg/JointGroupCommand": JointGroupCommand,
    "interbotix_xs_msgs/msg/JointSingleCommand": JointSingleCommand,
    "diagnostic_msgs/msg/DiagnosticArray": DiagnosticArray,
    "bond/msg/Status": BondStatus,
    "lifecycle_msgs/msg/TransitionEvent": TransitionEvent,
    "action_msgs/msg/GoalStatusArray": GoalStatusArray,
    f"{RUN}_FeedbackMessage": RunPolicyFeedbackMessage,
}


def build(kind, fields):
    """Create a DDS structure of the class ``kind`` from a mapping of its fields.

    Raises:
        TypeError: The mapping has a field that the structure does not have.
    """
    made = {}
    for name, value in fields.items():
        inner = kind.__annotations__.get(name)
        if isinstance(value, list):
            of = getattr(inner, "__metadata__", (None,))[0]  # sequence[...]
            inner = of.subtype if hasattr(of, "subtype") else None
            value = [build(inner, each) if isinstance(each, dict) else each for each in value]
        elif isinstance(value, dict):
            value = build(inner, value)
        made[name] = value
    return kind(**made)
