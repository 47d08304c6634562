"""Which samples ranks have that get parts of them, or what other ranks have made of them."""

from ddp_lab.parity.store import OUTPUT, START, Recorded, Table


def matched(a: Recorded, b: Recorded) -> Recorded:
    """Run B with run A's samples, in their order, where each of its ranks has a part of every sample, or one has all of
    them and sends to others what it makes of them."""
    by_rank = {step: b.samples(step) for step in a.steps if step in b.facts}
    samples_of_a = {step: set(a.samples(step)[0]) for step in by_rank} if a.ranks == 1 else {}
    fed = {rank for step, keys in samples_of_a.items() for rank in range(b.ranks) if keys & set(by_rank[step][rank])}
    stages = frozenset(range(b.ranks)) - fed
    ours, theirs = a.table(a.steps[0]), b.table(a.steps[0])
    if len(fed) == 1 and stages and not _have_the_same(theirs, fed | stages):
        (first,) = fed
        if all(keys == set(by_rank[step][first]) for step, keys in samples_of_a.items()) and all(
            len(keys) == len(of_ranks[first]) for of_ranks in by_rank.values() for keys in of_ranks
        ):
            return b.as_parts_of({step: of_ranks[first] for step, of_ranks in by_rank.items()}, stages)
    place = next((quantity for quantity in ours.places if quantity.kind == OUTPUT and quantity in theirs.places), None)
    if place is None or b.ranks < 2:
        return b
    at_a, at_b = ours.places[place], theirs.places[place]
    if theirs.elements[at_b][0] * b.ranks != ours.elements[at_a][0] or set(ours.key[at_a]) & set(theirs.key[at_b]):
        return b
    samples = {step: a.samples(step)[0] for step in a.steps if step in b.facts}
    is_whole = all(len(keys) == len(samples[step]) for step in samples for keys in b.samples(step))
    return b.as_parts_of(samples) if is_whole else b


def _have_the_same(table: Table, ranks: set[int]) -> bool:
    """Whether ranks have parameters of the same names, as those of a pipeline's stages have not."""
    starts = [set(table.rank[rows]) for place, rows in table.places.items() if place.kind == START]
    return all(of_place >= ranks or -1 in of_place for of_place in starts)
