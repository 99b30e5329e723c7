"""Release policies: one conformance test for all, and tests of each."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from ds_dynmo.config import RepackConfig, parse_section, read_dynmo_config
from ds_dynmo.engine.resize.release import RankLocation, ReleasePolicy, ReleaseRefused, check_policy, policy_for
from ds_dynmo.engine.resize.release.runner import PolicyRunner
from ds_dynmo.engine.resize.world import World
from ds_dynmo.errors import ConfigError
from ds_dynmo.launch import OF_MEETING, OF_RANK, set_rank_variables
from tests.support.kubernetes_server import TOKEN, Server
from tests.support.pages import code_blocks

GONE = [RankLocation(1, "host-a", "cuda:1"), RankLocation(2, "host-b", "cuda:0")]
STAYING = [RankLocation(0, "host-a", "cuda:0")]
PODS_GONE = [replace(at, pod=at.host.replace("host", "pod")) for at in GONE]
PODS_STAYING = [replace(at, pod="pod-a") for at in STAYING]
RECORDER = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("kubernetes")
    if shutil.which("openssl") is None:
        pytest.skip("needs the command openssl, to make a certificate")
    started = Server(tmp_path, ["pod-a", "pod-b", "pod-c"])
    for name, value in started.environment.items():
        monkeypatch.setenv(name, value)
    yield started
    started.close()


def policy_of(config: RepackConfig, secrets: Path = Path("/nowhere")) -> ReleasePolicy:
    found = policy_for(config, secrets)
    assert found is not None
    return found


def policy(section: dict[str, Any], secrets: Path = Path("/nowhere")) -> ReleasePolicy:
    return policy_of(parse_section(RepackConfig, section, "repack"), secrets)


def kubernetes(server: Server, **settings: Any) -> ReleasePolicy:
    return policy({"release": "kubernetes", "kubernetes": {"dry_run": False, **settings}}, server.secrets)


def test_every_policy_may_be_called_again(server: Server, tmp_path: Path) -> None:
    """With the same or more ranks."""
    command = policy({"release": "command", "command": [sys.executable, "-c", RECORDER, str(tmp_path / "told")]})
    for asked in (command, kubernetes(server)):
        asked.release(PODS_GONE[:1], [*PODS_STAYING, PODS_GONE[1]])
        asked.release(PODS_GONE, PODS_STAYING)
        assert isinstance(asked.release(PODS_GONE, PODS_STAYING), str)


def test_without_a_resource_manager_there_is_no_policy() -> None:
    for section in ({}, {"release": "checkpoint", "checkpoint": "folder"}):
        assert policy_for(parse_section(RepackConfig, section, "repack")) is None


def test_a_command_gets_the_released_ranks(tmp_path: Path) -> None:
    program = [sys.executable, "-c", RECORDER, str(tmp_path / "told")]
    policy({"release": "command", "command": program}).release(GONE, STAYING)
    told = json.loads((tmp_path / "told").read_text())
    assert told["released"] == [
        {"rank": 1, "host": "host-a", "device": "cuda:1"},
        {"rank": 2, "host": "host-b", "device": "cuda:0"},
    ]
    assert told["staying"] == [{"rank": 0, "host": "host-a", "device": "cuda:0"}]


@pytest.mark.parametrize(
    ("command", "seconds", "says"),
    [
        ([sys.executable, "-c", "import sys; sys.exit('quota exceeded')"], 60.0, "exit code 1: quota exceeded"),
        ([sys.executable, "-c", "while True: pass"], 0.5, "timed out after 0.5 seconds"),
        (["/no/such/program"], 60.0, "/no/such/program"),
    ],
)
def test_a_command_that_fails_is_a_refusal(command: list[str], seconds: float, says: str) -> None:
    section = {"release": "command", "command": command, "release_timeout_seconds": seconds}
    with pytest.raises(ReleaseRefused, match=says):
        policy(section).release(GONE, STAYING)


def test_the_printed_program_takes_nodes_out_of_a_job_of_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on which ranks work stay."""
    (tmp_path / "release.sh").write_text(code_blocks("elastic.md", "command", "bash")[0])
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.chdir(tmp_path)
    section = read_dynmo_config(json.loads(code_blocks("elastic.md", "command", "json")[1]))
    assert section is not None
    policy_of(section.repack).release(GONE, [*STAYING, RankLocation(3, "host-c", "cuda:0")])
    assert (tmp_path / "told").read_text() == "update JobId=12 NodeList=host-a,host-c\n"


WRONG: list[tuple[dict[str, object], str]] = [
    ({"release": "command"}, 'release "command" needs command'),
    ({"release": "checkpoint"}, 'release "checkpoint" needs checkpoint'),
    ({"checkpoint": "folder"}, "no other release takes one"),
    ({"command": ["x"]}, "no other release takes one"),
    ({"release": "command", "command": []}, "a list of one string or more"),
    ({"release": "command", "command": "rm -r x"}, "a list of one string or more"),
    ({"release": "kubernete"}, "repack.release"),
    ({"kubernetes": {"action": "resize"}}, 'action "resize" needs resources'),
    ({"kubernetes": {"resources": {"cpu": "1"}}}, "no other action takes them"),
    ({"kubernetes": {"token": "secret"}}, "kubernetes.token"),
    ({"max_slowdown": 1.0}, "repack.max_slowdown"),
    ({"min_stages": 0}, "repack.min_stages"),
]


