"""Every line of every page has its place in a story; here the first day's are typed, by `make journeys` all."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from pathlib import Path

import pytest

from tests import processes
from tests.journeys import pages
from tests.journeys.pages import BLOCK, COMMANDS, PAGES, Block, lines, programs, typed, without_comment
from tests.journeys.stories import ASSETS, STORIES, arm, drove, evaluated, my_robot, streamed
from tests.journeys.walk import Walk

TYPED = [page for page in PAGES if lines(page) or programs(page)]


def constants(story: object) -> set[str | int]:
    """Return the literals of a story."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(story)))  # type: ignore[arg-type]
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def asked(story: object) -> list[str]:
    """Return the lines that a story takes from its page."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(story)))  # type: ignore[arg-type]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    taken = [
        node.args[0] for node in calls if getattr(node.func, "attr", "") in ("type", "serving", "leaves")
    ]
    return [first.value for first in taken if isinstance(first, ast.Constant)]


def test_every_page_has_a_story() -> None:
    assert sorted(STORIES) == sorted(TYPED)


@pytest.mark.parametrize("page", TYPED)
def test_every_line_has_its_place(page: str) -> None:
    """A line that a page gains, or that is spelled anew there, is missed here at once, not when it is walked."""
    story = STORIES[page]
    if "walk.lines:" in inspect.getsource(story):  # the same is said of all of them
        return
    known = constants(story)
    told = inspect.getsource(story)
    assert not [line for line in asked(story) if line not in lines(page)]
    assert not [line for line in lines(page) if line not in known]
    if "walk.walked |=" in told:  # programs whose words another test compares with a file that runs
        return
    assert all(
        f"walk.program({number}" in told.replace("\n", "").replace(" ", "")
        for number in range(len(programs(page)))
    )


@pytest.mark.parametrize("page", [page for page in TYPED if programs(page)])
def test_programs_import_what_is_there(page: str) -> None:
    """Names that are called otherwise by now are missed here, not when the page is walked."""
    for program in programs(page):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinew"):
                module = importlib.import_module(node.module or "")
                missing = [each.name for each in node.names if not hasattr(module, each.name)]
                assert not missing, f"{page}: {node.module} has no {missing}"


@pytest.mark.parametrize("page", PAGES)
def test_lines_stand_in_fenced_blocks(page: str) -> None:
    """A command that is only indented would be walked by nobody."""
    text = BLOCK.sub("", PAGES[page].read_text(encoding="utf-8"))
    indented = [line for line in text.splitlines() if line.startswith("    ") and line.strip()]
    assert not [line for line in indented if line.split()[0] in COMMANDS]


def test_a_page_without_a_story_is_refused_before_anything_is_installed() -> None:
    asked_for = ["docs/control.md", "docs/controll.md", "docs/concepts.md"]
    done = processes.run([sys.executable, "-m", "tests.journeys", *asked_for], cwd=pages.ROOT)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert "no story for docs/controll.md, docs/concepts.md" in said
    assert "(docs/concepts.md: these pages contain no commands); use one of README.md, " in said
    assert done.stdout == ""


def test_lines_are_read_as_a_shell_reads_them() -> None:
    text = "sinew serve a.gguf   # a server\n\nsinew run b \\\n    --json\n"
    assert typed(Block("p", 1, "", text)) == ["sinew serve a.gguf", "sinew run b --json"]
    assert typed(Block("p", 1, "console", '$ sinew bench a   # fast\n{"ms": 1}\n')) == ["sinew bench a"]
    assert typed(Block("p", 1, "", '{"images": []}\n')) == []
    assert typed(Block("p", 1, "toml", "a = 1\n")) == []
    assert without_comment("curl x#y") == "curl x#y"
    for wrong in (Block("p", 1, "", "sinew a\nsniew b\n"), Block("p", 1, "fortran", "x\n")):
        with pytest.raises(AssertionError, match="unknown (command|language)"):
            typed(wrong)


def test_a_walk_judges_what_comes(tmp_path: Path) -> None:
    walk = Walk("README.md", tmp_path)
    with pytest.raises(AssertionError, match="README.md has no line"):
        walk.type("sinew inspekt policy.gguf")
    with pytest.raises(AssertionError, match="expected 0"):
        walk.run("false")
    with pytest.raises(AssertionError, match="internal error"):
        walk.run("echo internal error")
    with pytest.raises(AssertionError, match="'successes' is not printed"):
        walk.run("echo done", says=("successes",))
    with pytest.raises(AssertionError, match="expected 0"), walk.beside("sleep 600"):
        pass  # SIGTERM ends it, and it does not answer
    assert "sinew serve policy.gguf" in walk.left()
    assert not pages.ROOT.samefile(walk.folder)


# ----------------------------------------------------------------------------- the first day, as it is typed


def test_a_checkpoint_becomes_a_policy_that_answers(tmp_path: Path) -> None:
    walk = Walk("docs/commands.md", tmp_path, quick=True)
    arm(walk)
    walk.type("sinew convert my_smolvla/ policy.gguf --vlm SmolVLM2-500M-Video-Instruct/")
    walk.type("sinew inspect policy.gguf", says=("camera1", "6 values"))
    chunk = walk.type(
        "sinew infer policy.gguf --image camera1=front.jpg --image camera2=wrist.png"
        ' --state 0,-45,60,10,0,20 --prompt "pick up the red cube"'
    )
    assert len(chunk.result["actions"]) == 50, chunk


def test_adapters_of_one_base(tmp_path: Path) -> None:
    STORIES["docs/sources.md"](Walk("docs/sources.md", tmp_path, quick=True))


@pytest.mark.slow
def test_a_server_and_its_robots(tmp_path: Path) -> None:
    """Episodes of the embedded task are played by tests/cli/test_robot_journeys.py, in a world that waits."""
    pytest.importorskip("mujoco")
    walk = Walk("README.md", tmp_path, quick=True)
    walk.copy(ASSETS / "blocks.gguf", "policy.gguf")
    my_robot(walk, ("front", "wrist"), 4, most=40)
    with walk.serving("sinew serve policy.gguf"):
        asked = (
            "--robot my_robot:Arm --prompt 'put the red block into the left bin' --seconds 600 --set stale=60"
        )
        drove(walk.run(f"sinew run tcp://127.0.0.1:5555 {asked} --timeout 60"))
        streamed(walk.run(f"sinew run tcp://127.0.0.1:5555 --stream {asked}"))
    streamed(walk.run(f"sinew run policy.gguf --stream {asked}"))
    evaluated(walk.run("sinew eval blocks --episodes 5 --workers 1"), 0.8)
