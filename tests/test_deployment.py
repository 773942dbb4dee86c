"""Files of docker/: everything they name exists, in the program and in the checkout. No docker is needed."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from sinew_client.auth import ROLES, keys_in, role_and_key
from sinew_client.robot_report import RobotReport

from sinew.cli import build_app, settings
from sinew.cli.verbs import VERBS
from sinew.core import ActionChunk, BusyError, Timing
from sinew.serve import wires
from sinew.serve.fleet.cluster import app_name
from sinew.serve.fleet.config import parse
from sinew.serve.metrics import KeptRecords, Metrics
from sinew.serve.robots import Robots
from tests.serve.puppet import desk

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())


def assert_flag(variable: str) -> None:
    """The variable is a flag of a verb."""
    verb = next(verb for verb in VERBS if variable.startswith(f"SINEW_{verb.upper()}_"))
    assert not VERBS[verb].commands
    known = settings.flags(build_app()[verb].assemble_argument_collection())
    assert variable.removeprefix(f"SINEW_{verb.upper()}_").lower().replace("_", "-") in known


def exposed() -> str:
    """What Prometheus reads after one request of each kind."""
    metrics = Metrics(
        lambda: {"waiting": 0, "running": False},
        lambda: True,
        lambda: {"server": {"engine": "plan"}, "policy": {"name": "blocks"}},
    )
    metrics.request("http", ActionChunk(np.zeros((2, 3), np.float32), Timing()), 0.1, missed=False)
    metrics.request("http", BusyError("full"), 0.1, missed=True)
    metrics.connection("http", 1)
    robots = Robots()
    report = RobotReport(1, "holds", steps=9, held={"no chunk yet": 9})
    robots.put("native", "c", "", "", report.to_message().SerializeToString())
    metrics.add(robots)
    metrics.add(KeptRecords(lambda: {"recorder": {"written": 1, "dropped": 0, "failed": 2}}))
    return metrics.exposition().decode()


def test_every_metric_of_the_grafana_page_is_exported() -> None:
    board = json.loads((DOCKER / "grafana" / "sinew.json").read_text())
    text = exposed()
    samples = {line.split("{")[0].split(" ")[0]: line for line in text.splitlines() if line[:1] != "#"}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [variable["query"] for variable in board["templating"]["list"]]
    rules = yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"][0]["rules"]
    queries += [rule["expr"] for rule in rules]
    named = {name for query in queries for name in re.findall(r"\b(?:sinew|process)_\w+", query)}
    assert len(named) >= 12
    assert named <= samples.keys()
    for query in queries:  # labels by which is summed are there as well
        for labels, metric in re.findall(r"by \(([\w, ]+)\) \(?(?:(?:rate|increase)\()?(\w+)", query):
            for label in labels.split(", "):
                assert f'{label}="' in samples[metric], query
    assert 'engine="plan"' in samples["sinew_info"]
    assert 'policy="blocks"' in samples["sinew_info"]
    assert "_created" not in text
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_dockerfile_copies_what_is_there_and_installs_roles_that_exist() -> None:
    script = (DOCKER / "install.sh").read_text()
    (roles,) = re.findall(r"^    (client \|.*)\) \"\$python\"", script, re.MULTILINE)
    known = {*roles.split(" | "), "jetson"}
    targets = set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)) - {"source", "runtime"}
    assert targets == {"onnx", "cpu", "cuda", "jetson"}
    assert set(re.findall(r"install\.sh (\w+) /opt", DOCKERFILE)) == targets < known
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert list(ROOT.glob(source)), source
            assert f"!{source}" in ignored
    # A build leaves out what is not there, without a word: pages that the dashboard links to.
    carried = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert {Path(page).parent for page in carried["shared-data"]} == {Path("docs")}
    assert "COPY docs/*.md docs/" in DOCKERFILE
    for variable in set(re.findall(r"SINEW_\w+", DOCKERFILE)) - {"SINEW_VERB_FLAG"}:
        assert_flag(variable)


def test_the_image_asks_for_health_in_a_way_that_the_server_answers() -> None:
    """The line of the Dockerfile itself, at a server: it ends with 0 while that is healthy."""
    (text,) = re.findall(r"^HEALTHCHECK .*\\\n +(\[.*\])$", DOCKERFILE, re.MULTILINE)
    with desk(("web",)) as at:
        program, *words = json.loads(
            text.replace("http://127.0.0.1:8000", at.web.replace("ws://", "http://"))
        )
        assert program == "python"
        # Docker gives containers its own settings of proxies, from which no server answers here.
        behind = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        assert subprocess.run([sys.executable, *words], env=behind).returncode == 0
        at.service.supervisor.watch(lambda: "a fault of the test")
        assert subprocess.run([sys.executable, *words], stderr=subprocess.DEVNULL).returncode != 0


def test_images_have_extras_that_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    given = re.findall(r"^(?:ARG|RUN) EXTRAS=([\w,]+)", DOCKERFILE, re.MULTILINE)
    assert given
    assert {extra for each in given for extra in each.split(",")} <= known.keys()


def test_compose_names_files_and_flags_that_exist() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or source.startswith("${") or (DOCKER / source).exists(), (
                volume
            )
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), name  # nothing is open to others by default
    server = COMPOSE["services"]["sinew"]
    (models,) = [each.split("}")[0].partition(":-")[2] for each in server["volumes"] if each.startswith("${")]
    # Compose counts from the folder of its file; a reader puts policies where `docker run -v ./models` has them.
    assert (DOCKER / models).resolve() == ROOT / "models"
    for variable in server["environment"]:
        assert_flag(variable)
    assert server["build"]["dockerfile"] == "docker/Dockerfile"
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    mounted = [volume.split(":")[1] for volume in COMPOSE["services"]["prometheus"]["volumes"]]
    assert {f"/etc/prometheus/{name}" for name in prometheus["rule_files"]} < set(mounted)
    scrape = prometheus["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["sinew:8000"]
    source = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    board = json.loads((DOCKER / "grafana" / "sinew.json").read_text())
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {source["datasources"][0]["uid"]}


def served_with(variables: dict[str, str]) -> tuple[Any, dict[str, int | str]]:
    """Return the settings of `sinew serve` under these variables, and its ports by protocol."""
    for variable in variables:
        assert_flag(variable)
    words = [
        word
        for variable, value in variables.items()
        for part in (value.split() if variable == "SINEW_SERVE_WIRE" else [value])
        for word in (f"--{variable.removeprefix('SINEW_SERVE_').lower().replace('_', '-')}", part)
    ]
    _, found, _ = build_app().parse_args(["serve", "p.gguf", *words], exit_on_error=False, print_error=False)
    return found.arguments["on"], wires.parse(found.arguments["on"].wire)


def test_compose_with_key_and_tls_names_files_and_secrets_that_exist(tmp_path: Path) -> None:
    more = yaml.safe_load((DOCKER / "compose.tls.yaml").read_text())
    assert more["services"].keys() <= COMPOSE["services"].keys()
    secrets = {f"/run/secrets/{name}" for name in more["secrets"]}
    server, prometheus = more["services"]["sinew"], more["services"]["prometheus"]
    on, _ = served_with({**COMPOSE["services"]["sinew"]["environment"], **server["environment"]})
    own = {f"/run/secrets/{name}" for name in server["secrets"]}
    assert {str(each) for each in (on.api_key_file, on.tls_cert, on.tls_key)} == own <= secrets
    for volume in prometheus["volumes"]:
        source, target, *_ = volume.split(":")
        assert (DOCKER / source).exists() or source in COMPOSE["volumes"]
        assert target in {each.split(":")[1] for each in COMPOSE["services"]["prometheus"]["volumes"]}
    settings_of = yaml.safe_load((DOCKER / "prometheus-tls.yml").read_text())
    plain = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (scrape,) = settings_of["scrape_configs"]
    named = {scrape["authorization"]["credentials_file"], scrape["tls_config"]["ca_file"]}
    assert named == {f"/run/secrets/{name}" for name in prometheus["secrets"]} <= secrets
    assert (scrape["scheme"], scrape["authorization"]["type"]) == ("https", "Bearer")
    assert settings_of["rule_files"] == plain["rule_files"]
    assert {key: scrape[key] for key in plain["scrape_configs"][0]} == plain["scrape_configs"][0]
    # The page has the commands that make these files.
    page = (ROOT / "docs" / "deployment.md").read_text()
    for secret in more["secrets"].values():
        assert f"docker/{secret['file'].removeprefix('./')}" in page
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    subprocess.run(
        [sys.executable, "-c", f"compile({server['healthcheck']['test'][-1]!r}, 'h', 'exec')"], check=True
    )


def test_the_deployment_of_kubernetes_names_what_the_program_takes(tmp_path: Path) -> None:
    secret, deployment, service = yaml.safe_load_all((DOCKER / "kubernetes.yaml").read_text())
    (tmp_path / "keys").write_text(secret["stringData"]["keys"])
    assert {role_and_key(line)[0] for line in keys_in(tmp_path / "keys")} == set(ROLES)
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    on, ports = served_with({each["name"]: each["value"] for each in container["env"]})
    assert container["args"][0] == "serve"
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    assert volumes[mounts["/etc/sinew"]]["secret"]["secretName"] == secret["metadata"]["name"]
    for file in (on.api_key_file, on.tls_cert, on.tls_key):
        assert file.parent == Path("/etc/sinew")
        assert file.name in secret["stringData"]
    assert str(Path(container["args"][1]).parent) in mounts
    assert "/cache" in mounts  # Dockerfile: XDG_CACHE_HOME
    # Nothing but what encrypts, on the port of Service and probes.
    assert set(ports) == {"openpi", "http"}
    (port,) = container["ports"]
    assert set(ports.values()) == {port["containerPort"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/healthz", "port": port["name"], "scheme": "HTTPS"}
    (published,) = service["spec"]["ports"]
    assert published["targetPort"] == port["name"]
    assert (
        service["spec"]["selector"]
        == template["metadata"]["labels"]
        == deployment["spec"]["selector"]["matchLabels"]
    )
    assert f"USER {template['spec']['securityContext']['runAsUser']}" in DOCKERFILE
    with desk(("web",), api_key="secret") as at:  # a probe has no key
        address = at.web.replace("ws://", "http://")
        with urllib.request.urlopen(f"{address}/healthz", timeout=60) as reply:
            assert reply.status == 200


def test_the_example_of_a_file_is_taken() -> None:
    app = build_app(DOCKER / "sinew.toml")
    _, found, _ = app.parse_args(["serve", "policy.gguf"], exit_on_error=False, print_error=False)
    assert found.arguments["on"].deadline_ms == 200
    _, found, _ = app.parse_args(["run"], exit_on_error=False, print_error=False)
    assert found.arguments["by"].handover == "rtc"


def test_the_unit_starts_a_command_that_exists() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DOCKER / "sinew.service")
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "sinew"
    assert unit["Service"]["Restart"] == "always"  # a SIGHUP ended it for good
    _, found, _ = build_app().parse_args(words, exit_on_error=False, print_error=False)
    assert found.arguments["bundle"] == Path("/var/lib/sinew/policy.gguf")


def test_the_script_of_installations_reads() -> None:
    subprocess.run(["bash", "-n", DOCKER / "install.sh"], check=True)
    found = subprocess.run([DOCKER / "install.sh", "toaster", "nowhere"], capture_output=True, text=True)
    assert found.returncode == 2
    assert "toaster: expected client, onnx" in found.stderr


def test_the_manifest_of_kubernetes_names_what_the_program_takes() -> None:
    service, config, gateway = yaml.safe_load_all((DOCKER / "kuberay.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, function = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    args = dict(application["args"])
    assert application["name"] == app_name(args.pop("name"))
    replicas = parse({"policies": {"default": args}}).policies["default"]
    fleet = parse(yaml.safe_load(config["data"]["fleet.yaml"]))
    behind = fleet.policies["default"]
    assert (behind.ongoing, behind.replicas, behind.source) == (
        replicas.ongoing,
        replicas.replicas,
        replicas.source,
    )
    assert fleet.address == "auto"
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    (shell,) = container["args"]
    assert f"{service['metadata']['name']}-head-svc:6379" in shell
    words = shlex.split(shell.partition("exec sinew ")[2])
    _, found, _ = build_app().parse_args(words, exit_on_error=False, print_error=False)
    assert found.arguments["attach"] is True
    assert found.arguments["config"].name in config["data"]
    assert [each["containerPort"] for each in container["ports"]] == list(
        wires.parse(found.arguments["on"].wire).values()
    )
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (replicas.replicas.min, replicas.replicas.max)
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned["ray"]
