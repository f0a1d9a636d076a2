"""Section 6: the sharded optimizer, 15 points."""

import pytest

from cs336_systems.grading.grade import checks_of


@pytest.mark.parametrize("check", checks_of("optimizer_state_sharding"), ids=lambda check: check.name)
def test_optimizer_state_sharding(check, passes):
    passes(check)
