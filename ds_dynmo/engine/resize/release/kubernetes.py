"""A release policy for Kubernetes (paper, section 3.4.2).

The paper sends a PATCH of ``resources.requests`` and ``resources.limits``. Stock Kubernetes resizes CPU and memory of a
running pod, by the pod's ``resize`` subresource, and refuses that for accelerators. What works is one accelerator per
pod, and a pod that is deleted when its rank has left. Both are here; a pod is touched only if no rank of it is at work.

The official client is an optional extra; it is imported when the policy is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ds_dynmo.config import KubernetesConfig
from ds_dynmo.engine.resize.release.policy import POD, RankLocation, ReleaseRefused
from ds_dynmo.errors import ConfigError

_NAMELESS = (  # a pod's host name is another one in Indexed Jobs, and on hostNetwork
    f"the environment variable {POD} does not say which pod this is: set it in the pod's specification from the "
    "downward API, valueFrom: {fieldRef: {fieldPath: metadata.name}}"
)
SECRETS = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # a pod's credentials


def check_pod() -> None:
    """Refuse the policy where the client is missing, or the process does not know its pod.

    Raises:
        ConfigError: says what to install, or to set.
    """
    if find_spec("kubernetes") is None:
        raise ConfigError(
            'dynmo.repack.release = "kubernetes" needs the package kubernetes: install ds_dynmo[kubernetes]'
        )
    if not os.environ.get(POD):
        raise ConfigError(f'dynmo.repack.release = "kubernetes": {_NAMELESS}')


class Kubernetes:
    """Deletes the pods of released ranks, or resizes them. Released ranks' processes end.

    Args:
        timeout_seconds: of one request.
        secrets: the folder of the service account: token, ca.crt and namespace. The token is read anew each time, as
            it is renewed; it appears in no message.
    """

    def __init__(self, config: KubernetesConfig, timeout_seconds: float, secrets: Path = SECRETS) -> None:
        self._config, self._timeout_seconds, self._secrets = config, timeout_seconds, secrets
        self._done: set[str] = set()  # pods; those that were deleted are not known any more when they are named again

    def release(self, released: Sequence[RankLocation], staying: Sequence[RankLocation]) -> str:
        """Make one request per pod. A pod that the API server does not know is reported as such, and counts as done."""
        if nameless := [at.rank for at in released if at.pod is None]:
            raise ReleaseRefused(f"ranks {nameless}: {_NAMELESS}")
        left, needed = ({at.pod for at in locations if at.pod is not None} for locations in (released, staying))
        api, namespace = self._connect()
        act = self._delete if self._config.action == "delete_pod" else self._resize
        done: list[str] = []
        unknown: list[str] = []
        for pod in sorted(left - needed):
            found = self._ask(pod, lambda pod=pod: act(api, namespace, pod))  # type: ignore[misc]
            if found and not self._config.dry_run:
                self._done.add(pod)
            (done if found or pod in self._done else unknown).append(pod)
        tense = "would be" if self._config.dry_run else "were"
        what = "deleted" if self._config.action == "delete_pod" else "resized"
        clauses = {
            f"pods {done} of namespace {namespace} {tense} {what}": done,
            f"pods {unknown} are not in namespace {namespace}: somebody else deleted them, or {POD} or the namespace "
            "is another": unknown,
            f"pods {sorted(left & needed)} have ranks at work and stay": left & needed,
        }
        return "; ".join(clause for clause, pods in clauses.items() if pods)

    def _connect(self) -> tuple[Any, str]:
        from kubernetes import client
        from kubernetes.config import ConfigException
        from kubernetes.config.incluster_config import InClusterConfigLoader

        configuration = client.Configuration()
        loader = InClusterConfigLoader(
            token_filename=str(self._secrets / "token"), cert_filename=str(self._secrets / "ca.crt")
        )
        try:
            loader.load_and_set(configuration)
            namespace = self._config.namespace or (self._secrets / "namespace").read_text().strip()
        except (ConfigException, OSError) as error:
            raise ReleaseRefused(f"this process does not run in a pod of Kubernetes: {error}") from error
        return client.CoreV1Api(client.ApiClient(configuration)), namespace

    def _ask(self, pod: str, request: Callable[[], Any]) -> bool:
        """Carry out the request; False: the API server knows no such pod."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            request()
        except ApiException as error:
            if error.status == 404:
                return False
            raise ReleaseRefused(f"pod {pod}: {error.status} {_message(error)}") from error
        except (HTTPError, OSError) as error:
            raise ReleaseRefused(f"pod {pod}: the API server cannot be reached: {error}") from error
        return True

    def _delete(self, api: Any, namespace: str, pod: str) -> None:
        api.delete_namespaced_pod(pod, namespace, **self._options())

    def _resize(self, api: Any, namespace: str, pod: str) -> None:
        name = (
            self._config.container
            or api.read_namespaced_pod(pod, namespace, _request_timeout=self._timeout_seconds).spec.containers[0].name
        )
        resources: Mapping[str, str] = self._config.resources
        container = {"name": name, "resources": {"requests": dict(resources), "limits": dict(resources)}}
        body = {"spec": {"containers": [container]}}
        api.patch_namespaced_pod_resize(pod, namespace, body, **self._options())

    def _options(self) -> dict[str, Any]:
        dry_run = {"dry_run": "All"} if self._config.dry_run else {}
        return {"_request_timeout": self._timeout_seconds, **dry_run}


def _message(error: Any) -> str:
    """Read what the API server said; its answers are Status objects."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
