"""``sinew.evaluate``: own environments, single and vectorised, own policies, typed results; what does not fit."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")
pytest.importorskip("mujoco", reason="the pen task needs the sim extra")

import sinew  # noqa: E402
from eval.tests.test_eval import PEN, content, needs_pen  # noqa: E402
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv  # noqa: E402
from sinew.core import (  # noqa: E402
    ActionChunk,
    CameraSpec,
    SinewError,
    Timing,
    VectorSpec,
    statistics,
)

from sinew_eval.episodes import campaign  # noqa: E402
from sinew_eval.episodes.lockstep import INFER, ORDER, RESET, STEP, Meeting  # noqa: E402
from sinew_eval.episodes.settings import Task, Variant  # noqa: E402
from sinew_eval.report import evaluation  # noqa: E402
from sinew_eval.sim.experts import expert_spec  # noqa: E402
from sinew_eval.sim.pen import PenEnv  # noqa: E402

pytestmark = pytest.mark.usefixtures("rounded_by_shape", "forked")

SEEDS = range(5000, 5012)
SHORT: dict[str, Any] = {"replan": 8, "solver_steps": 2, "episodes": len(SEEDS)}


def pen() -> Any:
    """A pen of one's own: no id, made by hand."""
    return gymnasium.wrappers.TimeLimit(PenEnv(), 120)


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    variant = Variant(str(PEN), 8, solver_steps=2)
    return content(campaign.run(Task("sinew/Pen-v0"), [variant], SEEDS)[0])


