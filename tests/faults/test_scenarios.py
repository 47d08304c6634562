"""What is expected of a run with a fault."""

from tests.faults.scenarios import FAULT_STEP, SCENARIOS, Outcome
from tests.tables import each_row


@each_row("device, losses", [("cpu", FAULT_STEP), ("cuda", FAULT_STEP - 1)])
def test_a_gpu_has_one_loss_unread(device: str, losses: int) -> None:
    scenario = next(one for one in SCENARIOS if one.name == "killed in forward")
    said = f"error: rank 1 was killed in step {FAULT_STEP}"
    for count in (losses, losses - 1):
        record = {"device": device, "ended": {"how": "killed"}, "train_loss": [1.0] * count}
        outcome = Outcome(1, 3.0, [said], record, 2, [], [], f"Root Cause {said}")
        assert outcome.problems(scenario) == ["steps are missing in the record"] * (count < losses)
