"""Loops whose optimizer updates flat copies of the parameters: DeepSpeed's engine (`uv sync --extra deepspeed`), and
one that nobody knows."""

import io
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ddp_lab.parity import watch
from ddp_lab.parity.answer import Answer
from ddp_lab.parity.comparison import compare
from ddp_lab.parity.store import read
from tests.parity_tool.loops import STEPS, Net, data
from tests.ranks import RankPool

CLIPS = 0.1
FAULTS = {
    "not divided": "all gradients are x 4: micro-batches",
    "rate": "the optimizer has lr 0.01 for embed.weight in run A, and 0.02 (x 2 = ranks",
    "other's data": "data: rank 0 and rank 1 train on the same samples",
    "clips not divided": "x 4: micro-batches",
}


def by_engine(folder: Path, stage: int, micro_batches: int, fault: str = ""):
    """On two ranks. The loop divides by micro-batches itself."""
    from reference.deepspeed_zero import load_deepspeed

    deepspeed, rank = load_deepspeed(torch.device("cpu")), torch.distributed.get_rank()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else compiled, a minute or more
    torch.manual_seed(7)
    net = Net()
    groups = [list(net.inner.parameters()), [p for name, p in net.named_parameters() if not name.startswith("inner")]]
    rate = 2e-2 if fault == "rate" else 1e-2
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100, "reduce_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIPS if fault.startswith("clips") else 0.0,
    }
    with redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.AdamW([{"params": group} for group in groups], lr=rate), config=settings
        )
    recorder = watch(engine, folder, steps=STEPS)
    for step in range(STEPS):
        words, labels = (tensor.chunk(2)[0 if fault == "other's data" else rank] for tensor in data(step))
        parts = list(zip(words.chunk(micro_batches), labels.chunk(micro_batches), strict=True))
        for number, (inputs, targets) in enumerate(parts):
            engine.set_gradient_accumulation_boundary(number == micro_batches - 1)
            loss = cross_entropy(engine(inputs).flatten(0, 1), targets.flatten())
            engine.backward(loss if fault.endswith("not divided") else loss / micro_batches)
            engine.step()
    recorder.close()


def plainly(folder: Path, clips: float = 0.0, is_flat: bool = False):
    """In one process. `is_flat`: a copy of all parameters is updated, and nothing tells what is where in it."""
    torch.manual_seed(7)
    net = Net()
    recorder, flat = watch(net, folder, steps=STEPS), parameters_to_vector(net.parameters()).detach()
    optimizer = torch.optim.AdamW([flat] if is_flat else net.parameters(), lr=1e-2)
    for step in range(STEPS):
        words, labels = data(step)
        cross_entropy(net(words).flatten(0, 1), labels.flatten()).backward()
        if clips:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clips)
        if is_flat:
            flat.grad = parameters_to_vector([p.grad for p in net.parameters() if p.grad is not None])
            net.zero_grad()
        optimizer.step()
        if is_flat:
            vector_to_parameters(flat, net.parameters())
        net.zero_grad()
    recorder.close()


def answer(a: Path, b: Path) -> Answer:
    return Answer.of(compare(read(a), read(b)), False, [])


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="not installed; run: uv sync --extra deepspeed")
@pytest.mark.parametrize("stage", range(4))
def test_deepspeed(stage, ranks: RankPool, tmp_path):
    plainly(tmp_path / "a")
    plainly(tmp_path / "clips", CLIPS)
    for micro_batches in (1, 2):
        ranks.run(2, by_engine, tmp_path / f"{micro_batches}", stage, micro_batches)
        result = answer(tmp_path / "a", tmp_path / f"{micro_batches}")
        assert not result.differs, result.lines
    for fault, words in FAULTS.items() if stage else list(FAULTS.items())[:-1]:  # stage 0 tells no norm
        ranks.run(2, by_engine, tmp_path / fault, stage, 4 if "divided" in fault else 1, fault)
        result = answer(tmp_path / ("clips" if fault.startswith("clips") else "a"), tmp_path / fault)
        assert words in result.lines[1], (fault, result.lines)


def test_a_module_with_names_of_an_engine(tmp_path):
    net = torch.nn.Linear(2, 1)
    net.gradient_clipping = 1.0  # type: ignore[assignment]
    recorder = watch(net, tmp_path / "a", steps=1)
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    recorder.close()
    assert read(tmp_path / "a").steps == [0]


def test_gradients_that_cannot_be_read(tmp_path):
    plainly(tmp_path / "a")
    plainly(tmp_path / "b", is_flat=True)
    assert "no gradient of run B could be read" in answer(tmp_path / "a", tmp_path / "b").lines[1]
