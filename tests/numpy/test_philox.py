from __future__ import annotations

import itertools

import numpy as np
import pytest

from cupyflash._numpy.philox import keep_mask, philox_4x32
from tests.reference import dropout_keep


# Known-answer vectors published with Random123.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    assert tuple(int(word) for word in philox_4x32(counter, key)) == expected


def test_counters_broadcast():
    rows, cols = np.arange(3)[:, None], np.arange(4)[None, :]
    words = philox_4x32((cols, rows, 5, 6), (7, 8))
    assert all(word.shape == (3, 4) for word in words)
    single = philox_4x32((2, 1, 5, 6), (7, 8))
    assert [int(word[1, 2]) for word in words] == [int(word) for word in single]


@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1, np.array([2**63 + 1], np.uint64)])
def test_keep_mask_is_one_decision_an_element(seed):
    got = keep_mask(seed, 1, 2, np.arange(5, 38), np.arange(11, 70), 0.3)
    expected = dropout_keep(int(np.asarray(seed).item()), 0.3, (1, 3, 38, 70), first_batch=1)
    np.testing.assert_array_equal(got, expected[0, 2, 5:, 11:])


def test_smaller_p_keeps_a_superset():
    masks = [keep_mask(3, 0, 0, np.arange(64), np.arange(64), p) for p in (0, 0.1, 0.5, 1 - 1e-12)]
    assert masks[0].all()
    assert not masks[3].any()  # the threshold is 2**32
    assert all((small >= large).all() for small, large in itertools.pairwise(masks))
    assert abs(masks[2].mean() - 0.5) < 0.05
