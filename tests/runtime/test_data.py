"""Which rank gets which sample: each sample exactly once, however the numbers divide (TRAPS 4, 6, 17)."""

from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.runtime.data.batches import epoch_windows, evaluation_batches, rank_micro_batches, steps_in_epoch

small = st.integers(1, 9)


@given(samples=st.integers(1, 80), size=small, micro=small, accumulation=small, seed=st.integers(0, 5))
def test_training_sees_each_sample_once_an_epoch(samples, size, micro, accumulation, seed):
    global_batch = size * micro * accumulation
    windows = epoch_windows(samples, global_batch, seed, epoch=0)
    assert len(windows) == steps_in_epoch(samples, global_batch)
    indices_read = []
    for window in windows:
        shares = [rank_micro_batches(window, rank, size, micro) for rank in range(size)]
        flat = [index for share in shares for batch in share for index in batch]
        assert sorted(flat) == sorted(window)
        assert all(len(batch) <= micro for share in shares for batch in share)
        assert all(len(share) <= accumulation for share in shares)
        counts = [sum(map(len, share)) for share in shares]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
        indices_read += flat
    assert sorted(indices_read) == list(range(samples))


@given(samples=st.integers(1, 60), size=small, batch=small)
def test_evaluation_counts_each_sample_once_in_equal_numbers_of_batches(samples, size, batch):
    shares = [list(evaluation_batches(samples, rank, size, batch)) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1
    counted = [index for share in shares for indices, count in share for index in indices[:count]]
    assert sorted(counted) == list(range(samples))
    assert all(indices for share in shares for indices, _ in share)