@needs_pen
def test_names_and_objects_give_the_same(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    named = sinew.evaluate(PEN, **SHORT, workers=2, out=tmp_path)  # which fits sinew/Pen-v0
    assert named.env == "sinew/Pen-v0"
    assert content(list(named.episodes)) == alone
    assert (tmp_path / campaign.LOG).read_text().count("\n") == len(SEEDS)
    heard: list[int] = []
    env = pen()
    with sinew.load(PEN, threads=1) as policy:
        given = sinew.evaluate(policy, env, **SHORT, on_episode=lambda episode: heard.append(episode.seed))
        policy.infer(policy.dummy_observation())  # what was given open stays open
    env.reset(seed=0)
    assert content(list(given.episodes)) == alone
    assert heard == list(SEEDS)
    assert (named.env, given.env, given.control_hz) == ("sinew/Pen-v0", "PenEnv", 60.0)


@needs_pen
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vectorised_environment_plays_each_seed_as_alone(
    mode: AutoresetMode, alone: list[dict[str, Any]]
) -> None:
    """Whichever way it is reset: the environment's parts meet the same worlds, and the policy the same observations."""
    env = SyncVectorEnv(
        [pen] * 5, autoreset_mode=mode
    )  # twelve episodes: the last ones have idle parts beside them
    with sinew.load(PEN, threads=1) as policy:
        found = sinew.evaluate(OneByOne(policy), env, **SHORT)
        assert (found.batch, "got OneByOne" in found.one_by_one) == (5, True)
        assert content(list(found.episodes)) == alone
        few = sinew.evaluate(OneByOne(policy), env, **{**SHORT, "episodes": SEEDS[3:5]})
        assert content(list(few.episodes)) == alone[3:5]
    found = sinew.evaluate(PEN, env, **SHORT)
    assert (found.batch, found.one_by_one) == (5, "")
    same_outcomes(found, alone)


class OneByOne:
    """A policy that computes each answer alone, in one shape: it has the same bits in whatever company it is asked."""

    def __init__(self, policy: Any):
        self.spec, self.infer, self.reset, self.close = policy.spec, policy.infer, policy.reset, policy.close


def same_outcomes(found: Any, alone: list[dict[str, Any]]) -> None:
    """Answers of a batch round differently from those alone, so an episode that hangs by a rounding may end otherwise:
    as good as none of a dozen do."""
    assert [e.seed for e in found.episodes] == list(SEEDS)
    assert [e.task for e in found.episodes] == [e["task"] for e in alone]
    assert sum(e.success != then["success"] for e, then in zip(found.episodes, alone, strict=True)) <= 1


@needs_pen
def test_a_vectorised_environment_of_processes(alone: list[dict[str, Any]]) -> None:
    env = AsyncVectorEnv([pen] * 3, autoreset_mode=AutoresetMode.DISABLED)
    mapping = {
        "images": {"now": "images/now", "previous": "images/previous"},
        "state": ["state"], "prompt": "catch the pen", "max_steps": 120, "control_hz": 60,
    }  # fmt: skip
    single = sinew.evaluate(PEN, pen, adapter=mapping, **SHORT)
    try:
        found = sinew.evaluate(PEN, env, adapter=mapping, **SHORT)
        with sinew.load(PEN, threads=1) as policy:
            same = sinew.evaluate(OneByOne(policy), env, adapter=mapping, **SHORT)
    finally:
        env.close()
    assert content(list(same.episodes)) == content(list(single.episodes))
    same_outcomes(found, content(list(single.episodes)))
    assert found.successes >= 10


@needs_pen
def test_a_batch_of_environments_that_are_made(alone: list[dict[str, Any]]) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(pen())
        return made[-1]

    found = sinew.evaluate(PEN, make, **SHORT, batch=4)
    assert len(made) == 4
    same_outcomes(found, alone)


# ----------------------------------------------------------------------------- a policy and an environment of one's own


class Reach(gymnasium.Env):
    """A number that moves by what it is told, and should come near to what it is shown."""

    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    observation_space = gymnasium.spaces.Dict(
        {
            "eye": gymnasium.spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "pose": gymnasium.spaces.Box(-9, 9, (2,), np.float64),
        }
    )
    metadata = {"render_fps": 10}  # noqa: RUF012 - gymnasium's interface

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at, self.goal = self.np_random.uniform(-5, 5, 2)
        return self._seen(), {"task": "left" if self.goal < self.at else "right"}

    def step(self, action: Any) -> Any:
        self.at += float(action[0])
        near = abs(self.at - self.goal) < 0.3
        return self._seen(), 0.0, near, False, {"is_success": near, "task": ""}

    def _seen(self) -> Any:
        return {"eye": np.zeros((4, 4, 3), np.uint8), "pose": np.array([self.at, self.goal])}


class Towards:
    """Goes towards the goal; keeps what was asked, and in which session."""

    def __init__(self, reach: float = 1.0) -> None:
        self.spec = replace(expert_spec("towards", VectorSpec(1)), cameras=(CameraSpec("eye", 4, 4),))
        self.reach, self.sessions = reach, list[str]()
        self.begun: list[str] = []

    def infer(self, observation: Any, *, timeout: float | None = None) -> ActionChunk:
        self.sessions.append(observation.get("session", ""))
        at, goal = observation["state"]
        rows = np.full((1, 1), np.clip(goal - at, -self.reach, self.reach), np.float32)
        return ActionChunk(rows, Timing(total_ms=1.0))

    def reset(self, session: str = "") -> None:
        self.begun.append(session)

    def close(self) -> None:
        raise AssertionError("it is not ours to close")


MAPPING = {
    "images": {"eye": "eye"},
    "state": ["pose"],
    "prompt": "come near",
    "max_steps": 20,
    "hold": "zero",
}
OWN: dict[str, Any] = {"adapter": MAPPING, "replan": 1, "handover": "naive"}


def test_a_policy_of_ones_own() -> None:
    policy = Towards()
    found = sinew.evaluate(policy, Reach(), episodes=20, **OWN)
    assert found.success == 1.0
    assert found.interval == statistics.wilson(20, 20)
    assert str(found).startswith("Towards on Reach: 20/20 (100.0 %), 95 % interval 83.9 to 100.0 %")
    assert set(found.by_task()) == {"left", "right"}
    assert sum(each.successes for each in found.by_task().values()) == 20
    assert isinstance(found.episodes[0], sinew.Episode)
    assert isinstance(found, sinew.Evaluation)
    assert json.loads(json.dumps(found.to_dict()))["wins"] == 20
    assert found.rows()[3]["seed"] == 5003
    weak = sinew.evaluate(Towards(0.2), Reach(), episodes=20, **OWN)
    assert 0 < weak.successes < 20
    assert len(weak.failed_seeds) == 20 - weak.successes
    test = found.compare(weak)
    assert (test.pairs, test.only_first, test.only_second) == (20, 20 - weak.successes, 0)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_sessions_of_a_policy_of_ones_own(mode: AutoresetMode) -> None:
    """What remembers an episode must know which one asks."""
    single = sinew.evaluate(Towards(0.5), Reach(), episodes=9, **OWN)
    policy = Towards(0.5)
    env = SyncVectorEnv([Reach] * 4, autoreset_mode=mode)
    found = sinew.evaluate(policy, env, episodes=9, **OWN)
    assert content(list(found.episodes)) == content(list(single.episodes))
    assert "expected a policy that is loaded in this process, got Towards" in found.one_by_one
    assert set(policy.sessions) == {f"seat-{k}" for k in range(4)}
    assert len(policy.begun) == 9


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (np.zeros((3, 1)), r"got ndarray of \[3, 1\]"),
        ([[0.0]], r"got list of \[1, 1\]"),
        ({"actions": 1}, "got dict"),
        (None, "got NoneType"),
        (ActionChunk(np.zeros((3, 2), np.float32)), r"got actions of \[3, 2\]"),
        (ActionChunk(np.zeros(3, np.float32)), r"got actions of \[3\]"),
        (ActionChunk(np.zeros((0, 1), np.float32)), r"got actions of \[0, 1\]"),
    ],
)
def test_what_infer_returns_is_checked(answer: Any, got: str) -> None:
    class Own(Towards):
        def infer(self, observation: Any, *, timeout: float | None = None) -> Any:
            return answer

    wanted = r"Own.infer: expected sinew_client.ActionChunk\(actions\) with actions of \[rows, 1\], "
    with pytest.raises(SinewError, match=wanted + got):
        sinew.evaluate(Own(), Reach(), episodes=1, **OWN)