def test_wrong_sections_are_refused() -> None:
    for section, says in WRONG:
        with pytest.raises(ConfigError, match=says):
            pytest.fail(f"{section}: {parse_section(RepackConfig, section, 'repack')}")


class Noting:
    """A policy that notes its calls, and refuses the first ``refusals``."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.calls: list[list[int]] = []

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        self.calls.append([at.rank for at in released])
        if len(self.calls) <= self.refusals:
            raise ReleaseRefused("not now")
        return "done"


def deliver(noting: Noting, *releases: Sequence[RankLocation], **options: Any) -> tuple[list[str], list[float]]:
    """Release ranks one after the other; return what was said, and the pauses."""
    said: list[str] = []
    pauses: list[float] = []
    usual: dict[str, Any] = {"have_exited": lambda _: True, "patience_seconds": 2.0, "delay_seconds": 0.0}
    runner = PolicyRunner(noting, said.append, said.append, pause=pauses.append, **{**usual, **options})
    for released in releases:
        runner.release(released, STAYING)
    runner.finish()
    return said, pauses


def test_a_policy_is_called_after_the_processes_ended_if_they_do() -> None:
    noting, looks = Noting(), []

    def ended(locations: Sequence[RankLocation]) -> bool:
        assert not noting.calls
        looks.append([at.rank for at in locations])
        return len(looks) == 3

    said, pauses = deliver(noting, GONE, have_exited=ended, delay_seconds=7.0)
    assert looks == [[1, 2]] * 3 and pauses == [0.5, 0.5, 7.0] and noting.calls == [[1, 2]]
    assert said == ["DynMo: ranks [1, 2]: done"]
    said, pauses = deliver(noting, GONE, have_exited=lambda _: False)
    assert pauses == [0.5] * 4 and len(noting.calls) == 1
    assert "ranks [1, 2] were released, but not all of their processes have ended within 2 s" in said[0]


def test_released_processes_announce_their_exit() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    comm: Any = SimpleNamespace(broadcast_object=lambda it: it, gather_on_first=lambda it: [it], device="cpu")
    try:
        world = World(comm, PipeDataParallelTopology(num_pp=1, num_dp=1), timeout_seconds=5.0)
        (location,) = world.locations
        assert not world.have_exited([location])
        world.announce_exit()
        assert world.have_exited([location]) and not world.have_exited([location, replace(location, rank=1)])
    finally:
        torch.distributed.destroy_process_group()


def test_a_refusal_is_reported_and_the_next_release_comes_after_it() -> None:
    noting = Noting(refusals=1)
    said, _ = deliver(noting, GONE[:1], GONE)
    assert noting.calls == [[1], [1, 2]]
    assert said == [
        "DynMo: ranks [1] are idle but were not given back: not now. The next release names them",
        "DynMo: ranks [1, 2]: done",
    ]


# -- Kubernetes ---------------------------------------------------------------------------------------


def test_a_released_ranks_pod_is_deleted_if_the_configuration_says_so_and_no_others_share_it(server: Server) -> None:
    text = policy({"release": "kubernetes"}, server.secrets).release(PODS_GONE, PODS_STAYING)
    assert set(server.pods) == {"pod-a", "pod-b", "pod-c"}
    assert server.requests[0][1].endswith("/pods/pod-b?dryRun=All") and "would be deleted" in text
    text = kubernetes(server).release(PODS_GONE, PODS_STAYING)
    assert set(server.pods) == {"pod-a", "pod-c"}
    assert text == "pods ['pod-b'] of namespace training were deleted; pods ['pod-a'] have ranks at work and stay"


def test_cpu_and_memory_are_resized_by_the_subresource(server: Server) -> None:
    resources = {"cpu": "100m", "memory": "256Mi"}
    kubernetes(server, action="resize", resources=resources).release(PODS_GONE[1:], PODS_STAYING)
    found = server.pods["pod-b"]["spec"]["containers"][0]["resources"]
    assert found["requests"] == found["limits"] == {**resources, "nvidia.com/gpu": "1"}
    assert [(method, path.split("?")[0].rsplit("/", 1)[1]) for method, path, _ in server.requests] == [
        ("GET", "pod-b"),
        ("PATCH", "resize"),
    ]


def refusal(asked: ReleasePolicy) -> str:
    with pytest.raises(ReleaseRefused) as refused:
        asked.release(PODS_GONE, PODS_STAYING)
    return str(refused.value)


def test_what_the_server_refuses_and_a_server_that_is_not_there_are_refusals(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock Kubernetes refuses to take accelerators from a running pod, as the paper does by a PATCH."""
    taken = kubernetes(server, action="resize", resources={"nvidia.com/gpu": "0"}, container="trainer")
    assert "pod pod-b: 422 spec: Forbidden: only cpu and memory" in refusal(taken)
    server.broken = 1
    assert "pod pod-b: 503 the server is currently unable to handle the request" in refusal(kubernetes(server))
    (server.secrets / "token").write_text("another-token")
    message = refusal(kubernetes(server))
    assert "401 Unauthorized" in message and TOKEN not in message and "another-token" not in message
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    assert "pod pod-b: the API server cannot be reached" in refusal(kubernetes(server))
    outside = policy({"release": "kubernetes"}, tmp_path / "no secrets")
    assert "does not run in a pod of Kubernetes" in refusal(outside)


