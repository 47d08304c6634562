"""Why NCCL or Gloo hangs, fails or is slow: from topology, logs, flight-recorder dumps, or this machine itself.

`reading` turns texts and dumps into data, and `facts` holds the data together. Rules (`rules/*.toml`, with `predicates`
for what a regular expression cannot say) are applied to the facts, and the first finding is the verdict (`diagnosis`).
Only `live`, which measures, imports torch.distributed.
"""
