"""What a run needs before it is started: memory, time, places; what does not fit, and what would.

Reads settings and a model's config.json; needs no GPU, no process group and no torch.
"""