def test_a_notebook_shows_a_short_text_and_a_plot() -> None:
    found = sinew.evaluate(Towards(), Reach(), episodes=20, **OWN)
    assert repr(found) == f"<Evaluation {found}>"
    page = ElementTree.fromstring(found._repr_html_())
    assert [row[0].text for row in page.findall("tr")[1:]] == ["all", "left", "right"]
    for row, each in zip(page.findall("tr")[1:], [found, *found.by_task().values()], strict=True):
        assert row[1].text == f"{each.successes}/{len(each.episodes)}"
        bar = row[2][0].findall("rect")[1]
        assert float(bar.get("width", "")) == pytest.approx(160 * each.success, abs=0.1)
    hostile = replace(
        found, policy="<script>", episodes=(replace(found.episodes[0], task="</td><b>", success=False),)
    )
    assert "<script>" not in hostile._repr_html_()
    assert "<b>" not in hostile._repr_html_()


def test_hints_are_in_the_words_of_python() -> None:
    with pytest.raises(SinewError, match=r"Name its parts: adapter=\{'images'") as caught:
        sinew.evaluate(Towards(), lambda: gymnasium.wrappers.TimeLimit(Reach(), 20), episodes=1)
    assert "--" not in str(caught.value)
    words = "--replan 3 needs --solver-steps; `sinew eval --env x`, --setup"
    assert evaluation._in_python(words) == "replan 3 needs solver_steps; `sinew eval --env x`, --setup"


