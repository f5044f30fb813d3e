"""What all tests share: interrupts and parts. Helpers are modules of `support`, imported as `support.models.tiny`."""

import re
import signal
import zlib

import pytest

# A shell has its background jobs ignore Ctrl-C, and the commands that tests run and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="every test is in one of N parts; those of the I-th, from 1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Parts are drawn by tests' parameters, not by files: tests of one model share its export, wherever they are."""
    part = config.getoption("--part")
    if part is None:
        return
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)
    if not found or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--part is {part}, expected I/N with I from 1 to N")
    number, count = map(int, found.groups())

    def drawn(item: pytest.Item) -> bool:
        parameters = getattr(item, "callspec", None)
        return zlib.crc32((parameters.id if parameters else item.nodeid).encode()) % count == number - 1

    kept = [item for item in items if drawn(item)]
    config.hook.pytest_deselected(items=[item for item in items if not drawn(item)])
    items[:] = kept
