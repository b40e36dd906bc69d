"""The draft vocabulary: the most frequent labels, by count and id, with the ends of a text."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.data.token_streams import most_frequent
from specjax.errors import UserError

pytestmark = pytest.mark.fast
COUNTS = np.array([0, 5, 2, 2, 9, 0, 2])


def test_most_frequent_by_count_and_id():
    assert most_frequent(COUNTS, 4, 10).tolist() == [1, 2, 3, 4]
    assert most_frequent(COUNTS, 3, 10, always=(8,)).tolist() == [1, 4, 8]
    # Tokens that do not occur fill the rest from id 0 on.
    result = most_frequent(COUNTS, 8, 10, always=(9,))
    assert result.tolist() == [0, 1, 2, 3, 4, 5, 6, 9] and result.dtype == np.int32
    assert most_frequent(COUNTS, 10, 10).tolist() == list(range(10))


def test_sizes_that_do_not_fit():
    for size, always in ((11, ()), (0, ()), (1, (0, 3))):
        with pytest.raises(UserError, match=f"draft_vocab is {size}; it must be at least"):
            most_frequent(COUNTS, size, 10, always)
