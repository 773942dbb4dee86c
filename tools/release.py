"""Build and test the files of a release: ``python -m tools.release`` (make release). Nothing is uploaded.

The program writes these files to ``build/release``:

* a wheel and a source distribution of each distribution (pure Python: kernels are compiled where they run)
* ``sbom.cdx.json``: the packages of the largest install, in CycloneDX 1.6
* ``CHANGELOG.md``: the section of this version
* ``SHA256SUMS``
* ``simple``: a package index of these files

``--try`` installs from this index into an empty environment and runs the commands of the README. ``--sign KEY`` signs
``SHA256SUMS`` with a key of OpenSSH. CONTRIBUTING.md states how to verify it.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from sinew import __version__
from tools import installs

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    ".",
    "packages/sinew-client",
    "eval",
    "perf",
    "packages/lerobot_policy_sinew",
    "packages/sinew_ros",
)
ROLE = "full"  # role of tools/installs.py whose packages are listed in the bill of materials
TRIED = ("sinew --version", "sinew doctor", "sinew demo act --episodes 2 --sweep-episodes 0 --out OUT")
UNPUBLISHED = (
    "not published: no package index has these files and no registry an image. Until then the"
    " README's line installs from a clone, and these files from SHA256SUMS' folder"
)
LIKE_A_VERSION = re.compile(r"""(?:sinew-vla(?:-\w+|\[\w+\])?==|version ?= ?"|<version>)(\d+\.\d+\.\d+)""")


def versions() -> dict[str, set[str]]:
    """Return file -> the versions of this project that the file states."""
    names = ["pyproject.toml", "sinew/__init__.py"]
    for folder in FOLDERS[1:]:
        names += [
            str(path.relative_to(ROOT))
            for path in [*(ROOT / folder).glob("*"), *(ROOT / folder).glob("src/*/__init__.py")]
            if path.name in ("pyproject.toml", "setup.py", "package.xml", "__init__.py")
        ]
    found = {}
    for name in names:
        text = (ROOT / name).read_text().replace("__version__", "version")
        if stated := set(LIKE_A_VERSION.findall(text)):
            found[name] = stated
    return found


def build(out: Path) -> list[Path]:
    """Build wheels and source distributions. The same checkout gives the same bytes."""
    when = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    for folder in FOLDERS:
        subprocess.run(
            [
                *(*installs.uv(), "build", "--no-config", "--quiet", "--python", sys.executable),
                *("--out-dir", str(out), str(ROOT / folder)),
            ],
            check=True,
            env=installs.bare_environment() | {"SOURCE_DATE_EPOCH": when},
        )
    (out / ".gitignore").unlink(missing_ok=True)  # uv has written this file
    return sorted([*out.glob("*.whl"), *out.glob("*.tar.gz")])


def bill(packages: Sequence[dict[str, Any]], own: Sequence[Path]) -> dict[str, Any]:
    """Return the bill of materials as a CycloneDX document.

    Args:
        packages: Packages in the form of PEP 751.
        own: Wheels of this project.
    """
    components = []
    for each in sorted(packages, key=lambda one: one["name"]):
        if "version" not in each or canonicalize_name(each["name"]).startswith("sinew"):
            continue
        found = {"type": "library", "name": each["name"], "version": each["version"]}
        found["purl"] = found["bom-ref"] = f"pkg:pypi/{canonicalize_name(each['name'])}@{each['version']}"
        sums = [
            file["hashes"]["sha256"]
            for file in [*each.get("wheels", []), each.get("sdist", {})]
            if "hashes" in file
        ]
        references = [
            {"type": "distribution", "url": found["purl"], "hashes": [{"alg": "SHA-256", "content": content}]}
            for content in sums
        ]
        components.append({**found, "externalReferences": references} if references else found)
    for path in own:
        if path.suffix == ".whl":
            name, version, *_ = parse_wheel_filename(path.name)
            components.append(
                {
                    "type": "application" if name == "sinew-vla" else "library",
                    "name": str(name),
                    "version": str(version),
                    "bom-ref": f"pkg:pypi/{name}@{version}",
                    "purl": f"pkg:pypi/{name}@{version}",
                    "licenses": [{"license": {"id": "Apache-2.0"}}],
                    "hashes": [{"alg": "SHA-256", "content": digest(path)}],
                }
            )
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(components, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": "sinew-vla",
                "version": __version__,
                "bom-ref": "release",
            }
        },
        "components": components,
    }


