"""Before a run, on every node, in parallel and bounded: is everything there, healthy, empty and the same?"""
