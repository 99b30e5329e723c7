"""sshd on hosts of a test: with its own keys, port and files, which nothing outside the test uses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from guard import guarded_group
from tests.support.namespaces import Network

PORT = 2222
SSHD = """\
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
SSH = """\
Port {port}
IdentityFile {folder}/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
LISTENS = "Server listening on"
# In a mount namespace of the host's own: sshd asks for a folder that only an installed service has.
START = "mount -t tmpfs none /run && mkdir /run/sshd && exec {sshd} -D -e -f {folder}/sshd_config"


def programs() -> dict[str, str]:
    """Find the programs. Skip the test if one is missing."""
    found = {name: shutil.which(name, path="/usr/sbin:/usr/bin:/bin") for name in ("sshd", "ssh", "ssh-keygen", "pdsh")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: openssh-server, pdsh)")
    return {name: path for name, path in found.items() if path is not None}


@contextmanager
def sshd_on(hosts: Network, folder: Path) -> Iterator[Path]:
    """Run sshd on every host, and yield the folder of an ``ssh`` that reaches them without a question."""
    found = programs()
    (folder / "bin").mkdir(parents=True)
    for key in ("host_key", "key"):
        subprocess.run([found["ssh-keygen"], "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(SSHD.format(port=PORT, folder=folder))
    (folder / "ssh_config").write_text(SSH.format(port=PORT, folder=folder))
    ssh = folder / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {found["ssh"]} -F {folder}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    with ExitStack() as stack:
        for host in range(len(hosts.hosts)):
            start = START.format(sshd=found["sshd"], folder=folder)
            daemon = subprocess.Popen(
                hosts.on(host, ["sh", "-c", start]), stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            stack.enter_context(guarded_group(daemon))
            assert daemon.stderr is not None
            line = daemon.stderr.readline()
            assert line.startswith(LISTENS), line + daemon.stderr.read()
        yield ssh.parent
