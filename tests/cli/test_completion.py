"""`sinew --completion`, tried in the shells themselves: verbs, verbs of a group, flags, choices."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sinew.cli import main

# What stands before the cursor, and what completes it.
CASES = {
    "sinew qua": "quantize",
    "sinew hub pul": "pull",
    "sinew hub cache sh": "show",
    "sinew --compl": "--completion",
    "sinew new fam": "family",
    "sinew perf cal": "calibrate",
    "sinew serve --api": "--api-key-file",
    "sinew serve --engine ea": "eager",
    "sinew eval --compa": "--compare",  # before an argument that has no choices
    "sinew doctor --js": "--json",
    "sinew hub push pol": "policy.gguf",
    "sinew eval pol": "policy.gguf",  # a bundle, an address or a name
}
WAIT_S = 60

BASH = """
source {script}
for line in "$@"; do
  read -ra COMP_WORDS <<< "$line"
  COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_LINE=$line; COMP_POINT=${{#line}}; COMPREPLY=()
  word=${{COMP_WORDS[COMP_CWORD]}}
  _sinew sinew "$word" "${{COMP_WORDS[COMP_CWORD-1]}}"
  if [[ -z $COMPREPLY && $(complete -p sinew) == *"-o default"* ]]; then COMPREPLY=($(compgen -f -- "$word")); fi
  echo "${{COMPREPLY[*]}}"
done
"""
FISH = "source {script}\nfor line in $argv; complete -C $line; end\n"
# A shell on a terminal of its own, in which the tabulator is pressed; the verb is a function that says its words.
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell 'PS1=; autoload -U compinit; compinit -u -D; source {script}; sinew() {{ print "GOT $*" }}; print REA""DY'
until zpty -r shell line && [[ $line == *READY* ]]; do :; done
for typed in "$@"; do
  zpty -w -n shell "$typed"$'\t\n'
  until zpty -r shell line && [[ $line == *GOT* && $line != *'$*'* ]]; do :; done
  print -r -- "${{line##*GOT }}"
done
zpty -d shell
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Path]:
    def written(shell: str) -> Path:
        assert main([f"--completion={shell}"]) == 0
        path = tmp_path / f"sinew.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return written


@pytest.mark.parametrize(("shell", "program"), [("bash", BASH), ("fish", FISH), ("zsh", ZSH)])
def test_words_are_completed(shell: str, program: str, script: Callable[[str], Path], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    run = tmp_path / f"run.{shell}"
    run.write_text(program.format(script=script(shell)))
    (tmp_path / "policy.gguf").touch()
    start = (
        [shell, "--noprofile", "--norc"]
        if shell == "bash"
        else [shell, "-f"]
        if shell == "zsh"
        else [shell, "-N"]
    )
    done = subprocess.run([*start, run, *CASES], capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = [line.split("\t")[0].split()[-1] for line in done.stdout.splitlines() if line.strip()]
    assert found == list(CASES.values()), done.stdout + done.stderr


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
