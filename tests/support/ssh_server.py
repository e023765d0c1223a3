"""A real OpenSSH server on the loopback address, with keys and a configuration of its own."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from pathlib import Path

HOST = "test-board"
START_WITHIN_S = 20.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SshServer:
    """An sshd that accepts one key, and a `bin` folder with an `ssh` that knows it as `test-board`.

    OpenSSH reads the configuration of the account's home folder, whatever HOME says. So the `ssh` in `bin` is a
    script that names another configuration and runs the real client.
    """

    def __init__(self, folder: Path) -> None:
        sshd, client = shutil.which("sshd") or "/usr/sbin/sshd", shutil.which("ssh")
        if client is None or not Path(sshd).exists():
            raise AssertionError("tests of boards need OpenSSH; as root: apt-get install openssh-server")
        self.folder, self.port, self.bin = folder, free_port(), folder / "bin"
        for name in ("host_key", "user_key", "other_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "authorized_keys").write_bytes((folder / "user_key.pub").read_bytes())
        host_key = (folder / "host_key.pub").read_text(encoding="ascii").rsplit(" ", 1)[0]
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {host_key}\n", encoding="ascii")
        (folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {self.port}\nHostKey {folder}/host_key\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nAcceptEnv EDGE_OPT_*\n",
            encoding="ascii",
        )
        self.use_key("user_key")
        self.bin.mkdir()
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {client} -F {folder}/ssh_config "$@"\n', encoding="ascii")
        (self.bin / "ssh").chmod(0o755)
        if not Path("/run/sshd").exists():
            Path("/run/sshd").mkdir(mode=0o755)  # sshd keeps its unprivileged process there
        self._log = (folder / "sshd.log").open("wb")
        self.process = subprocess.Popen([sshd, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=self._log)
        self._wait()

    def use_key(self, name: str) -> None:
        """Let the client show this key from now on."""
        (self.folder / "ssh_config").write_text(
            f"Host {HOST}\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {self.folder}/{name}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.folder}/known_hosts\n  StrictHostKeyChecking yes\n",
            encoding="ascii",
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "sshd.log").read_text(encoding="utf-8")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("sshd did not start in time")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()
