"""A "did you mean" hint corrects a slip of the keyboard, and proposes no other robot, model or camera."""

import pytest
from sinew_client.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("pi0_fast_libero", ("pi0_libero", "pi05_libero"), ""),  # another model
        ("pi0_libero_low_mem_finetune", ("pi05_droid_finetune", "pi0_libero"), ""),  # another robot
        ("so100", ("so101",), ""),  # another arm
        ("camera4", ("camera1", "camera2"), ""),
        ("pi05_droid", ("pi0_droid",), ""),
        ("pi05_doird", ("pi05_droid", "pi0_droid"), "pi05_droid"),
        ("camer2", ("camera1", "camera2"), "camera2"),
        ("state-dim", ("state_dim", "action_dim"), "state_dim"),
        ("left_wirst", ("right_wrist", "left_wrist"), "left_wrist"),
    ],
)
def test_a_hint_names_no_other_thing(name, known, near):
    assert did_you_mean(name, known) == (f"; did you mean {near!r}?" if near else "")
