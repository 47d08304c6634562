"""What a rank of a pipeline announces is what it issues: counted at the process groups, and by formula."""

from typing import Any

from ddp_lab.runtime.mesh import Mesh
from pipeline_parallel.actions import Shape
from tests.models import make_batch
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import announced, counted_step

SAMPLES = 3


def one_step(mesh: str, choice: str, model: str, micro_batches: int, *schedule: Any) -> tuple[Any, Any, int, int, int]:
    """Of the second step: announced, and issued in all groups; bytes of hidden states and the embedding, its place."""
    with strategy_in_pipeline(mesh, choice, model, *schedule) as strategy:
        assert not any(part.dimension == "pp" for part in strategy.expected_traffic(micro_batches)), "not known yet"
        for step in range(2):
            batches = [make_batch(model, SAMPLES, 10 * step + index) for index in range(micro_batches)]
            issued = counted_step(strategy, batches)
        config: Any = strategy.module.config
        tokens = batches[0]["input_ids"].numel()
        hidden, embedding = 4 * tokens * config.hidden_size, 4 * config.vocab_size * config.hidden_size
        assert strategy.model_parallel is not None and strategy.model_parallel.pipeline is not None
        place = strategy.model_parallel.group.rank()
        return announced(strategy, micro_batches, clips=True), issued, hidden, embedding, place


@each_row(
    "mesh, choice, model, micro_batches, schedule",
    [
        ("pp=3", "tp", "lm, long, tied", 4, ("1f1b", 1)),
        ("dp=2,pp=2", "zero2", "lm, long", 2, ("interleaved", 2)),
        ("dp=2,pp=2", "zero3", "lm, long, tied", 3, ("zb-h1", 1)),
        ("pp=2", "zero1", "lm, long, gpt2", 1, ("gpipe", 1)),
        ("pp=3", "pytorch_pp", "lm, long", 3, ("1f1b", 1)),
    ],
)
def test_announced_is_issued(
    ranks: RankPool, mesh: str, choice: str, model: str, micro_batches: int, schedule: tuple[str, int]
) -> None:
    """A rank sends and receives one message a micro-batch, in forward and in backward, at each end of its stages."""
    size, stages_per_rank = Mesh.parse(mesh), schedule[1]
    shape = Shape(size.degree("pp"), micro_batches, stages_per_rank)
    for wanted, issued, hidden, embedding, place in ranks.run(
        size.size, one_step, mesh, choice, model, micro_batches, *schedule
    ):
        assert issued == wanted
        is_end = place in (0, shape.ranks - 1)
        ends, ties = 2 * stages_per_rank - is_end, 2 * ("tied" in model or "gpt2" in model) * is_end
        found = wanted["send_recv", shape.ranks if choice == "pytorch_pp" else 2]
        assert found == (2 * micro_batches * ends + ties, 2 * micro_batches * ends * hidden + ties * embedding)
