"""A shell that plays no part: no width, no reader, no space, no right to write, no home, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from edge_opt.cli.shell import run_to_the_end

SLOW = "import time\n\ndef net():\n    open('begun', 'w').close()\n    time.sleep(60)\n"


def environment(**changes: str | None) -> dict[str, str]:
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def shell(line: str, folder: Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    command = line.replace("edge-opt", f"'{sys.executable}' -m edge_opt.cli")
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=folder, env=environment(**changes), capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip


def one_sentence(text: str) -> bool:
    lines = text.strip().splitlines()
    return len(lines) == 1 and "Traceback" not in text


@pytest.mark.parametrize("columns", ["0", "-3", "wide", "1"])
def test_a_width_that_is_none_is_not_taken(columns: str, tmp_path: Path) -> None:
    done = shell("edge-opt devices", tmp_path, COLUMNS=columns)
    assert done.returncode == 0, done.stderr
    assert "raspberry" in done.stdout and "Traceback" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    # One that prints line by line, and one that prints a single text; by the time they do, the reader is gone.
    for command in ("devices", "devices --json"):
        done = shell(f"edge-opt {command} | true", tmp_path)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        assert done.returncode == 141, done.stderr


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    done = shell("edge-opt devices raspberry-pi-4 > /dev/full", tmp_path)
    assert done.returncode == 2
    assert one_sentence(done.stderr) and "No space left on device" in done.stderr


def test_a_folder_that_takes_no_file_is_one_sentence(tmp_path: Path) -> None:
    done = shell("edge-opt init /proc/none/run.yaml", tmp_path)
    assert done.returncode == 2
    assert one_sentence(done.stderr) and "/proc/none" in done.stderr


def test_there_need_be_no_home(tmp_path: Path) -> None:
    done = shell("edge-opt devices", tmp_path, HOME=None, XDG_CONFIG_HOME=None, XDG_CACHE_HOME=None)
    assert done.returncode == 0, done.stderr
    done = shell("edge-opt devices", tmp_path, HOME="/proc/none", XDG_CONFIG_HOME=None)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "edge_opt.cli", "profile", "slow.py:net", "-i", "1x2"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert told.strip().splitlines()[-1] == "interrupted; files that were finished are whole"
    assert "Traceback" not in told


def test_an_interrupt_that_a_package_took_for_itself_ends_in_the_same_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def importing() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # as torch does where numpy is interrupted while it is imported
            raise ImportError("cannot load module more than once per process") from None

    with pytest.raises(SystemExit) as ended:
        run_to_the_end(importing)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted; files that were finished are whole\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
