"""What a strategy says it will send: the unit in which communication formulas are written down."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and purpose that one rank issues in one optimizer step.

    Attributes:
        kind: `all_reduce`, `broadcast`, `all_gather`, `reduce_scatter` or `all_to_all`.
        count: Number of calls.
        payload_bytes: Bytes of all `count` calls together, with the definition of size that nccl-tests uses: the
            tensor for all-reduce and broadcast, the whole (gathered or scattered) tensor for the others.
        group_size: Ranks in the process group.
        purpose: What it is for: `gradients`, `parameters`, `buffers` or `bookkeeping`.
    """

    kind: str
    count: int
    payload_bytes: int
    group_size: int
    purpose: str

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)
