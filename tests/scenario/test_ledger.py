"""The request ledger: columns that grow, gaps across updates, and whether the queue grows."""

import numpy as np
import pytest

from kvasir_core.verdict import QueueFacts
from kvasir_scenario.ledger import RequestLedger


def test_request_ids_may_start_anywhere_and_have_holes() -> None:
    ledger = RequestLedger(0)
    ledger.offer(np.array([1_000_007, 1_000_002]), np.array([4, 3]), np.array([1, 1]))
    ledger.offer(np.array([1_000_000, 1_000_009]), np.array([9, 9]), np.array([2, 2]))
    assert (ledger.offered + ledger.base).tolist() == [1_000_000, 1_000_002, 1_000_007, 1_000_009]
    assert ledger.arrival[ledger.offered].tolist() == [9, 3, 4, 9]
    with pytest.raises(ValueError, match="too far apart"):
        ledger.offer(np.array([1 << 40]), np.array([1]), np.array([1]))
    with pytest.raises(AssertionError, match="offered twice"):
        ledger.offer(np.array([1_000_002]), np.array([1]), np.array([1]))


def test_gaps_between_tokens_survive_the_end_of_an_update() -> None:
    ledger = RequestLedger(0)
    ledger.offer(np.array([0, 70_000]), np.array([0, 0]), np.array([1, 1]))
    ledger.deliver(np.array([0, 70_000, 0]), np.array([10, 10, 13]))
    ledger.deliver(np.array([70_000, 0]), np.array([30, 33]))
    assert ledger.gaps.count == 3
    assert ledger.gaps.total_ns == (13 - 10) + (30 - 10) + (33 - 13)
    assert ledger.first_token[[0, 70_000]].tolist() == [10, 10]
    assert ledger.tokens[[0, 70_000]].tolist() == [3, 2]
    ledger.end(np.array([0]), np.array([33]), np.array([0], np.int8))
    with pytest.raises(AssertionError, match="ended twice"):
        ledger.end(np.array([0]), np.array([33]), np.array([0], np.int8))


def queue_of(arrivals: list[int], waits: list[int], warmup: int = 0) -> QueueFacts:
    ledger = RequestLedger(warmup)
    requests = np.arange(len(arrivals))
    ledger.offer(requests, np.array(arrivals), np.ones(len(arrivals), np.int64))
    ledger.compose(requests, np.array(arrivals) + np.array(waits))
    return ledger.queue(max(arrivals, default=0) + max(waits, default=0))


def test_a_queue_that_grows_by_half_of_the_arrivals_is_measured_as_such() -> None:
    facts = queue_of([100 * k for k in range(400)], [100 * k for k in range(400)])
    assert facts.arrivals == 400
    assert facts.grown == pytest.approx(200, rel=0.02)
    assert facts.later_mean == pytest.approx(3 * facts.earlier_mean, rel=0.03)
    assert facts.occupied_share == 1.0
    assert facts.length_max == pytest.approx(200, abs=2)


def test_a_steady_queue_does_not_grow_and_a_warm_up_is_left_out() -> None:
    steady = queue_of([100 * k for k in range(400)], [350] * 400)
    assert abs(steady.grown) < 0.1
    assert steady.length_max == 4
    late = queue_of([100 * k for k in range(400)], [350] * 400, warmup=20_000)
    assert late.arrivals == 200


def test_a_burst_or_nothing_at_all_has_no_growth() -> None:
    assert queue_of([5] * 100, [7] * 100) == QueueFacts()
    assert queue_of([], []) == QueueFacts()
