"""The Protobuf messages of LeRobot's ``transport/services.proto``. Their classes are made at the first use.

Generated code would tie the server to a range of protobuf releases. The classes are in their own descriptor pool,
because LeRobot registers the same names in the default pool, and both must work in one process.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sinew.core import RequestError

SERVICE = "transport.AsyncInference"
BEGIN, MIDDLE, END = 1, 2, 3
_PROTO = f"""
message Observation {{
  enum TransferState {{
    TRANSFER_UNKNOWN = 0;
    TRANSFER_BEGIN = {BEGIN};
    TRANSFER_MIDDLE = {MIDDLE};
    TRANSFER_END = {END};
  }}
  TransferState transfer_state = 1;
  bytes data = 2;
}}
message Actions {{
  bytes data = 1;
}}
message PolicySetup {{
  bytes data = 1;
}}
message Empty {{
}}
"""


@cache
def messages() -> dict[str, Any]:
    """Return a mapping from the name of each Protobuf message to its class."""
    from sinew_client import schema

    return schema.classes(schema.file_descriptor(schema.read_messages(_PROTO), "transport"))


def parse(name: str, data: bytes) -> Any:
    """Parse ``data`` as a Protobuf message of the type ``name``.

    Raises:
        RequestError: The bytes are not such a message.
    """
    from google.protobuf.message import DecodeError

    try:
        return messages()[name].FromString(data)
    except DecodeError as error:
        raise RequestError(
            f"request: expected a message transport.{name}, got {len(data)} other bytes"
        ) from error


def actions_message(data: bytes) -> bytes:
    """Return the Protobuf reply to GetActions, the client's call for actions."""
    message: bytes = messages()["Actions"](data=data).SerializeToString()
    return message
