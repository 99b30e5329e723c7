"""A Kubernetes API server with what releases need: HTTPS on the loopback interface.

It checks bodies against the official client's models, which are made from the official OpenAPI schema, and refuses
in-place changes of accelerators.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

TOKEN = "a-token-of-the-service-account"
NAMESPACE = "training"


class Server:
    """Holds pods by name. ``requests`` are those that came in; the next ``broken`` ones are answered with 503."""

    def __init__(self, folder: Path, pods: list[str]) -> None:
        self.pods: dict[str, dict[str, Any]] = {name: pod(name) for name in pods}
        self.requests: list[tuple[str, str, Any]] = []
        self.broken = 0
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        certificate, key = self.secrets / "ca.crt", folder / "key.pem"
        make = ["openssl", "req", "-x509", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
        make += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]  # made at once, unlike RSA's
        files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*make, *files], check=True, capture_output=True)
        (self.secrets / "token").write_text(TOKEN)
        (self.secrets / "namespace").write_text(NAMESPACE)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that Kubernetes sets in every container."""
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.http.server_address[1])}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        parts = path.strip("/").split("/")
        if parts[:4] != ["api", "v1", "namespaces", NAMESPACE] or parts[4:5] != ["pods"] or len(parts) not in (6, 7):
            return status(404, f"the server could not find the requested resource {path}")
        if self.broken > 0:
            self.broken -= 1
            return status(503, "the server is currently unable to handle the request")
        name, sub = parts[5], parts[6] if len(parts) == 7 else ""
        dry_run = query.get("dryRun", []) == ["All"]
        if name not in self.pods:
            return status(404, f'pods "{name}" not found')
        if (method, sub) == ("GET", ""):
            return 200, self.pods[name]
        if (method, sub) == ("DELETE", ""):
            return self.delete(name, body, dry_run)
        if (method, sub) == ("PATCH", "resize"):
            return self.resize(name, body, dry_run)
        return status(405, f"{method} is not supported on {path}")

    def delete(self, name: str, body: Any, dry_run: bool) -> tuple[int, Any]:
        from kubernetes.client import V1DeleteOptions

        V1DeleteOptions.from_dict(body or {})
        deleted = self.pods[name] if dry_run else self.pods.pop(name)
        return 200, deleted

    def resize(self, name: str, body: Any, dry_run: bool) -> tuple[int, Any]:
        """Apply a strategic merge patch, which knows containers by their names."""
        from kubernetes.client import V1Pod

        if set(body) != {"spec"} or set(body["spec"]) != {"containers"}:
            return status(422, "only containers' resources may be patched by the subresource resize")
        V1Pod.from_dict({**body, "spec": {"containers": body["spec"]["containers"]}})
        patched = json.loads(json.dumps(self.pods[name]))
        for change in body["spec"]["containers"]:
            found = [c for c in patched["spec"]["containers"] if c["name"] == change["name"]]
            if not found:
                return status(422, f'spec.containers[0].name: Not found: "{change["name"]}"')
            for kind, amounts in change["resources"].items():
                if set(amounts) - {"cpu", "memory"}:
                    return status(422, "spec: Forbidden: only cpu and memory resources are mutable")
                found[0]["resources"][kind].update(amounts)
        if not dry_run:
            self.pods[name] = patched
        return 200, patched


def pod(name: str) -> dict[str, Any]:
    amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}
    container = {"name": "trainer", "image": "trainer", "resources": {"requests": {**amounts}, "limits": {**amounts}}}
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def status(code: int, message: str) -> tuple[int, Any]:
    return code, {"apiVersion": "v1", "kind": "Status", "status": "Failure", "message": message, "code": code}


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def serve(self) -> None:
            url = urlparse(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            server.requests.append((self.command, self.path, body))
            scheme, _, token = self.headers.get("Authorization", "").partition(" ")
            if (scheme.lower(), token) != ("bearer", TOKEN):
                code, answer = status(401, "Unauthorized")
            elif self.command == "PATCH" and self.headers["Content-Type"] != "application/strategic-merge-patch+json":
                code, answer = status(
                    415, f"the body of the request was in an unknown format: {self.headers['Content-Type']}"
                )
            else:
                code, answer = server.answer(self.command, url.path, parse_qs(url.query), body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_DELETE = do_PATCH = serve

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
