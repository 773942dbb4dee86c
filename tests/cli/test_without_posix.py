"""Python for Windows lacks modules and signals of POSIX: what installs there runs, and the rest names WSL."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own; what is taken away stays away
PROGRAM = """
import contextlib, importlib, io, json, os, pkgutil, signal, sys, warnings
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp", "torch"):
    sys.modules[name] = None
for module, names in (
    (os, "fork sched_getaffinity sched_getscheduler sched_setscheduler getuid geteuid memfd_create mkfifo setsid killpg"
         " nice getloadavg O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_CLOEXEC"),
    (signal, "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD pthread_kill pthread_sigmask setitimer"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
import sinew_client, sinew
modules = [each.name for each in pkgutil.walk_packages(sinew_client.__path__, "sinew_client.")]
for name in modules:
    if not name.endswith("__main__"):
        importlib.import_module(name)
with sinew.load("pen") as policy:
    shape = policy.infer(policy.dummy_observation()).actions.shape
from sinew.cli import main
said = {}
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words)
    said[" ".join(words)] = [code, " ".join(out.getvalue().split())]
print(json.dumps([len(modules), shape, said]))
"""
PLAYED = ("eval pen --episodes 1 --workers 1 --engine onnx", "inspect pen", "doctor --json")
LEFT = {"serve pen": "resource", "run pen --robot dry": "termios"}


@pytest.fixture(scope="module")
def found() -> tuple[int, list[int], dict[str, tuple[int, str]]]:
    asked = json.dumps([words.split() for words in (*PLAYED, *LEFT)])
    ran = subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return tuple(json.loads(ran.stdout.splitlines()[-1]))


def test_the_client_is_imported_and_a_policy_answers(found) -> None:
    modules, shape, _ = found
    assert modules > 50
    assert shape == [24, 1]


@pytest.mark.parametrize("words", PLAYED)
def test_verbs_that_need_none_of_it(found, words: str) -> None:
    code, said = found[2][words]
    assert code == 0, said


@pytest.mark.parametrize("words", LEFT)
def test_verbs_that_need_it_name_what_has_it(found, words: str) -> None:
    code, said = found[2][words]
    wanted = f"error: this command needs {LEFT[words]}: this Python does not have it; on Windows, use Python in WSL"
    assert code == 1
    assert said.startswith(wanted), said
