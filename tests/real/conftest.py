"""Tests with real vocabularies and templates: `make test-real` fetches them. At its end it prints what was compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

FOUND: list[str] = []


@pytest.fixture
def found() -> Callable[[str], None]:
    """found(line): a line that is printed at the end."""
    return FOUND.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in FOUND:
        terminalreporter.write_line(line)