def test_an_installed_id_of_a_suite_plays_in_this_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gym_pusht.py").write_text(PUSHT)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        policy = Towards()
        policy.spec = replace(policy.spec, action=VectorSpec(2), cameras=(CameraSpec("image", 96, 96),))
        policy.infer = lambda observation, timeout=None: ActionChunk(np.full((1, 2), 256, np.float32))  # type: ignore[method-assign]
        found = sinew.evaluate(policy, "gym_pusht/PushT-v0", episodes=2, replan=1, handover="naive")
        # A mapping of the user does not have to repeat the rate of the suite, and may change it.
        mapping = {"images": {"image": "pixels"}, "state": ["agent_pos"]}
        rates = [
            sinew.evaluate(
                policy,
                "gym_pusht/PushT-v0",
                episodes=1,
                replan=1,
                handover="naive",
                adapter={**mapping, **own},
            ).control_hz
            for own in ({}, {"control_hz": 20.0})
        ]
    finally:
        gymnasium.registry.pop("gym_pusht/PushT-v0", None)
        sys.modules.pop("gym_pusht", None)
    assert found.success == 1.0
    assert found.env == "gym_pusht/PushT-v0"
    assert rates == [10.0, 20.0]


PUSHT = """
import gymnasium
import numpy as np


class PushT(gymnasium.Env):
    metadata = {"render_fps": 10}
    action_space = gymnasium.spaces.Box(0, 512, (2,), np.float32)

    def __init__(self, **options):
        self.observation_space = gymnasium.spaces.Dict()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action):
        return self.seen(), 0.0, True, False, {"is_success": bool(action[0] == 256)}

    def seen(self):
        return {"pixels": np.zeros((96, 96, 3), np.uint8), "agent_pos": np.zeros(2)}


gymnasium.register("gym_pusht/PushT-v0", PushT, max_episode_steps=300)
"""


def test_an_error_of_an_episode_ends_all_of_them() -> None:
    class Broken(Towards):
        def infer(self, observation: Any, *, timeout: float | None = None) -> ActionChunk:
            if len(self.sessions) == 7:
                raise SinewError("the cable is out")
            return super().infer(observation)

    with pytest.raises(SinewError, match="the cable is out"):
        sinew.evaluate(Broken(0.5), SyncVectorEnv([Reach] * 4), episodes=9, **OWN)

    class Jammed(Reach):
        def step(self, action: Any) -> Any:
            raise RuntimeError("jammed")

    with pytest.raises(RuntimeError, match="jammed"):
        sinew.evaluate(Towards(), SyncVectorEnv([Jammed] * 3), episodes=4, **OWN)


# ----------------------------------------------------------------------------- what does not fit


@needs_pen
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((3, "sinew/Pen-v0"), {}, "policy: expected a bundle, an address, or a policy with spec"),
        (("nowhere.gguf", "sinew/Pen-v0"), {}, "no such file"),
        ((PEN, 3), {}, "env: expected a gymnasium id, an environment, or a function that makes one, got int"),
        ((PEN, lambda: 3), {}, "env: expected a gymnasium.Env, or a function that makes one, got int"),
        (
            (PEN, pen),
            {"workers": 2},
            "workers, out: pass the policy, the environment and the adapter by name",
        ),
        ((PEN, pen), {"env_options": {"image_size": 32}}, "env_options: expected a gymnasium id"),
        ((PEN, "sinew/Blocks-v0"), {}, "sinew/Blocks-v0 and pen do not fit"),
        ((PEN, "libero_10"), {}, "needs a simulator of its own, .* `sinew eval --env libero_10`"),
        ((PEN, "gym_pusht/PushT-v0"), {}, "needs the package gym_pusht, which this Python environment lacks"),
        ((PEN, "sinew/Pen-v0"), {"episodes": 0}, "episodes: expected a number from 1 on"),
        ((PEN, "sinew/Pen-v0"), {"episodes": [1, 1]}, "or different seeds"),
        ((PEN, Reach), {}, "observation: expected a dict with images, state and prompt|max_episode_steps"),
        ((PEN, pen), {"adapter": {"images": {}, "sate": []}}, "adapter: .*sate"),
        ((PEN, pen), {"latency": "soon"}, "latency: expected N"),
        (("expert", pen), {"batch": 4}, "batch: expected a bundle or a server"),
    ],
)
def test_mistakes_are_named(arguments: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SinewError, match=message):
        sinew.evaluate(*arguments, **{"episodes": 1, **options})


