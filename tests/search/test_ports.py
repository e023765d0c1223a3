"""Nobody comes in: no port of a sweep answers a process that has no certificate."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import knocking
from edge_opt.errors import InvalidInput
from edge_opt.search.build import Event, PhaseStarted
from edge_opt.search.certificates import main as make_files
from edge_opt.search.certificates import make_certificates, security_from
from edge_opt.search.space import Space
from edge_opt.search.sweep import run_sweep
from edge_opt.search.workers import Cluster
from sweep_jobs import Arithmetic

pytestmark = pytest.mark.usefixtures("own_machine")
SPACE = Space((0.0, 0.2, 0.4), ("fp32",), ("torch",))


def listening() -> dict[int, str]:
    """Ports at which this process and those it has started take connections, each with its address."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = {}
    for process in family:
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.NoSuchProcess:
            continue
        found |= {each.laddr.port: each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return found


@pytest.mark.slow
def test_no_port_of_a_sweep_answers_without_its_certificate(tmp_path: Path) -> None:
    before = set(listening())
    answers: dict[int, tuple[str, bytes, bytes]] = {}
    modes: dict[str, int] = {}

    def knock() -> None:
        addresses = {port: address for port, address in listening().items() if port not in before}
        command = [sys.executable, "-I", knocking.__file__, *map(str, addresses)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env={}).stdout
        for port, (plain, encrypted) in json.loads(said).items():
            answers[int(port)] = (addresses[int(port)], bytes.fromhex(plain), bytes.fromhex(encrypted))

    def listen(event: Event) -> None:
        if isinstance(event, PhaseStarted) and event.phase == "build" and event.candidate.pruning and not answers:
            for path in (tmp_path / "out" / "tls", *(tmp_path / "out" / "tls").iterdir()):
                modes[path.name] = stat.S_IMODE(path.stat().st_mode)
            knock()

    run_sweep(Arithmetic(tmp_path / "log"), SPACE, folder=tmp_path / "out", workers=2, on_event=listen)
    # The scheduler, two workers, and for each worker the one that starts it anew.
    assert len(answers) == 5
    for address, plain, encrypted in answers.values():
        assert address == "127.0.0.1"
        assert plain.removeprefix(b"\x15")[:2] in (b"", b"\x03\x03", b"\x03\x01"), plain  # at most an alert of TLS
        assert encrypted == b""
    assert modes == {"tls": 0o700, "ca.pem": 0o600, "cert.pem": 0o600, "key.pem": 0o600}
    # They are made for one run.
    assert not (tmp_path / "out" / "tls").exists()


def test_another_certificate_is_not_this_one(tmp_path: Path) -> None:
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ours / "ca.pem"))
    server.load_cert_chain(ours / "cert.pem", ours / "key.pem")
    server.verify_mode = ssl.CERT_REQUIRED

    def admitted(folder: Path) -> bool:
        client = ssl.create_default_context(cafile=str(ours / "ca.pem"))
        client.check_hostname = False
        client.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        one = client.wrap_bio(incoming, outgoing)
        other = server.wrap_bio(outgoing, incoming, server_side=True)
        try:
            for _ in range(4):
                for side in (one, other):
                    try:
                        side.do_handshake()
                    except ssl.SSLWantReadError:
                        continue
        except ssl.SSLError:
            return False
        return True

    assert admitted(ours)
    assert not admitted(theirs)


def test_a_scheduler_elsewhere_is_spoken_to_with_tls_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"tcp://192\.0\.2\.1:8786 is another machine.*--insecure"):
        Cluster(0, "tcp://192.0.2.1:8786", tmp_path)
    with pytest.raises(InvalidInput, match="--tls-dir"):
        Cluster(0, "tls://192.0.2.1:8786", tmp_path)
    with pytest.raises(InvalidInput, match="write tls://HOST:PORT"):
        Cluster(0, "192.0.2.1:8786", tmp_path)
    assert Cluster(0, "tcp://192.0.2.1:8786", tmp_path, insecure=True).security() is None
    assert Cluster(0, "tcp://127.0.0.1:8786", tmp_path).security() is None


def test_certificates_that_lack_or_that_others_can_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no ca\.pem; `python -m edge_opt\.search\.certificates"):
        security_from(tmp_path)
    made = make_certificates(tmp_path / "tls")
    assert security_from(made).require_encryption
    (made / "key.pem").chmod(0o644)
    with pytest.raises(InvalidInput, match="can be read by others"):
        security_from(made)


def test_the_command_makes_certificates_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_files([str(tmp_path / "tls")]) == 0
    assert make_files([str(tmp_path / "tls")]) == 2
    assert "is there already" in capsys.readouterr().err
