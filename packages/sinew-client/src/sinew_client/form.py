"""Compare the descriptions of two policies, in the parts that a robot relies on."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from sinew_client.errors import ClientError, UnsafeChunk
from sinew_client.types import PolicySpec, VectorSpec

if TYPE_CHECKING:
    from sinew_client.policy import Policy

# TAKEN: the parts of a policy's description that a running loop uses. COMMANDS: the parts that determine the meaning of
# the policy's commands.
TAKEN = ("cameras", "state", "action", "control_hz", "embodiment", "motion")
COMMANDS = ("action", "control_hz", "embodiment", "motion")


def form(spec: PolicySpec, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Extract the parts of a policy's description that a robot relies on.

    Args:
        spec: The specification of the policy.
        parts: Names of the parts, or their first word before the dot, such as "state" for "state.dim"; () for all.

    Returns:
        The stated values by name, such as {"cameras": ("front",), "state.dim": 7}.
    """
    values: dict[str, Any] = {
        "cameras": tuple(each.name for each in spec.cameras),
        "state.dim": spec.state.dim,
        "action.dim": spec.action.dim,
        "chunk_size": spec.chunk_size,
        "noise": spec.noise_shape,
        **_vector("state", spec.state),
        **_vector("action", spec.action),
        "control_hz": spec.control_hz,
        "embodiment": spec.embodiment,
        "motion": None if spec.motion is None else tuple(asdict(spec.motion).items()),
    }
    for keys in spec.keys:
        values[f"keys.{keys.wire}"] = (tuple(sorted(keys.images.items())), keys.state, keys.prompt)
    selected = {name: value for name, value in values.items() if not parts or name.partition(".")[0] in parts}
    return {name: value for name, value in selected.items() if value not in (None, "", ())}


def _vector(name: str, spec: VectorSpec) -> dict[str, Any]:
    return {f"{name}.names": tuple(spec.names), f"{name}.units": tuple(spec.units)}


def differing(before: Mapping[str, Any], after: Mapping[str, Any], who: str = "") -> dict[str, str]:
    """Describe the differences between two results of :func:`form`.

    Args:
        before: The expected values.
        after: The received values.
        who: Owner of the expected values, for the text, such as " of the bundle".

    Returns:
        A text for each name whose values differ.
    """
    return {
        key: f"{key}: expected {_text(before[key])}{who}, got {_text(after[key])}"
        for key in before
        if key in after and not _same(before[key], after[key])
    }


class Fitted:
    """Checks that a server still has the policy for which a robot's run was prepared.

    Args:
        policy: The policy's description (``metadata()["policy"]``). None takes the description of the first policy
            that is checked.
        parts: Names of the parts that must be equal (:func:`form`).
    """

    def __init__(self, policy: Mapping[str, Any] | None, parts: Sequence[str] = TAKEN):
        self._parts = parts
        self._form = None if policy is None else form(PolicySpec.from_dict(policy), parts)

    def check(self, server: Policy) -> None:
        """Check that the policy of a server has the same cameras, joints, units, control rate and motion.

        The description is requested once per connection, and after each hot-swap of the policy.

        Args:
            server: The open policy, such as a client of the server.

        Raises:
            UnsafeChunk: The server has another policy. The message names the differences.
        """
        try:
            described = form(server.spec, self._parts)
        except ClientError as error:
            if self._form is None and type(error) is ClientError:
                # The server sends no description (for example vla.cpp), so there is nothing to compare.
                return
            raise
        where = getattr(server, "address", "the server")
        if getattr(server, "exchanged", False):
            raise UnsafeChunk(
                f"{where} has replaced the policy that computed this answer; send the request again"
            )
        if self._form is None:
            self._form = described
        if others := differing(self._form, described):
            raise UnsafeChunk(
                f"{where} has another policy than at the start of this run: {'; '.join(others.values())}; start the run"
                " again with the new policy"
            )


def _same(a: Any, b: Any) -> bool:
    """Return True if two values are equal. An empty text means "not stated" and equals every text."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or (isinstance(a, str) and isinstance(b, str) and not (a and b))


def _text(value: Any) -> str:
    """Format a value for an error message, at most 200 characters."""
    if isinstance(value, tuple) and all(isinstance(each, tuple) and len(each) == 2 for each in value):
        value = dict(value)
    if isinstance(value, tuple):
        text = ", ".join(map(str, value))
    else:
        text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 200 else text[:200] + " ..."
