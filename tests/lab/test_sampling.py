"""Picking a token is a function of the logits, the settings and the index alone."""

import subprocess
import sys

import numpy as np
import pytest

from pdtransfer.serve.sampling import chain, draw, tokens_digest
from pdtransfer.wire import Sampling

LOGITS = np.log(np.array([0.05, 0.4, 0.25, 0.3], np.float32))


def drawn(count=4000, **sampling):
    picks = [draw(LOGITS, Sampling(max_tokens=1, **sampling), index) for index in range(count)]
    return np.bincount(picks, minlength=4) / count


def test_temperature_zero_takes_the_first_highest():
    assert draw(np.array([1, 3, 3, 2], np.float32), Sampling(max_tokens=1, seed=9), 5) == 1


def test_draws_follow_the_softmax():
    assert np.allclose(drawn(temperature=1.0), [0.05, 0.4, 0.25, 0.3], atol=0.03)


def test_temperature_flattens_and_sharpens():
    assert np.allclose(drawn(temperature=100.0), 0.25, atol=0.03)
    assert drawn(temperature=0.01)[1] == 1.0
    assert drawn(temperature=1e-300)[1] == 1.0


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.39, [1]), (0.5, [1, 3]), (0.69, [1, 3]), (0.72, [1, 2, 3]), (1.0, [0, 1, 2, 3])]
)
def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p(top_p, kept):
    assert list(np.flatnonzero(drawn(temperature=1.0, top_p=top_p))) == kept


def test_equal_seed_and_index_draw_the_same_and_others_do_not():
    def sequence(seed):
        return [draw(LOGITS, Sampling(max_tokens=1, temperature=2.0, seed=seed), index) for index in range(64)]

    assert sequence(5) == sequence(5)
    assert sequence(5) != sequence(6)
    assert len(set(sequence(5))) > 1
    assert sequence(2**64 - 1) != sequence(5)


def test_the_chain_of_digests_knows_every_row_and_their_order():
    rows = [np.full(4, value, np.float32) for value in (1.0, 2.0)]
    forward, backward = chain(chain(b"", rows[0]), rows[1]), chain(chain(b"", rows[1]), rows[0])
    assert len({forward, backward, chain(b"", rows[0]), chain(b"", rows[1])}) == 4
    assert tokens_digest([1, 2]) != tokens_digest([2, 1])


def test_the_tokeniser_and_the_contract_import_no_torch():
    code = "import sys, pdtransfer.serve.engine_api, pdtransfer_lab.models.tokens; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
