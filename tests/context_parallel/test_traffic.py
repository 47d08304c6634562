"""What ranks of cp announce is what they issue: counted at the process groups."""

from typing import Any

from ddp_lab.runtime.mesh import Mesh
from tests.models import make_batch
from tests.pipeline_parallel.pipelines import strategy_in_pipeline
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import announced, counted_step


def one_step(mesh: str, choice: str, model: str, options: dict[str, Any]) -> Any:
    """Of the second step of two micro-batches: announced, and issued in all groups."""
    with strategy_in_pipeline(mesh, choice, model, **options) as strategy:
        for step in range(2):
            issued = counted_step(strategy, [make_batch(model, 3, 10 * step + index) for index in range(2)])
        return announced(strategy, 2, clips=True), issued


@each_row(
    "mesh, choice, model, options",
    [
        ("cp=3", "zero2", "lm, gqa", {"context_parallel": "ring"}),
        ("cp=2", "tp", "lm, gqa", {"activation_checkpointing": "block", "precision": "bf16"}),
        ("dp=2,cp=2", "zero3", "lm, gpt2", {"context_parallel": "ulysses"}),
        ("cp=3", "zero2", "lm, gqa", {"context_parallel": "pytorch_cp", "activation_checkpointing": "block"}),
        ("cp=2", "tp", "lm, gqa", {"context_parallel": "pytorch_cp", "precision": "bf16"}),
    ],
)
def test_announced_is_issued(ranks: RankPool, mesh: str, choice: str, model: str, options: dict[str, Any]) -> None:
    for wanted, issued in ranks.run(Mesh.parse(mesh).size, one_step, mesh, choice, model, options):
        assert issued == wanted


def test_keys_go_around_in_the_precision_of_the_run(ranks: RankPool) -> None:
    """Of three messages of an attention, keys and values in forward and in backward are half as large; their gradients
    are in fp32."""
    exact, half = (
        ranks.run(2, one_step, "cp=2", "tp", "lm, gqa", {"precision": precision})[0][1]["send_recv", 2][1]
        for precision in ("fp32", "bf16")
    )
    assert 3 * half == 2 * exact