def changelog(text: str | None = None, version: str = __version__) -> str:
    """Return the section of a version in CHANGELOG.md.

    Args:
        text: Content of the file. Default: CHANGELOG.md of this checkout.
        version: The version.

    Raises:
        ValueError: The file has no section for the version.
    """
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8") if text is None else text
    section = re.search(rf"^## {re.escape(version)}\b.*?(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if section is None:
        raise ValueError(
            f"CHANGELOG.md: expected a section '## {version}'; write a section with the changes for users"
        )
    return section[0].replace("## ", "# Sinew ", 1).rstrip() + "\n"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sign(sums: Path, key: Path) -> Path:
    """Sign the checksums with a key of OpenSSH, for ``ssh-keygen -Y verify -n sinew-release``. Returns the
    signature."""
    subprocess.run(
        ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", "sinew-release", str(sums)], check=True
    )
    return sums.with_name(f"{sums.name}.sig")


def index(files: Sequence[Path], out: Path) -> None:
    """Write a package index (PEP 503) for files next to ``out``, with their hashes."""
    shutil.rmtree(out, ignore_errors=True)
    for path in files:
        parsed = parse_wheel_filename(path.name) if path.suffix == ".whl" else parse_sdist_filename(path.name)
        place = out / parsed[0]
        place.mkdir(parents=True, exist_ok=True)
        line = f'<a href="../../{html.escape(path.name)}#sha256={digest(path)}">{html.escape(path.name)}</a><br>\n'
        with (place / "index.html").open("a") as page:
            page.write(line)


def tried(out: Path, extra: str) -> None:
    """Install from the index into an empty environment, and run the commands of the README there.

    Our distributions are installed first and only from this index, so that no other index can provide their names.

    Raises:
        SystemExit: A command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SINEW_"))
        }
        environment |= {
            "HOME": folder,
            "XDG_CACHE_HOME": str(home / "cache"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        environment["PATH"] = f"{home / 'env' / 'bin'}:{os.environ['PATH']}"
        python, own = str(home / "env" / "bin" / "python"), f"sinew-vla[{extra}]=={__version__}"
        parts = [
            f"sinew-vla-{part}=={__version__}" for part in ("client", "eval")
        ]  # requirements of the extra, without our own distributions
        alone = ["--no-deps", "--index-url", (out / "simple").resolve().as_uri()]
        apart = environment | {"PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        for words, where in (
            ([sys.executable, "-m", "venv", str(home / "env")], environment),
            ([python, "-m", "pip", "install", "-q", *alone, own, *parts], apart),
            ([python, "-m", "pip", "install", "-q", "-c", str(out / "constraints.txt"), own], environment),
            *((line.replace("OUT", str(home / "out")).split(), environment) for line in TRIED),
        ):
            print("$", *(word.replace(folder, "~") for word in words), flush=True)
            subprocess.run(words, check=True, cwd=folder, env=where)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release")
    parser.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="install the release and run the commands of the README",
    )
    parser.add_argument(
        "--sign", type=Path, metavar="KEY", help="private key of OpenSSH that signs the checksums"
    )
    parser.add_argument("--extra", default="demo", help="with --try: the extra to install")
    asked = parser.parse_args()
    unlike = {name: stated for name, stated in versions().items() if stated != {__version__}}
    if unlike:
        print(f"failed: expected version {__version__} everywhere, got {unlike}")
        return 1
    if (tag := os.environ.get("RELEASE_TAG", "")) not in ("", f"v{__version__}"):
        print(f"failed: RELEASE_TAG: expected v{__version__}, got {tag}")
        return 1
    if why := installs.reachable():
        print(f"failed: the package index does not answer: {why}")
        return 1
    out = asked.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    files = build(out)
    line = installs.Line("release", ROLE, installs.ROLES[ROLE], constrained=True)
    packages = installs.resolve(line, installs.HOME, installs.PYTHONS[0])
    (out / "sbom.cdx.json").write_text(json.dumps(bill(packages, files), indent=1) + "\n")
    (out / "CHANGELOG.md").write_text(changelog())
    shutil.copy(ROOT / "constraints.txt", out)
    index(files, out / "simple")
    named = [path for path in sorted(out.iterdir()) if path.is_file()]
    (out / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in named))
    if asked.sign:
        named.append(sign(out / "SHA256SUMS", asked.sign))
    for path in named:
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.name}")
    if asked.trial:
        tried(out, asked.extra)
    print(UNPUBLISHED)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
