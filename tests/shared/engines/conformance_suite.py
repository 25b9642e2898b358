"""The engine protocol: what every engine keeps, the one without a model included.

The tests of `test_conformance` and its like, which import them and give `make_engine`, a fixture
that makes an engine of `VOCAB_SIZE` tokens that serves version 0 by default.
"""

from conformance_requests import *  # noqa: F403
from conformance_states import *  # noqa: F403
from conformance_weights import *  # noqa: F403
