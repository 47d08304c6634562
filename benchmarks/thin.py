"""A workload whose kernels cost nearly nothing, so that a step takes as long as the host does: `--workload
benchmarks/thin.py:build`."""

from types import SimpleNamespace

from torch import Tensor, nn

from ddp_lab.runtime.data.synthetic import SyntheticSamples
from ddp_lab.runtime.data.workload import Workload

LAYERS, WIDTH, SAMPLES = 32, 32, 64


class Thin(nn.Module):
    """Deep and thin: blocks with the twelve parameters of a transformer's, and the fewest kernels between them."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(part for _ in range(2) for part in (next(norms), *(nn.Linear(WIDTH, WIDTH) for _ in "12"))))
            for _ in range(LAYERS)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> SimpleNamespace:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return SimpleNamespace(loss=nn.functional.mse_loss(inputs, targets))


def build() -> Workload:
    samples = SyntheticSamples(SAMPLES, seed=0, width=WIDTH)
    return Workload(Thin(), samples, samples)
