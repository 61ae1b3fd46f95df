"""What deploy/ has for Ray against the program: arguments, sizes and times that fit. No Ray here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tomllib
from support.missing import need
from support.paths import ROOT

from mars_export import SessionError
from mars_export.runtime.serve.ray.fleet import Fleet, read_fleet, read_replicas

need("yaml", "dev")

CONFIG = ROOT / "deploy" / "ray-serve.yaml"
SERVICE = ROOT / "deploy" / "kubernetes" / "rayservice.yaml"
LAST_WORDS = 10  # seconds that application.py adds to the drain


def read(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def service() -> Any:
    return read(SERVICE.read_text(encoding="utf-8"))["spec"]


def application() -> Any:
    (found,) = read(CONFIG.read_text(encoding="utf-8"))["applications"]
    return found


def fleet() -> Fleet:
    return read_fleet(application()["args"])


def test_both_have_one_configuration() -> None:
    assert read(service()["serveConfigV2"]) == read(CONFIG.read_text(encoding="utf-8"))


def test_the_import_path_leads_to_a_builder() -> None:
    module, _, name = application()["import_path"].partition(":")
    source = (ROOT / f"{module.partition('.')[2].replace('.', '/')}.py").read_text(encoding="utf-8")
    assert f"def {name}(args: Mapping[str, Any]) -> Application:" in source


def test_a_worker_holds_a_replica_and_outlives_its_drain() -> None:
    [path], cluster = fleet().bundles.values(), service()["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == read_replicas(fleet().replicas)
    assert workers["rayStartParams"]["num-cpus"] == str(fleet().threads)
    spec = workers["template"]["spec"]
    [inside] = spec["containers"]
    for kind in ("requests", "limits"):
        assert inside["resources"][kind]["cpu"] == str(fleet().threads)
    assert spec["terminationGracePeriodSeconds"] > fleet().options.drain_timeout + LAST_WORDS
    assert [mount["mountPath"] for mount in inside["volumeMounts"]] == [path]
    assert {volume["name"] for volume in spec["volumes"]} == {m["name"] for m in inside["volumeMounts"]}
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    port = read(service()["serveConfigV2"])["http_options"]["port"]
    for template in (head["template"], workers["template"]):
        [one] = template["spec"]["containers"]
        assert port in [p["containerPort"] for p in one["ports"]]
        assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in one["env"]
        assert template["spec"]["securityContext"]["runAsUser"] == 10001
    assert cluster["authOptions"] == {"mode": "token"}
    assert service()["excludeHeadPodFromServeSvc"] is True


def test_the_state_of_the_head_in_redis_is_a_comment_away() -> None:
    text, lines = SERVICE.read_text(encoding="utf-8"), re.compile(r"^    # (?=gcsFault|  )", re.MULTILINE)
    assert "gcsFaultToleranceOptions" not in service()["rayClusterConfig"]
    cluster = read(lines.sub("    ", text))["spec"]["rayClusterConfig"]
    options = cluster.pop("gcsFaultToleranceOptions")
    assert cluster == service()["rayClusterConfig"], "nothing else changes"
    assert set(options) == {"redisAddress", "redisPassword"} and options["redisAddress"].startswith(
        "redis://"
    )
    secret = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    made = re.search(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", text)
    assert made is not None and secret == {"name": made[1], "key": made[2]}


def test_the_cluster_has_a_ray_that_the_extra_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [floor] = [
        m[1] for r in project["optional-dependencies"]["ray"] if (m := re.match(r"ray\[serve\]>=(.*)", r))
    ]
    have = service()["rayClusterConfig"]["rayVersion"]
    assert [int(n) for n in have.split(".")] >= [int(n) for n in floor.split(".")]


def test_pods_of_the_cluster_fit_the_schema_of_kubernetes() -> None:
    need("kubernetes_validate", "dev")
    import kubernetes_validate

    cluster = service()["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)


# --- arguments ---


def test_arguments_of_each_part() -> None:
    found = read_fleet(
        {
            "bundles": {"small": "a.bundle", "large": "b.bundle"}, "replicas": "2:3", "threads": 4,
            "gpus": 0.5, "device": "cuda", "max_rows": 5, "queue_timeout": 7.0,
            "adaptive": ["exact", "fast@0.01"],
        }
    )  # fmt: skip
    assert (read_replicas(found.replicas), found.threads, found.gpus) == ((2, 3), 4, 0.5)
    assert (found.bundles["large"], found.session) == ("b.bundle", {"device": "cuda"})
    assert (found.options.limits.max_rows, found.options.queue_timeout) == (5, 7.0)
    assert found.options.adaptive == ("exact", "fast@0.01")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundles": {}}, "with at least one"),
        ({"bundles": {"a": 3}}, "names to paths"),
        ({"nonsense": 1, "more": 1}, "unknown 'nonsense', 'more'"),
        ({"replicas": "3:2"}, "MIN:MAX"),
        ({"replicas": 0}, "MIN:MAX"),
        ({"replicas": True, "threads": 0}, "1 or more, not True; threads must be"),
        ({"gpus": -1}, "gpus must be"),
        ({"gpus": float("nan")}, "gpus must be"),
        ({"log_level": "loud"}, "log_level must be"),
        ({"log_format": "yaml"}, "log_format must be"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"drain_timeout": -1}, "drain_timeout must be"),
        ({"keys": ["secret"]}, "unknown 'keys'"),
    ],
)
def test_wrong_arguments_are_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SessionError, match=re.escape(words)):
        read_fleet({"bundles": {"a": "x"}, **changes})
