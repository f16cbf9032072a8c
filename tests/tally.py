"""What a run took and tried: seconds and property cases by file, and the budget of the whole run."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

_CASES = "property cases"


class Tally:
    """A table at the end of a run of several files.

    A property case is an example of a hypothesis property that ranks have computed, on threads or processes.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._since = time.monotonic()
        self._config = config
        self._seconds: Counter[str] = Counter()
        self._cases: Counter[str] = Counter()
        self._tried = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is None or not {"ranks", "threads"} & set(getattr(item, "fixturenames", ())):
            return (yield)
        before, inner = self._tried, handle.inner_test
        handle.inner_test = self._counted(inner)
        try:
            return (yield)
        finally:
            handle.inner_test = inner
            item.user_properties.append((_CASES, self._tried - before))

    def _counted(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(inner)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            self._tried += 1
            return result

        return counted

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        if report.when == "call":
            self._cases[file] += dict(report.user_properties).get(_CASES, 0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and self._is_controller and self._minutes > self._budget[1]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._seconds) > 1:
            terminalreporter.section("seconds and property cases by file")
            for file, seconds in self._seconds.most_common():
                terminalreporter.write_line(f"{seconds:8.1f} {self._cases[file] or '':>6} {file}")
            terminalreporter.write_line(f"{self._seconds.total():8.1f} {self._cases.total():6} in all")
        warn, fail = self._budget
        if self._minutes > warn:
            what = f"and may take {fail:.0f}: this run fails" if self._minutes > fail else f"it fails beyond {fail:.0f}"
            terminalreporter.write_line(
                f"The run took {self._minutes:.1f} minutes, of {warn:.0f} that it should take; {what}.", yellow=True
            )

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._since) / 60

    @property
    def _budget(self) -> tuple[float, float]:
        """Minutes to be told at and to fail at: where a machine is for this run alone, not a developer's."""
        if not os.environ.get("CI"):
            return float("inf"), float("inf")
        warn, fail = map(float, self._config.getini("budget_minutes").split())
        return warn, fail

    @property
    def _is_controller(self) -> bool:
        return not hasattr(self._config, "workerinput")  # which a process of pytest-xdist has
