"""Instructions of no words: refused where nobody asked for them, and tokenised as any other where somebody did.

The policy of "Running VLAs at Real-time Speed" was trained and runs with an empty prompt (section 7.2), and its and
VLA-Perf's times of an RTX 4090 are of one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from sinew_client import Client, ClientError

from sinew.cli import main
from sinew.core import ObservationError
from sinew.policy import load
from tests import processes
from tests.covering import some
from tests.golden import Golden
from tests.serve.test_server import START_S

OTHERS = ("bitvla", "evo1", "groot-n15", "omnivla", "openvla-oft", "vla-adapter", "xvla-auto")
CASES = ("smolvla-2cam", "pi0-2cam", "pi05-2cam")  # whose templates end with words or a new line of their own


def empty(golden, case: str) -> dict:
    return {**Golden(golden / case).observation(), "prompt": "", "noise": None, "seed": 3}


@pytest.mark.parametrize("case", CASES)
def test_no_words_are_the_template_alone(case, case_bundle, golden):
    """As the reference's tokenizer has it: the formatted text with nothing in the instruction's place."""
    seen = empty(golden, case)
    refused = load(case_bundle(case), engine="eager")
    hint = r"got an empty string \(allow_empty_prompt=True allows it\)"
    for prompt in ("", "  \n"):
        with pytest.raises(ObservationError, match=hint):
            refused.infer({**seen, "prompt": prompt})
    policy = load(case_bundle(case), engine="eager", allow_empty_prompt=True)
    prompter = policy.processor.prompter
    state = policy.processor.state_normalizer.normalize(np.asarray(seen["state"], np.float32))
    ids = prompter.encode("", state)
    text = prompter.text("", state)
    assert "pick" not in text
    spelled = prompter.tokenizer.encode(text, add_special_tokens=prompter.recipe.add_special_tokens).ids
    assert ids.tolist() == spelled
    chunk = policy.infer(seen).actions
    assert np.isfinite(chunk).all()
    given = {name: value for name, value in seen.items() if name != "prompt"} | {"tokens": ids}
    np.testing.assert_array_equal(policy.infer(given).actions, chunk)  # a client that tokenises itself
    assert (policy.infer({**seen, "prompt": "pick up the cup"}).actions != chunk).any()


@pytest.mark.parametrize("case", some(OTHERS, "openvla-oft", "xvla-auto"))
def test_other_families_take_none_where_it_is_allowed(case, case_bundle, golden):
    """As their references do, which tokenise it as any other text."""
    seen, actions = empty(golden, case), {}
    with pytest.raises(ObservationError, match=r"got an empty string \(allow_empty_prompt=True"):
        load(case_bundle(case), engine="eager").infer(seen)
    policy = load(case_bundle(case), engine="eager", allow_empty_prompt=True)
    for prompt in ("", "lift the cup"):
        actions[prompt] = policy.infer({**seen, "prompt": prompt}).actions
        assert np.isfinite(actions[prompt]).all()
    assert (actions[""] != actions["lift the cup"]).any()


def test_an_instruction_of_the_bundles_own_comes_first(case_bundle, golden):
    policy = load(case_bundle("smolvla-2cam"), engine="eager", allow_empty_prompt=True)
    own = replace(policy.spec, default_prompt="wave")
    said = load(case_bundle("smolvla-2cam"), engine="eager").infer(
        {**empty(golden, "smolvla-2cam"), "prompt": "wave"}
    )
    policy.processor.spec = own
    np.testing.assert_array_equal(policy.infer(empty(golden, "smolvla-2cam")).actions, said.actions)


def test_words_that_are_asked_for_want_words(case_bundle):
    """A question of nothing is refused whatever is allowed."""
    policy = load(case_bundle("smolvla-2cam"), engine="eager", allow_empty_prompt=True)
    prompter = policy.processor.prompter
    with pytest.raises(ObservationError, match="got an empty string$"):
        prompter._encoded("question", "", np.zeros(6), (), "a question")


def test_infer_and_the_native_wire(case_bundle, golden, tmp_path, capsys):
    bundle, seen = case_bundle("pi0-2cam"), empty(golden, "pi0-2cam")
    wanted = load(bundle, engine="eager", allow_empty_prompt=True).infer(seen).actions
    images = []
    for name, frame in seen["images"].items():
        Image.fromarray(frame).save(tmp_path / f"{name}.png")
        images += ["--image", f"{name}={tmp_path / f'{name}.png'}"]
    state = ",".join(map(repr, map(float, seen["state"])))
    arguments = ["infer", str(bundle), *images, f"--state={state}", "--seed", "3", "--engine", "eager"]
    for said in ([], ["--prompt", ""]):
        assert main([*arguments, *said]) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert "got an empty string (--allow-empty-prompt allows it)" in told
        assert main([*arguments, *said, "--allow-empty-prompt", "--json"]) == 0
        got = json.loads(capsys.readouterr().out.splitlines()[-1])["actions"]
        np.testing.assert_allclose(got, wanted, atol=1e-6)
    command = [sys.executable, "-m", "sinew", "serve", str(bundle), "--wire", "native:0", "--engine", "eager"]
    for allowed in (False, True):
        with processes.Process(
            [*command, *["--allow-empty-prompt"] * allowed],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as server:
            first = server.stdout.readline()
            assert first.startswith("ready on tcp://"), server.stderr.read()
            with Client(first.split()[2], timeout=START_S) as client:
                if allowed:
                    np.testing.assert_array_equal(client.infer(seen).actions, wanted)
                else:
                    with pytest.raises(ClientError, match="serve ... --allow-empty-prompt` allows it"):
                        client.infer(seen)
            server.send_signal(signal.SIGTERM)
            assert server.wait(START_S) == 0
