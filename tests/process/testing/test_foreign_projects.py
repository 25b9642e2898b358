"""The plugin in a project of somebody else, who has umbra installed and may not use it."""

from __future__ import annotations

import re

import pytest

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.process, pytest.mark.slow]

SECTION = re.compile(r"fixtures defined from umbra\S+ -+\n((?:.|\n)*?)(?:\n-{9}|\n={9})")
FIXTURE = re.compile(r"^(\w+)(?: \[\w+ scope\])? -- ", re.MULTILINE)
STRICT = "[pytest]\naddopts = --strict-markers --strict-config\n"

TESTS = """
import pytest

KEPT = []

def test_plain(request):
    assert request.fixturenames == ["request"]
    KEPT.append(open(__file__))  # nobody checks

def test_session(umbra_session):
    assert umbra_session.world_size == 1

@pytest.mark.umbra_allow_leaks("known while the check is off, too")
def test_marked():
    pass
"""


def test_a_project_that_does_not_use_the_plugin_is_not_changed(pytester: pytest.Pytester) -> None:
    pytester.makeini(STRICT)
    pytester.makepyfile(TESTS)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "ignore")

    result.assert_outcomes(passed=3)


def test_all_names_of_the_plugin_have_its_prefix(pytester: pytest.Pytester) -> None:
    pytester.makeini(STRICT)

    listed = pytester.runpytest_subprocess("--fixtures").stdout.str()
    helped = pytester.runpytest_subprocess("--help").stdout.str()
    marked = pytester.runpytest_subprocess("--markers").stdout.str()

    (section,) = SECTION.findall(listed)
    names = FIXTURE.findall(section)
    assert len(names) == 5
    assert [name for name in names if not name.startswith("umbra_")] == []
    assert "no_leaks" not in listed
    for text in (helped, marked):
        assert re.findall(r"(?<!umbra_)(?:check_leaks|allow_leaks|leak_grace_s)", text) == []
