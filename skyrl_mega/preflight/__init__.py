"""Checks before a run, on all nodes in parallel and with time limits: is everything present, healthy, idle and
equal?"""
