"""Bytes behind a URL, through fsspec: a connection for each process, retries with backoff and jitter."""

import datetime
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from megafold.cache_store.errors import RemoteError

T = TypeVar("T")

_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "http": "http",
    "https": "http",
}
#: No second attempt changes these. (FileNotFoundError is an answer, and passed on.)
_FINAL: Final = (PermissionError, NotImplementedError, ImportError, TypeError, ValueError, AttributeError)
#: Whose exceptions, next to those of the system, mean that a request failed. Any other (an alarm's, say, in
#: whose handler the caller raises) is not this module's.
_LIBRARIES: Final = frozenset(
    "adlfs aiobotocore aiohttp asyncio azure botocore concurrent fsspec gcsfs google http requests s3fs "
    "urllib3".split()
)
#: Names of errors that say what is missing here, before any server is asked.
_UNSET: Final = frozenset(
    "ConfigNotFound ConfigParseError DefaultCredentialsError InvalidRegionError NoAuthTokenError "
    "NoCredentialsError NoRegionError PartialCredentialsError ProfileNotFound SSOTokenLoadError "
    "UnauthorizedSSOTokenError".split()
)
_FINAL_STATUS: Final = frozenset(range(400, 500)) - {408, 425, 429}


_S3_CREDENTIALS: Final = (
    "; run `aws configure`, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket set "
    """FSSPEC_S3='{"anon": true}'."""
)
#: What to do for want of credentials, by protocol.
_CREDENTIALS: Final = {
    "s3": _S3_CREDENTIALS,
    "s3a": _S3_CREDENTIALS,
    "gs": "; run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS.",
}


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is tried, and how long to wait in between.

    Before attempt n + 1 the wait is a random time up to ``base_s`` · 2ⁿ⁻¹, at most ``cap_s`` seconds. The
    defaults outlast an outage of about a quarter of a minute on average, twice that at most.
    """

    attempts: int = 8
    base_s: float = 0.25
    cap_s: float = 20.0

    def wait_s(self, failed: int) -> float:
        """Seconds to wait after ``failed`` attempts; each call draws anew."""
        # The system's generator: a training run's own random numbers stay as they are.
        return random.SystemRandom().uniform(0.0, min(self.cap_s, self.base_s * 2.0 ** (failed - 1)))


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL: name relative to the cache, bytes and age in seconds where the server says."""

    name: str
    size: int | None
    age_s: float | None


