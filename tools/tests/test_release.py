"""A release: one version everywhere, a bill of materials, sums and an index that agree with the files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from sinew import __version__
from tools import installs, release


def wheel(folder: Path, name: str) -> Path:
    path = folder / f"{name}-{__version__}-py3-none-any.whl"
    about = f"{name}-{__version__}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "HERE = True\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {__version__}\n")
        file.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{about}/RECORD", "")
    return path


def test_one_version_stands_everywhere() -> None:
    found = release.versions()
    assert {"sinew/__init__.py", "packages/sinew_ros/package.xml", "packages/sinew_ros/setup.py"} <= set(
        found
    )
    assert {each for stated in found.values() for each in stated} == {__version__}


def test_the_changelog_has_the_section_of_this_version() -> None:
    text = release.changelog()
    assert text.startswith(f"# Sinew {__version__}")
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) == {"Added", "Changed", "Fixed", "Removed"}


def test_a_release_without_a_section_is_rejected() -> None:
    both = "# Changelog\n\n## 0.2.0\n\nnew\n\n## 0.1.0\n\nold\n"
    assert release.changelog(both, "0.2.0") == "# Sinew 0.2.0\n\nnew\n"
    with pytest.raises(ValueError, match=r"expected a section '## 0\.3\.0'"):
        release.changelog(both, "0.3.0")


def test_a_bill_of_materials(tmp_path: Path) -> None:
    own = wheel(tmp_path, "sinew_vla")
    packages = [
        {
            "name": "msgpack",
            "version": "1.2.4",
            "wheels": [{"name": "a.whl", "hashes": {"sha256": "ab" * 32}}],
        },
        {"name": "sinew-vla", "path": "somewhere"},
    ]
    found = release.bill(packages, [own])
    assert [each["purl"] for each in found["components"]] == [
        "pkg:pypi/msgpack@1.2.4",
        f"pkg:pypi/sinew-vla@{__version__}",
    ]
    assert found["components"][1]["hashes"] == [{"alg": "SHA-256", "content": release.digest(own)}]
    assert found == release.bill(packages, [own])  # the same again


def test_pip_installs_from_the_index_and_refuses_another_file(tmp_path: Path) -> None:
    own = wheel(tmp_path, "sinew_vla")
    release.index([own], tmp_path / "simple")
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "env")]
    words += ["--index-url", (tmp_path / "simple").as_uri(), f"sinew-vla=={__version__}"]
    alone = installs.bare_environment() | {"PIP_CONFIG_FILE": "/dev/null"}
    subprocess.run(words, check=True, env=alone)
    assert (tmp_path / "env" / "sinew_vla.py").exists()
    with zipfile.ZipFile(own, "a") as file:
        file.writestr("more.py", "")
    refused = subprocess.run(
        [*words, "--no-cache-dir", "--upgrade"], env=alone, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "HASH" in refused.stderr.upper()


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed")
def test_the_sums_are_signed(tmp_path: Path) -> None:
    key, sums = tmp_path / "key", tmp_path / "SHA256SUMS"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "allowed_signers").write_text(f"me {key.with_suffix('.pub').read_text()}")
    sums.write_text(f"{'ab' * 32}  a.whl\n")
    signature = release.sign(sums, key)
    page = (release.ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(r"^    ssh-keygen (.+) < SHA256SUMS$", page, re.MULTILINE)
    words = ["ssh-keygen", *line.replace("WHO", "me").split()]
    assert signature.name in words
    for text, status in ((sums.read_text(), 0), ("other\n", 255)):
        done = subprocess.run(words, input=text, text=True, capture_output=True, cwd=tmp_path)
        assert done.returncode == status, done.stderr


def test_a_tag_makes_a_release() -> None:
    """The workflow runs the line that is tried here, and no tag but this version's passes."""
    steps = yaml.safe_load((release.ROOT / ".github/workflows/release.yml").read_text())["jobs"]["release"][
        "steps"
    ]
    assert [each["run"] for each in steps if "run" in each] == ["make release RELEASE=--try"]
    words = [sys.executable, "-m", "tools.release"]
    done = subprocess.run(
        words, cwd=release.ROOT, env=os.environ | {"RELEASE_TAG": "v9.9.9"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (
        1,
        f"failed: RELEASE_TAG: expected v{__version__}, got v9.9.9\n",
    )


@pytest.mark.slow
def test_a_release_is_made_installed_and_tried(tmp_path: Path) -> None:
    if why := installs.reachable():
        pytest.skip(f"the package index does not answer: {why}")
    words = [sys.executable, "-m", "tools.release", "--out", str(tmp_path / "out"), "--try"]
    done = subprocess.run(words, cwd=release.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2" in done.stdout
    assert release.UNPUBLISHED in done.stdout
    sums = (tmp_path / "out" / "SHA256SUMS").read_text().splitlines()
    assert len([line for line in sums if line.endswith(".whl")]) == len(release.FOLDERS)
    subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=tmp_path / "out", check=True)
