"""What a first difference means: which factor it is, and what usually causes it."""

from ddp_lab.parity.causes import data, forward, gradients, updates
from ddp_lab.parity.causes.cause import Cause, Rule
from ddp_lab.parity.comparison import KINDS, Comparison
from ddp_lab.parity.store import BUFFER, GRADIENT, OUTPUT, OUTPUT_GRADIENT, PARAMETER, START

RULES: dict[str, list[Rule]] = {
    START: [data.untied, data.other_shape, data.other_start],
    OUTPUT: forward.RULES,
    OUTPUT_GRADIENT: forward.OF_GRADIENTS,
    GRADIENT: gradients.RULES,
    PARAMETER: updates.RULES,
    BUFFER: [forward.buffer],
}
"""By the kind of the first difference; the first rule that fits names it."""


def cause_of(made: Comparison) -> Cause | None:
    """None: nothing differs, or no rule fits. Data come before all that is computed from them."""
    first = made.first
    for step in made.steps if first is None else [step for step in made.steps if step <= first.step]:
        if (found := data.other_samples_in_a_group(made, step) or data.other_data(made, step)) is not None:
            return found
        if first is None or step < first.step or KINDS.index(first.kind) > KINDS.index(GRADIENT):
            found = gradients.missing(made, step)
            if first is None:
                found = found or gradients.other_norms(made, step) or gradients.other_loss(made, step)
            if found is not None:
                return found
    if first is None:
        return None
    # before all else, since limits are the coarser's
    if (found := data.other_dtype(made) or forward.other_precision(made, first)) is not None:
        return found
    return next((found for rule in RULES[first.kind] if (found := rule(made, first)) is not None), None)