class Transport:
    """Reads and writes files below a URL.

    Pickles without its connection; each process makes its own at the first use, so that it survives fork
    and spawn.

    Raises (every method):
        RemoteError: the protocol's package is missing, access is refused, or all attempts failed.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, retries: RetryPolicy | None = None
    ) -> None:
        """``options``: for the protocol's file system, over those of fsspec's configuration."""
        self._url = url.rstrip("/")
        self.url = re.sub(r"://[^/@]*@", "://", self._url)  # in messages: without a password
        self.retries = retries or RetryPolicy()
        self.retried = 0
        self._options = dict(options or {})
        self._connected: tuple[int, Any, str] | None = None
        if "?" in url or "#" in url:
            raise RemoteError(f"{self.url}: the URL of a cache is a folder's, without ? and #")
        if not url.partition("://")[2].strip("/"):
            raise RemoteError(f"{url} names no folder: give s3://bucket/folder or file:///folder")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None, "retried": 0}

    @property
    def protocol(self) -> str:
        """``s3``, ``https``, …"""
        return self._url.split("://")[0].lower()

    def place(self, name: str) -> str:
        """The URL of a file, for messages."""
        return f"{self.url}/{name}"

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        return bytes(self._retried(name, "read", lambda fs, root: fs.cat_file(f"{root}/{name}")))

    def write(self, name: str, data: bytes) -> None:
        """Create or replace a file."""

        def write(fs: Any, root: str) -> None:
            if "file" in _protocols(fs):
                fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
            fs.pipe_file(f"{root}/{name}", data)

        self._retried(name, "written", write)

    def info(self, name: str) -> RemoteFile:
        """A file's size and age. Raises FileNotFoundError."""
        return _file(name, self._retried(name, "found", lambda fs, root: fs.info(f"{root}/{name}")))

    def files(self, folder: str) -> list[RemoteFile]:
        """The files below a folder, sorted by name; none where there is no such folder."""

        def find(fs: Any, root: str) -> list[RemoteFile]:
            start = f"{root}/"
            found = fs.find(f"{root}/{folder}", detail=True)
            return sorted(
                (_file(path[len(start) :], info) for path, info in found.items() if path.startswith(start)),
                key=lambda file: file.name,
            )

        try:
            return self._retried(folder, "listed", find)
        except FileNotFoundError:
            return []

    def names(self) -> list[str]:
        """Names directly below the URL, sorted; none where nothing is there, or the server lists nothing."""

        def listed(fs: Any, root: str) -> list[str]:
            paths = (str(path).rstrip("/") for path in fs.ls(root, detail=False))
            return sorted(path.rpartition("/")[2] for path in paths)

        try:
            return self._retried("", "listed", listed)
        except FileNotFoundError:
            return []

    def _retried(self, name: str, done: str, operation: Callable[[Any, str], T]) -> T:
        attempts = max(1, self.retries.attempts)
        for failed in range(1, attempts + 1):
            try:
                return operation(*self._connection())
            except (FileNotFoundError, RemoteError):
                raise
            except Exception as error:
                if not isinstance(error, (OSError, *_FINAL)) and _library(error) not in _LIBRARIES:
                    raise
                if type(error).__name__ in _UNSET:
                    advice = _CREDENTIALS.get(self.protocol, "")
                    raise RemoteError(
                        f"{self.place(name)} cannot be {done}: {_told(error).rstrip('.')}{advice}"
                    ) from error
                if isinstance(error, _FINAL) or getattr(error, "status", 0) in _FINAL_STATUS:
                    raise RemoteError(
                        f"{self.place(name)} cannot be {done}: {_told(error)}. Check the URL and the rights."
                    ) from error
                if failed == attempts:
                    raise RemoteError(
                        f"{self.place(name)} cannot be {done}, {attempts} attempts failed, the last with "
                        f"{_told(error)}. Check the connection and the server, and run again."
                    ) from error
                self.retried += 1
                time.sleep(self.retries.wait_s(failed))
        raise AssertionError("the last attempt returns or raises")

    def _connection(self) -> tuple[Any, str]:
        """The file system of this process, and the URL's root in it."""
        if self._connected is None or self._connected[0] != os.getpid():
            self._connected = (os.getpid(), *_connect(self._url, self.protocol, self._options, self.url))
        return self._connected[1:]


def _connect(url: str, protocol: str, options: Mapping[str, Any], shown: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.config import conf

    try:
        # An own instance without a memory of listings: another's settings would come with a shared one, and
        # refs move.
        defaults = _defaults(protocol) | dict(conf.get(protocol, {}))
        fixed = {"skip_instance_cache": True, "use_listings_cache": False}
        fs, root = fsspec.core.url_to_fs(url, **defaults, **{**options, **fixed})
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        advice = f"pip install 'megafold[{extra}]'" if extra else "install the package that it names"
        raise RemoteError(f"{shown}: reading {protocol}:// needs a package ({error}): {advice}") from error
    except ValueError as error:
        raise RemoteError(f"{shown}: {error}. Give s3://, gs://, https:// or file://") from error
    if {"s3", "gs"} & _protocols(fs):
        fs.retries = 1  # this module retries, with a limit over everything
    return fs, str(root).rstrip("/")


def _defaults(protocol: str) -> dict[str, Any]:
    """Settings without which a silent server holds a reader up for minutes, and a file takes two trips."""
    if protocol in ("s3", "s3a"):
        retries = {"total_max_attempts": 1, "mode": "standard"}
        config = {"retries": retries, "connect_timeout": 15, "read_timeout": 60}
        # With more at once, s3fs asks for a file's length before it asks for the file: two trips, not one.
        return {"config_kwargs": config, "max_concurrency": 1}
    if protocol in ("http", "https"):
        try:
            from aiohttp import ClientTimeout
        except ImportError:  # fsspec says so itself
            return {}
        return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=15, sock_read=60)}}
    return {}


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def _file(name: str, info: Mapping[str, Any]) -> RemoteFile:
    names = ("LastModified", "mtime", "updated", "created")
    stamp: Any = next((info[key] for key in names if info.get(key)), None)
    if isinstance(stamp, datetime.datetime):
        stamp = stamp.timestamp()
    age = time.time() - stamp if isinstance(stamp, int | float) else None
    return RemoteFile(name, info.get("size"), age)


def _library(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