@needs_pen
def test_environments_that_cannot_be_played_at_once() -> None:
    with pytest.raises(
        SinewError,
        match="batch 4: expected a gymnasium id, a function that makes environments, or a vectorised one",
    ):
        sinew.evaluate(PEN, pen(), episodes=1, batch=4)
    env = SyncVectorEnv([pen] * 2)
    with pytest.raises(
        SinewError, match="batch: expected 2, the number of the vectorised environment's parts, got 4"
    ):
        sinew.evaluate(PEN, env, episodes=1, batch=4)
    with pytest.raises(SinewError, match="expected a single environment for an expert"):
        sinew.evaluate("expert", env, episodes=1)
    env.metadata = {}
    with pytest.raises(SinewError, match="autoreset_mode"):
        sinew.evaluate(PEN, env, episodes=1)


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """Shards are programs of their own: they do not import the script that asked for them."""
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent(
            """
            import sinew
            print(sinew.evaluate("expert", "sinew/Pen-v0", episodes=4, workers=2))
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "expert on sinew/Pen-v0: 4/4 (100.0 %), 95 % interval 51.0 to 100.0 %\n"


def test_seats_are_answered_kind_by_kind_when_all_of_them_wait() -> None:
    """What only all can ask together waits for the others; an answer that is an error is the asker's own."""
    seen: list[tuple[str, dict[int, Any]]] = []

    def answers(kind: str) -> Any:
        def answer(asked: Any) -> dict[int, Any]:
            seen.append((kind, dict(asked)))
            return {seat: ValueError(what) if what == "no" else (kind, what) for seat, what in asked.items()}

        return answer

    meeting = Meeting(3)
    meeting.answers, meeting.together = {kind: answers(kind) for kind in ORDER}, {RESET}

    def play(seat: int) -> None:
        assert threading.current_thread().daemon  # an environment that hangs keeps no process
        if seat == 2:
            assert meeting.ask(seat, STEP, "first") == (STEP, "first")
        assert meeting.ask(seat, RESET, seat) == (RESET, seat)
        if seat == 1:
            with pytest.raises(ValueError, match="no"):
                meeting.ask(seat, INFER, "no")
        else:
            meeting.ask(seat, STEP if seat else INFER, seat)

    meeting.run(play)
    assert seen == [
        (STEP, {2: "first"}),
        (RESET, {0: 0, 1: 1, 2: 2}),
        (INFER, {0: 0, 1: "no"}),
        (STEP, {2: 2}),
    ]


@pytest.mark.parametrize("where", ["a seat", "an answer"])
def test_the_first_error_ends_all_seats_and_is_raised(where: str) -> None:
    def stumble(*_: Any) -> Any:
        raise SinewError(where)

    meeting = Meeting(3)
    with pytest.raises(AssertionError, match="no kind of request can be answered: {0: .'else', 1.}"):
        meeting.run(lambda seat: None if seat else meeting.ask(seat, "else", 1))
    meeting, taken = Meeting(3), []
    meeting.answers = {STEP: stumble}

    def play(seat: int) -> None:
        if where == "a seat" and seat == 1:
            stumble()
        try:
            meeting.ask(seat, STEP, None)
        except Exception as error:  # noqa: BLE001 - as an environment may
            taken.append(error)

    with pytest.raises(SinewError, match=f"^{where}$"):
        meeting.run(play)
    assert not taken
    assert not [each for each in threading.enumerate() if each.name.startswith("sinew-episode")]
