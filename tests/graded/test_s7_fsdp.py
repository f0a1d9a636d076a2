"""Section 7: FSDP, 15 points."""

import pytest

from cs336_systems.grading.grade import checks_of


@pytest.mark.parametrize("check", checks_of("fsdp"), ids=lambda check: check.name)
def test_fsdp(check, passes):
    passes(check)
