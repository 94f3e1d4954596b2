"""Plans a run before it starts: memory, step time and placement, memory shortages and settings that avoid them.

Reads settings and a model's config.json; needs no GPU, no process group and no torch.
"""
