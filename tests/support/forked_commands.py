"""Commands of edge-opt in processes forked from one that has torch loaded: real processes that start in 0.1 s, not 2.

`python -S forked_commands.py SOCKET WORDS...` passes its words, folder, environment and streams on to the server, and
ends with the exit code of the command. If the first word is a script, that is run. What depends on how Python starts
needs a process of its own.
"""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def started(folder: Path, *start: str) -> Iterator[str]:
    """Yield what a shell runs for `edge-opt`, and end the server after that.

    `start` are arguments of Python that run `serve` with the address that follows them.
    """
    import shlex
    import subprocess

    address = str(folder / "socket")
    words = [sys.executable, *(start or (__file__, "serve")), address]
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield shlex.join([sys.executable, "-S", __file__, address])
    server.stdin.close()
    server.wait()
    server.stdout.close()


def _ask(address: str, words: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        streams = array.array("i", [0, 1, 2])
        server.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        request = [words, os.getcwd(), dict(os.environ)]  # noqa: PTH109, pathlib takes as long as all else
        server.sendall(json.dumps(request).encode() + b"\n")
        # Only the command may hold them: a reader of its output waits for the last to close it.
        for stream in streams:
            os.close(stream)
        return int(server.recv(8) or b"70")


def serve(address: str) -> None:
    """Run commands until standard input ends."""
    import edge_opt
    import edge_opt.cli.profile_commands

    edge_opt.profile  # noqa: B018, loads torch
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        # The tests that started the server hold the other end of its input.
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                _answer(connection)
            connection.close()


def _answer(connection: socket.socket) -> NoReturn:
    """Run one command in a process of its own, tell its exit code, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, rights, *_ = connection.recvmsg(1, socket.CMSG_SPACE(12))
    streams = array.array("i", rights[0][2])
    words, folder, environment = json.loads(connection.makefile().readline())
    command = os.fork()
    if not command:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(words, folder, environment)
    for stream in streams:
        os.close(stream)
    connection.sendall(str(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])).encode())
    os._exit(0)


def _run(words: list[str], folder: str, environment: dict[str, str]) -> NoReturn:
    import runpy

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    is_script = words[0].endswith(".py")
    sys.argv = words if is_script else ["edge-opt", *words]
    sys.path[0] = os.path.dirname(words[0]) if is_script else folder  # noqa: PTH120
    sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")  # noqa: SIM115
    code: object = 0
    try:
        if is_script:
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module("edge_opt.cli", run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(_ask(sys.argv[1], sys.argv[2:]))
