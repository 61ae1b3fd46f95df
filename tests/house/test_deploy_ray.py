"""What deploy/ has for Ray against the program: arguments, sizes and times that fit. No Ray here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tomllib
from support.missing import need
from support.paths import ROOT

from mars_export import SessionError
from mars_export.runtime.serve.ray.fleet import Fleet, read_fleet

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
    [share], cluster = fleet().shares, service()["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["minReplicas"], workers["maxReplicas"]) == (share.least, share.most)
    spec = workers["template"]["spec"]
    [inside] = spec["containers"]
    for kind in ("requests", "limits"):
        assert inside["resources"][kind]["cpu"] == str(share.threads)
    assert spec["terminationGracePeriodSeconds"] > fleet().options.drain + LAST_WORDS
    assert [mount["mountPath"] for mount in inside["volumeMounts"]] == [share.path]
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


def test_the_loss_of_the_head_takes_no_front_with_it() -> None:
    """The head has no CPUs, a front needs some, a worker has them beside its replica's, requests go there."""
    [share], cluster = fleet().shares, service()["rayClusterConfig"]
    [workers] = cluster["workerGroupSpecs"]
    assert fleet().front_cpus > 0 and cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    left = int(workers["rayStartParams"]["num-cpus"]) - share.threads
    assert share.least * left >= fleet().fronts * fleet().front_cpus and left < share.threads
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


def test_what_holds_for_all_and_what_for_one() -> None:
    found = read_fleet(
        {
            "bundles": {
                "small": "a.bundle",
                "large": {"path": "b.bundle", "device": "cuda", "gpus": 0.5, "replicas": 1},
            },
            "replicas": "2:3", "threads": 4, "max_rows": 5, "queue_timeout": 7.0,
            "adaptive": ["exact", "fast@0.01"],
        }
    )  # fmt: skip
    small, large = found.shares
    assert (small.least, small.most, small.threads, small.gpus) == (2, 3, 4, 0.0)
    assert (large.least, large.most, large.device, large.gpus, large.path) == (1, 1, "cuda", 0.5, "b.bundle")
    assert (found.options.limits.max_rows, found.ongoing, found.options.queue_timeout) == (5, 7, 7.0)
    assert (found.most_threads, found.options.adaptive) == (16, ("exact", "fast@0.01"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bundles": None}, "at least one"),
        ({"bundles": {"a": 3}}, "must be a path"),
        ({"bundles": {"a/b": "x"}}, "must not have spaces"),
        ({"bundles": {"a": {"path": "x", "nonsense": 1}}}, "unknown 'nonsense'"),
        ({"nonsense": 1}, "unknown 'nonsense'"),
        ({"replicas": "3:2"}, "MIN:MAX"),
        ({"replicas": 0}, "MIN:MAX"),
        ({"replicas": True}, "MIN:MAX"),
        ({"threads": 0}, "threads must be"),
        ({"gpus": -1}, "gpus must be"),
        ({"fronts": 0}, "fronts must be"),
        ({"front_cpus": -0.5}, "front_cpus must be"),
        ({"front_cpus": True}, "front_cpus must be"),
        ({"gpus": float("nan")}, "gpus must be"),
        ({"bound": -1}, "bound must be"),
        ({"log_level": "loud"}, "log_level must be"),
        ({"log_format": "yaml"}, "log_format must be"),
        ({"max_rows": 0}, "max_rows must be"),
        ({"drain": -1}, "drain must be"),
        ({"keys": ["secret"]}, "unknown 'keys'"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SessionError, match=re.escape(words)):
        read_fleet({"bundles": {"a": "x"}, **changes})


def test_every_mistake_is_said_at_once() -> None:
    with pytest.raises(SessionError) as error:
        read_fleet({"bundles": {"a": 3}, "fronts": 0, "nonsense": 1, "max_rows": 0})
    assert all(word in str(error.value) for word in ("bundles.a", "fronts", "nonsense", "max_rows"))
