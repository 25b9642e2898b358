from __future__ import annotations

import pytest

from umbra.runtime.cluster.environment import api_key
from umbra.runtime.errors import ConfigError


def test_a_key_is_given_or_from_the_environment() -> None:
    assert api_key(None, {"UMBRA_API_KEY": "sk-1"}) == "sk-1"
    assert api_key("sk-2", {"UMBRA_API_KEY": "sk-1"}) == "sk-2"
    assert api_key(None, {}) == ""


@pytest.mark.parametrize("key", [" sk", "sk\n", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="UMBRA_API_KEY: a key has printable ASCII"):
        api_key(None, {"UMBRA_API_KEY": key})
