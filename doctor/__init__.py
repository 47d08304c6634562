"""Why NCCL or Gloo hangs, fails or crawls: from topology, logs, flight-recorder dumps, or this machine itself.

Texts and dumps are read into facts (`facts`), rules (`rules/*.toml`, with predicates for what a regular expression
cannot say) are held against them, and the first finding is the verdict (`diagnosis`). Nothing here imports
torch.distributed, except `live`, which measures.
"""
