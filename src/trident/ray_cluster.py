"""A connection to a Ray cluster. Ray is only imported when a command asks for a cluster."""

import contextlib
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

from trident.errors import TridentError

AUTO = "auto"
_INSTALL = "--cluster needs Ray: pip install 'trident-fewshot[cluster]'"
_START = "start one with 'ray start --head', or give --cluster auto"
_CONNECT_SECONDS, _ANSWER_SECONDS = 3, 15


def check_cluster(address: str) -> None:
    """Check within seconds that Ray is installed and that a cluster answers; Ray itself would wait for minutes."""
    _imported()
    address = _given(address)
    if address == AUTO:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in host:
        raise TridentError(f"--cluster {address}: it must be auto, or HOST:PORT of the cluster's head node")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise TridentError(f"no Ray cluster answers at {address} ({error.strerror or error}): {_START}") from error
    # Something listens there. Ray's own command tells whether it is Ray.
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TridentError(f"what answers at {address} is not a Ray cluster: {_START}") from error
    if answer.returncode:
        raise TridentError(f"the Ray cluster at {address} is not healthy, or is of another version: {_START}")


@contextmanager
def connected(address: str, say: Callable[[str], None]) -> Iterator[ModuleType]:
    """Yields the module `ray`, connected to a cluster. With auto and no running cluster, one is started here.

    Call `check_cluster` first. What Ray prints is kept away: it would mix with a table on standard output.
    """
    ray = _imported()
    if ray.is_initialized():  # by the program that uses this library
        yield ray
        return
    with _quiet():
        if not _connect(ray, _given(address)):
            say("cluster: no Ray cluster is running, so one was started on this machine alone")
        before = _alive(ray)
        try:
            with _stopped_by_sigterm():
                yield ray
            lost = len(before - _alive(ray))
            if lost:
                say(f"cluster: {lost} of {len(before)} nodes were lost on the way; others did their work")
        finally:
            ray.shutdown()


def short_message(error: BaseException) -> str:
    """The message of an error of Ray in one line: the last line of a traceback, or else the beginning."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if any("ray::" in line for line in lines) else " ".join(lines))[:300]


def _imported() -> ModuleType:
    try:
        importlib.import_module("ray.data")
        return importlib.import_module("ray")
    except ImportError as error:
        raise TridentError(f"{_INSTALL} ({error})") from error


def _given(address: str) -> str:
    """`auto` also means the cluster that Ray's own variable names."""
    return os.environ.get("RAY_ADDRESS", AUTO) if address == AUTO else address


def _connect(ray: ModuleType, address: str) -> bool:
    """Whether there was a cluster to connect to."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address, **quiet)
        return True
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        if address != AUTO or not isinstance(error, ConnectionError):
            raise TridentError(f"cannot connect to the Ray cluster at {address}: {short_message(error)}") from error
    try:
        ray.init(address="local", include_dashboard=False, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise TridentError(f"cannot start Ray on this machine: {short_message(error)}") from error
    return False


def _alive(ray: ModuleType) -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """A request to terminate stops the work like Ctrl-C. Ray's own handler prints a page of its own addresses."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread, where signals do not arrive
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray's messages about itself from both outputs. Its log files have them all."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere), _stderr_for_python_alone(nowhere):
        yield


@contextmanager
def _stderr_for_python_alone(nowhere: IO[str]) -> Iterator[None]:
    """Ray's compiled part writes to standard error as well, past Python. Only `sys.stderr` still leads there."""
    try:
        usual = sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):  # replaced by something that is no file
        usual = False
    if not usual:
        yield
        return
    sys.stderr.flush()
    with os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace") as ours, contextlib.redirect_stderr(ours):
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            ours.flush()
            os.dup2(ours.fileno(), 2)
