"""The plain zero3 trains as one process does, and it and the registered zero3 gather and reduce when the page says."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.models import batch
from tests.parity import Case, built, check_each, one_step
from tests.ranks import RankPool
from tests.tables import each_row

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "how-it-works" / "zero3.md").read_text().split())
PLAIN, BLOCKS = "sharding.zero3:Zero3", 6
CASES = [
    Case(PLAIN, split="uneven", optimizer="adam"),
    Case(PLAIN, "llama", "replicate=2,shard=2", {"offload": "parameters"}, own_loop=True),
    Case(PLAIN, "branching", split="some have none"),
    Case(PLAIN, "out of order", refused="in another order than that of registration"),
]


def test_the_plain_case_is_equal_to_one_process(ranks: RankPool):
    check_each(ranks, CASES)


def a_step(choice: str, micro_batches: int) -> tuple[int, int, list[Any]]:
    """Bytes of the root and of a block, and what holds at each moment of a second step: the block that runs, the units
    gathered or in flight, those in flight, and those whose gradients are in flight; bytes of full parameters, and of
    states beyond those at rest."""
    strategy: Any = built(choice, "deep", "adam")
    root, block = (sum(f.full_bytes for u in units for f in u.flats) for units in (strategy.root, strategy.units[:1]))
    batches, moments = [batch(2, index) for index in range(micro_batches)], []
    one_step(strategy, batches)
    at_rest = sum(strategy.memory_breakdown().values())

    def look(at: str, number: int, *_: object):
        flying = strategy.schedule.in_flight
        kinds = (lambda unit: not unit.is_sharded, lambda unit: unit._gathers, flying.__contains__)
        numbers = ([index for index, unit in enumerate(strategy.units, 1) if is_so(unit)] for is_so in kinds)
        full = sum(flat.full.untyped_storage().nbytes() for flat in strategy.flats)
        received = sum(b.flat.full_bytes for unit in flying for b in unit.buckets if b.in_flight) // 2  # two ranks
        moments.append((at, number, *numbers, full, sum(strategy.memory_breakdown().values()) - at_rest + received))

    for number, layer in enumerate(strategy.module.blocks, 1):
        layer.register_forward_pre_hook(partial(look, "forward", number))
        layer.register_forward_hook(
            lambda _, __, out, n=number: out.register_hook(partial(look, "backward", n)) and None
        )
    for parameter in strategy.module.parameters():
        parameter.register_post_accumulate_grad_hook(partial(look, "", 0))
    strategy.optimizer.register_step_pre_hook(partial(look, "update", 0))
    one_step(strategy, batches)
    return root, block, moments


@each_row("choice, micro_batches", [("zero3", 1), ("zero3", 2), (PLAIN, 2)])
def test_root_and_two_blocks_are_whole_when_the_page_says(ranks: RankPool, choice, micro_batches):
    assert "the gather of unit i + 1 starts" in PAGE and "starts to gather unit i - 1." in PAGE
    assert "The rank waits for it when backward comes to unit i - 2," in PAGE
    assert "At most the gather of one unit and the reduce-scatters of two others are in flight together." in PAGE
    for root, block, moments in ranks.run(2, a_step, choice, micro_batches):
        *_, coming, reduced, full, beyond_rest = zip(*moments, strict=True)
        assert (max(map(len, coming)), max(map(len, reduced))) == (1, 2)
        assert max(full) == root + 2 * block
        assert max(beyond_rest) <= root + 6 * block, "of two: parameters, gradients, their sum with what is received"
        for at, number, gathered, coming, reduced, full, _ in moments:
            if at == "forward":
                assert (coming, reduced) == ([number + 1] * (number < BLOCKS), []) and gathered == [number, *coming]
            elif at == "backward":
                assert coming == [number - 1] * (1 < number < BLOCKS)  # the last unit does this later
                assert gathered == [*coming, number] and reduced == [number + 1] * (number < BLOCKS)
            assert at != "update" or full == 0
