"""Text that a causal language model makes at the end of a run, whole or sharded."""

from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.strategy import Strategy

TEMPERATURE = 0.8


def require_generates(config: RunConfig, workload: Workload) -> None:
    """Refuse `--generate` and `--prompt` where they make no sense.

    Raises:
        UserError: the model is no causal language model, or the prompt has no tokens.
    """
    if not config.generate:
        return
    if workload.language is None:
        raise UserError(f"--generate: workload {config.workload} is no causal language model; see --task causal-lm")
    if not workload.language.tokenizer(config.prompt or workload.language.prompt)["input_ids"]:
        raise UserError("--prompt: has no tokens; give some text")


@torch.no_grad()
def generate(strategy: Strategy, workload: Workload, config: RunConfig) -> dict[str, Any] | None:
    """At most `config.generate` tokens after a prompt; None if the user asks for none. Collective.

    Rank 0 draws each token, at a temperature of 0.8, with the seed of the run. All ranks run the model on the same
    tokens, as sharded ones must. There is no cache: each token takes a forward pass over the `context` before it.

    Returns:
        `prompt`, `text`, `tokens` (how many were made: fewer than asked for if the text ends).
    """
    language = workload.language
    if not config.generate or language is None:
        return None
    strategy.module.eval()
    prompt = config.prompt or language.prompt
    tokenizer = language.tokenizer
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    given, source = len(ids), torch.Generator().manual_seed(config.seed)
    for _ in range(config.generate):
        logits = strategy(input_ids=torch.tensor([ids[-language.context :]], device=strategy.device)).logits
        chosen = torch.zeros(1, dtype=torch.int64, device=strategy.device)
        if strategy.data_parallel_rank == 0:
            scores = logits[0, -1, : len(tokenizer)].double().cpu() / TEMPERATURE
            chosen.copy_(scores.softmax(-1).multinomial(1, generator=source))
        dist.broadcast(chosen, group=strategy.process_group, group_src=0)
        if chosen.item() == tokenizer.eos_token_id:
            break
        ids.append(int(chosen.item()))
    return {"prompt": prompt, "text": tokenizer.decode(ids[given:]), "tokens": len(ids) - given}
