"""The guard of unit tests bites, and only where it should."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guard import TESTS, Guard, guard_of, guarded, taken_clocks

pytest_plugins = "pytester"


@pytest.mark.parametrize(
    "reach",
    [
        lambda: socket.socket(),
        lambda: socket.getaddrinfo("localhost", 80),
        lambda: subprocess.Popen(["true"]),
        lambda: os.system("true"),
        lambda: os.fork(),
        lambda: time.time(),
        lambda: time.monotonic(),
        lambda: time.perf_counter_ns(),
        lambda: time.sleep(0),
    ],
    ids=["socket", "name", "process", "shell", "fork", "time", "monotonic", "perf_counter", "sleep"],
)
def test_a_pure_test_reaches_nothing(reach: Callable[[], object]) -> None:
    with guarded(Guard.PURE), pytest.raises(pytest.fail.Exception):
        reach()


def test_code_that_swallows_exceptions_does_not_swallow_the_guard() -> None:
    def swallows() -> float:
        try:
            return time.monotonic()
        except Exception:
            return 0.0

    with guarded(Guard.PURE), pytest.raises(pytest.fail.Exception, match=r"time\.monotonic called at .*test_guard\.py"):
        swallows()


def test_tools_look_at_clocks_in_pure_tests() -> None:
    with guarded(Guard.PURE, ours=("/elsewhere",)):
        assert time.monotonic() > 0


def test_threads_that_earlier_tests_left_are_not_touched() -> None:
    found: list[float] = []
    begin = threading.Event()
    left = threading.Thread(target=lambda: (begin.wait(), found.append(time.monotonic())))
    left.start()
    with guarded(Guard.PURE):
        begin.set()
        left.join()
    assert found


def test_a_test_without_a_marker_stays_on_this_machine() -> None:
    with guarded(Guard.LOCAL), pytest.raises(pytest.fail.Exception), socket.socket() as outward:
        outward.connect(("192.0.2.1", 9))
    with guarded(Guard.LOCAL), pytest.raises(pytest.fail.Exception):
        socket.getaddrinfo("prism.example", 80)


def test_loopback_and_unix_sockets_are_free(tmp_path: Path) -> None:
    with guarded(Guard.LOCAL), socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.connect(server.getsockname())
    with guarded(Guard.LOCAL), socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(tmp_path / "s"))
        server.listen()
        client.connect(str(tmp_path / "s"))


def test_clocks_imported_by_name_are_found() -> None:
    assert taken_clocks({"now": time.time, "sys": sys, "time": time}) == ["now"]


@pytest.mark.parametrize("package", ["core", "policy", "scheduler"])
def test_pure_packages_are_guarded_whatever_their_markers(package: str) -> None:
    assert guard_of(TESTS / package / "test_a.py", {"slow"}) is Guard.PURE


def test_markers_open_the_way() -> None:
    assert guard_of(TESTS / "wire" / "test_a.py", {"parametrize"}) is Guard.LOCAL
    assert guard_of(TESTS / "store" / "test_a.py", {"redis"}) is Guard.OFF


def test_this_suite_is_guarded(pytester: pytest.Pytester) -> None:
    """The fixture of all tests, in a run of its own."""
    pytester.makepyfile(
        **{
            "policy/test_clock": "import time\ndef test_reaches(): time.time()\ndef test_does_not(): pass\n",
            "wire/test_far": "import socket\ndef test_reaches(): socket.create_connection(('192.0.2.1', 9), 0.1)\n",
        }
    )
    source = (TESTS / "conftest.py").read_text()
    here = "guard_of(request.node.path, "
    assert here in source
    pytester.makeconftest(
        source.replace("guarded(guard)", f"guarded(guard, ({str(pytester.path)!r},))").replace(
            "iter_markers()}", f"iter_markers()}}, __import__('pathlib').Path({str(pytester.path)!r})"
        )
    )
    result = pytester.runpytest_subprocess("-q", "-p", "no:cacheprovider", f"--rootdir={pytester.path}")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*time.time called at*policy/test_clock.py*", "*192.0.2.1*stays on this machine*"])
