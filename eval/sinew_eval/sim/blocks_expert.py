"""A scripted expert for the blocks task. Its action depends only on the present state.

Because it has no memory, its action is correct after a shove, a random disturbance or a new instruction. Every such
situation is a demonstration of recovery.
"""

from __future__ import annotations

import numpy as np

from sinew_eval.sim import blocks_scene as scene
from sinew_eval.sim.blocks import STEP_SIZE, World

TRAVEL = 0.110  # height at which the hand moves over the table, in metres
GRASP = scene.BLOCK_HALF
RELEASE = 0.036  # height of a held block at which the fingers open above the floor of a bin, in metres
STACK = 2 * scene.BLOCK_HALF

_OPEN, _CLOSE = 1.0, -1.0
# A block between the fingers is held if the opening is smaller than this, even if the fingers hold its edges. Metres.
_GRASPED_OPENING = 0.049
# Grid of places on the table where the hand puts down a block that is not in the instruction.
_SPOTS = np.array([[x, y] for x in (-0.08, 0.0, 0.08) for y in (-0.11, -0.04, 0.04, 0.11)])


def act(world: World) -> np.ndarray:
    """Return the action of the scripted expert for a state of the simulation, float32 [4]."""
    target, goal = world.blocks[world.color], scene.BIN_CENTERS[world.side]
    between = _between_fingers(world)
    held_block = between if between is not None and world.opening < _GRASPED_OPENING else None
    lift = _stack_height(world, goal)

    if _in_bin(target, goal, lift):
        if held_block == world.color or (between is not None and world.opening < 0.055):
            return _action(np.zeros(3), _OPEN)
        return _rise(world, _OPEN)
    if held_block == world.color:
        return _carry(world, goal, RELEASE + lift)
    if held_block is not None:
        spot = _free_spot(world, held_block)
        if (
            np.abs(world.ee[:2] - spot).max() < 0.012
            and world.blocks[held_block, 2] < scene.BLOCK_HALF + 0.004
        ):
            return _action(np.zeros(3), _OPEN)
        return _carry(world, spot, GRASP)
    return _reach(world, target)


def _reach(world: World, target: np.ndarray) -> np.ndarray:
    """Return the next action to grasp the block at ``target``: first move above it, then down around it, then close the
    fingers.
    """
    offset = target[:2] - world.ee[:2]
    distance = float(np.abs(offset).max())
    low = world.ee[2] < target[2] + 0.055
    if distance > 0.012 and low and (distance > 0.03 or world.opening < 0.055):
        # The hand is too low to move sideways between blocks and walls.
        return _rise(world, _OPEN)
    if distance > 0.012:
        # Approach as in a funnel: the closer the hand is to the block, the lower it moves.
        height = np.clip(target[2] + 0.05 + 0.8 * distance, target[2] + 0.06, TRAVEL)
        return _action(np.array([*offset, height - world.ee[2]]), _OPEN)
    down = target[2] - world.ee[2]
    if down < -0.006:
        # The fingers are closed above the block, so open them first.
        if world.opening < 0.055:
            return _action(np.array([*offset, max(0.0, target[2] + 0.045 - world.ee[2])]), _OPEN)
        return _action(np.array([*offset, down]), _OPEN)
    return _action(np.array([*offset, down]), _CLOSE)


def _carry(world: World, goal: np.ndarray, height: float) -> np.ndarray:
    """Return the next action to carry a block in the closed fingers: first up, then across to ``goal``, then down to
    ``height`` in metres.
    """
    offset = goal - world.ee[:2]
    distance = float(np.abs(offset).max())
    if distance > 0.012:
        sideways = offset * np.clip((world.ee[2] - 0.065) / 0.03, 0.0, 1.0)
        return _action(np.array([*sideways, TRAVEL - world.ee[2]]), _CLOSE)
    return _action(np.array([*offset, height - 0.004 - world.ee[2]]), _CLOSE)


def _rise(world: World, gripper: float) -> np.ndarray:
    return _action(np.array([0.0, 0.0, max(0.0, TRAVEL - world.ee[2])]), gripper)


def _action(move: np.ndarray, gripper: float) -> np.ndarray:
    """Build an action.

    Args:
        move: Displacement in metres, [3]. A long one is scaled down as a whole, so that the hand moves straight.
        gripper: Action of the gripper.
    """
    scaled = move / STEP_SIZE
    scaled = scaled / max(1.0, float(np.abs(scaled).max()))
    return np.array([*scaled, gripper], dtype=np.float32)


def _between_fingers(world: World) -> int | None:
    """Return the index of the block that is between the fingers. None if there is no block between them."""
    offset = np.abs(world.blocks - world.ee)
    inside = (offset[:, 0] < 0.016) & (offset[:, 1] < 0.020) & (offset[:, 2] < 0.020)
    if not inside.any() or world.opening < 0.030:
        return None
    return int(np.argmax(inside))


def _in_bin(block: np.ndarray, center: np.ndarray, lift: float) -> bool:
    inside = np.abs(block[:2] - center).max() < scene.BIN_INNER - 0.010
    return bool(inside and block[2] < RELEASE + lift + 0.002)


def _stack_height(world: World, center: np.ndarray) -> float:
    """Return the additional release height if another block is already in the middle of the bin, in metres."""
    others = np.delete(world.blocks, world.color, axis=0)
    near = (np.abs(others[:, :2] - center).max(axis=1) < 0.042) & (others[:, 2] < 0.05)
    return STACK if near.any() else 0.0


def _free_spot(world: World, held_block: int) -> np.ndarray:
    """Return the place on the table nearest to the hand where the held block touches no other block."""
    others = np.delete(world.blocks[:, :2], held_block, axis=0)
    gap = np.hypot(*(_SPOTS[:, None] - others[None]).transpose(2, 0, 1)).min(axis=1)
    distance = np.hypot(*(_SPOTS - world.ee[:2]).T)
    return _SPOTS[int(np.argmin(np.where(gap > scene.SPACING, distance, distance + 1.0)))]
