"""What the Python tests share. Run by ./dev test, or by hand:

    PYTHONPATH=build/release/python pytest tests/python

LADON_EXPECTED_OUTPUTS names the program expected_outputs of the C++ build, where there is one.
"""

import os
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def random():
    """Arrays of random numbers: random(shape, dtype)."""
    generator = np.random.default_rng(0)

    def make(*shape, dtype=np.float32):
        return generator.standard_normal(shape).astype(dtype)

    return make


@pytest.fixture(scope="session")
def expected_outputs():
    program = os.environ.get("LADON_EXPECTED_OUTPUTS")
    if not program:
        pytest.skip("LADON_EXPECTED_OUTPUTS does not name the C++ program")
    return program


def pytest_terminal_summary(terminalreporter):
    """One line for each reason to skip, as ./dev test collects them."""
    reasons = {report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())}
    for reason in sorted(reasons):
        terminalreporter.write_line(f"skipped: Python: {reason.removeprefix('Skipped: ')}")
