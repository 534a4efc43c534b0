"""Servers on the loopback for the tests of remote caches, and one in between that cuts connections."""

import contextlib
import functools
import http.server
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server; yields its address. Names of buckets are the caller's: one server may serve many."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def use_s3(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Let this process and those it starts look for S3 at ``endpoint``."""
    for name, value in {**AWS, "AWS_ENDPOINT_URL": endpoint}.items():
        patch.setenv(name, value)


def make_bucket(endpoint: str, name: str) -> None:
    bucket_system(endpoint).mkdir(name)


def bucket_system(endpoint: str):
    """An S3 file system of the test's own, to put things there and to spoil them."""
    import s3fs

    return s3fs.S3FileSystem(
        key="test",
        secret="test",
        endpoint_url=endpoint,
        skip_instance_cache=True,
        use_listings_cache=False,
    )


def upload(endpoint: str, folder: Path, where: str) -> None:
    """Copy a folder to ``bucket/prefix``, file by file: as other tools would."""
    fs = bucket_system(endpoint)
    for path in folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"{where}/{path.relative_to(folder).as_posix()}", path.read_bytes())


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[str]:
    """``python -m http.server`` on a folder; yields its address."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class Cutter:
    """Passes connections on to a server, and cuts the first ``cuts`` answers in half.

    Where an answer comes in several pieces it is cut behind the first half of a piece that is longer than
    ``least`` bytes: with a large one, headers pass and a body is torn.
    """

    def __init__(self, address: str, cuts: int, least: int = 0) -> None:
        parts = urlsplit(address)
        self._target = (str(parts.hostname), int(parts.port or 80))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self.cuts = cuts
        self.least = least
        self.made = 0
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Cutter":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(server, client, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, may_cut: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if may_cut and len(data) > self.least and self._cuts_now():
                    target.sendall(data[: len(data) // 2])
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _cuts_now(self) -> bool:
        with self._lock:
            if self.made >= self.cuts:
                return False
            self.made += 1
            return True


def spoil(path: Path, position: int) -> None:
    """Flip one bit of a file of a server."""
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << (position % 8)
    os.chmod(path, 0o644)
    path.write_bytes(data)
