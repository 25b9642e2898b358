"""Addresses and API keys."""

from __future__ import annotations

import pytest

from umbra.runtime.cluster.environment import api_key, host_address
from umbra.runtime.errors import ConfigError
from umbra.runtime.rpc.loop_socket import endpoint_at, is_ipv6, split_endpoint


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [("10.0.0.1", "tcp://10.0.0.1:7000"), ("fd00::1", "tcp://[fd00::1]:7000")],
)
def test_an_endpoint_has_its_address_back(host: str, endpoint: str) -> None:
    assert endpoint_at(host, 7000) == endpoint
    assert split_endpoint(endpoint) == (host, "7000")
    assert split_endpoint(endpoint.removeprefix("tcp://")) == (host, "7000")
    assert is_ipv6(endpoint) == (":" in host)


def test_no_endpoint_has_no_address() -> None:
    assert split_endpoint("") == ("", "")


def test_the_address_of_a_host_may_be_in_brackets() -> None:
    assert host_address({"UMBRA_HOST_ADDRESS": "[fd00::1]"}) == "fd00::1"


def test_a_key_is_given_or_from_the_environment() -> None:
    assert api_key(None, {"UMBRA_API_KEY": "sk-1"}) == "sk-1"
    assert api_key("sk-2", {"UMBRA_API_KEY": "sk-1"}) == "sk-2"
    assert api_key(None, {}) == ""


@pytest.mark.parametrize("key", [" sk", "sk\n", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="UMBRA_API_KEY: a key has printable ASCII"):
        api_key(None, {"UMBRA_API_KEY": key})
