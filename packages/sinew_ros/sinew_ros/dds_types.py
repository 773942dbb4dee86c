# No `from __future__ import annotations`: cyclonedds evaluates the types of the fields.
"""The message types that the bridge uses, as DDS structures: what rmw_cyclonedds and rmw_fastrtps put on the wire.

Definitions: common_interfaces and rcl_interfaces of ROS 2 (the same from Humble to Kilted), lifecycle_msgs,
control_msgs, franka_msgs and interbotix_xs_msgs. tests/ros compares their bytes with those of the package rosbags.
"""

from dataclasses import dataclass, field
from types import new_class

from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import array, float32, float64, int32, int64, sequence, uint8, uint32, uint64


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


# Services: what rmw_cyclonedds sends, whose calls begin with the caller (guid) and the number of its call (seq).


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


def _half(name, member="structure_needs_at_least_one_member", kind=uint8, default=int):
    """Return a half of a service of lifecycle_msgs with one member: one without any has a byte in ROS."""

    def fill(body):
        body["__annotations__"] = {"guid": uint64, "seq": int64, member: kind}
        body.update({"guid": 0, "seq": 0, member: field(default_factory=default)})

    typename = f"lifecycle_msgs.srv.dds_.{name}_"
    return dataclass(new_class(name.replace("_", ""), (IdlStruct,), {"typename": typename}, fill))


# Actions: the service that takes their goals.


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


def _goals(action, kind):
    """Return what an action's goals are sent in, what answers them, and the goal."""
    package, name = action.split("/action/")

    @dataclass
    class Request(IdlStruct, typename=f"{package}.action.dds_.{name}_SendGoal_Request_"):
        guid: uint64 = 0
        seq: int64 = 0
        goal_id: Uuid = field(default_factory=Uuid)
        goal: kind = field(default_factory=kind)

    @dataclass
    class Response(IdlStruct, typename=f"{package}.action.dds_.{name}_SendGoal_Response_"):
        guid: uint64 = 0
        seq: int64 = 0
        accepted: bool = False
        stamp: Time = field(default_factory=Time)

    return Request, Response, kind


ACTIONS = {
    name: _goals(name, goal)
    for name, goal in (
        ("control_msgs/action/GripperCommand", GripperCommandGoal),
        ("franka_msgs/action/Move", MoveGoal),
    )
}
SERVICES = {
    "sinew_msgs/srv/GetActionChunk": (GetActionChunkRequest, GetActionChunkResponse),
    "lifecycle_msgs/srv/ChangeState": (
        _half("ChangeState_Request", "transition", Transition, Transition),
        _half("ChangeState_Response", "success", bool, bool),
    ),
    "lifecycle_msgs/srv/GetState": (
        _half("GetState_Request"),
        _half("GetState_Response", "current_state", State, State),
    ),
    "lifecycle_msgs/srv/GetAvailableStates": (
        _half("GetAvailableStates_Request"),
        _half("GetAvailableStates_Response", "available_states", sequence[State], list),
    ),
    "lifecycle_msgs/srv/GetAvailableTransitions": (
        _half("GetAvailableTransitions_Request"),
        _half(
            "GetAvailableTransitions_Response", "available_transitions", sequence[TransitionDescription], list
        ),
    ),
}

# ROS's name -> structure, and the structure of each field that is one (or a sequence of one).
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
    "lifecycle_msgs/msg/TransitionEvent": TransitionEvent,
}
INNER = {
    "stamp": Time,
    "time_from_start": Duration,
    "header": Header,
    "layout": MultiArrayLayout,
    "dim": MultiArrayDimension,
    "points": JointTrajectoryPoint,
    "status": DiagnosticStatus,
    "values": KeyValue,
    "images": CompressedImage,
    "trajectory": JointTrajectory,
    "command": GripperCommand,
    "transition": Transition,
    "start_state": State,
    "goal_state": State,
    "current_state": State,
    "available_states": State,
    "available_transitions": TransitionDescription,
}


def build(kind, fields):
    """Return a structure of the class ``kind`` with a mapping's fields; raises TypeError for an unknown one."""
    made = {}
    for name, value in fields.items():
        inner = INNER.get(name)
        if inner is not None and isinstance(value, list):
            value = [build(inner, each) for each in value]
        elif inner is not None:
            value = build(inner, value)
        made[name] = value
    return kind(**made)