def test_a_missing_pod_is_not_reported_as_deleted(server: Server) -> None:
    """After a 404 the pod may live on under another name, unless it was deleted by the same policy before."""
    asked = kubernetes(server)
    asked.release(PODS_GONE, PODS_STAYING)
    elsewhere = RankLocation(3, "host-c", "cuda:0", "pod-of-another-name")
    assert asked.release([PODS_GONE[1], elsewhere], []) == (
        "pods ['pod-b'] of namespace training were deleted; pods ['pod-of-another-name'] are not in namespace "
        "training: somebody else deleted them, or POD_NAME or the namespace is another"
    )
    assert kubernetes(server).release([PODS_GONE[1]], []).startswith("pods ['pod-b'] are not in namespace training")


def test_the_pod_is_named_by_the_downward_api_and_not_by_the_host(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_NAME", "pod-c")
    config = parse_section(RepackConfig, {"release": "kubernetes"}, "repack")
    check_policy(config)
    here = RankLocation.here(1, "cpu")
    assert here.pod == here.as_record()["pod"] == "pod-c" != here.host
    kubernetes(server).release([here], [])
    assert set(server.pods) == {"pod-a", "pod-b"}
    monkeypatch.delenv("POD_NAME")
    assert RankLocation.here(1, "cpu").pod is None
    with pytest.raises(ConfigError, match=r"POD_NAME .*fieldPath: metadata\.name"):
        check_policy(config)
    with pytest.raises(ReleaseRefused, match=r"ranks \[1, 2\]: the environment variable POD_NAME"):
        kubernetes(server).release(GONE, [])


def printed() -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the objects that docs/elastic.md prints, by kind, and the rules of the Role for each action."""
    yaml = pytest.importorskip("yaml")
    objects, other_rules = code_blocks("elastic.md", "kubernetes", "yaml")
    by_kind = {each["kind"]: each for each in yaml.safe_load_all(objects)}
    return by_kind, [by_kind["Role"]["rules"], yaml.safe_load(other_rules)["rules"]]


def test_the_printed_objects_of_kubernetes_fit_together(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes import client

    objects, _ = printed()
    as_sent = client.ApiClient(client.Configuration()).sanitize_for_serialization
    for kind, each in objects.items():  # no unknown key, no wrong type
        assert as_sent(getattr(client, f"V1{kind}").from_dict(each)) == each
        assert each["metadata"]["namespace"] == "training"
    account, role, binding, service, pod = (
        objects[kind] for kind in ("ServiceAccount", "Role", "RoleBinding", "Service", "Pod")
    )
    assert binding["roleRef"]["name"] == role["metadata"]["name"] and binding["roleRef"]["kind"] == "Role"
    assert binding["subjects"] == [{"kind": "ServiceAccount", **account["metadata"]}]
    assert pod["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    environment = {each["name"]: each for each in container["env"]}
    for name in (*OF_RANK, *OF_MEETING):
        monkeypatch.setenv(name, environment[name]["value"])
    assert set_rank_variables()
    host = f"{pod['spec']['hostname']}.{pod['spec']['subdomain']}"
    assert environment["MASTER_ADDR"]["value"] == host and pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert environment["POD_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize("action", [0, 1], ids=["delete_pod", "resize"])
def test_the_printed_role_allows_what_the_printed_configuration_asks_for(action: int, server: Server) -> None:
    """Nothing more, nothing less."""
    objects, rules = printed()
    name = objects["Pod"]["metadata"]["name"]
    server.pods[name] = objects["Pod"]
    section = read_dynmo_config(json.loads(code_blocks("elastic.md", "kubernetes", "json")[action]))
    assert section is not None and section.repack.enabled
    policy_of(section.repack, server.secrets).release([RankLocation(0, "host", "cuda:0", name)], [])
    assert (name in server.pods) == (section.repack.kubernetes.action == "resize")
    verbs = {"GET": "get", "DELETE": "delete", "PATCH": "patch"}
    asked = set()
    for method, path, _ in server.requests:
        resource, _, *subresource = path.split("?")[0].split("/")[5:]  # after /api/v1/namespaces/NAME
        asked.add((verbs[method], "/".join([resource, *subresource])))
    allowed = {(verb, kind) for rule in rules[action] for verb in rule["verbs"] for kind in rule["resources"]}
    assert asked == allowed and all(rule["apiGroups"] == [""] for rule in rules[action])
