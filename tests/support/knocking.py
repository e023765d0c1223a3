"""A process of its own, with no certificate, that knocks at ports and prints what each of them answers, in hex."""

from __future__ import annotations

import json
import socket
import ssl
import sys


def answer_in_plain(port: int) -> bytes:
    """What a port sends to somebody who speaks HTTP, and then whatever comes to mind."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
        stream.settimeout(0.5)
        try:
            stream.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64))
            return stream.recv(1000)
        except OSError:
            return b""


def answer_without_certificate(port: int) -> bytes:
    """What a port sends to somebody who speaks TLS and shows nothing."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stream:
        stream.settimeout(0.5)
        try:
            # With TLS 1.3 the refusal comes after the handshake, in place of the first answer.
            with context.wrap_socket(stream) as wrapped:
                return wrapped.recv(1000)
        except OSError:
            return b""


if __name__ == "__main__":
    found = {
        port: (answer_in_plain(int(port)).hex(), answer_without_certificate(int(port)).hex()) for port in sys.argv[1:]
    }
    print(json.dumps(found))
