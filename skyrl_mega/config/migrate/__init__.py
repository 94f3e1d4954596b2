"""Translation of a run's settings from SkyRL, verl, slime, TRL or NeMo-RL into our settings.

`read` finds the settings in arguments, YAML files, shell scripts and Python scripts without running anything;
`translate` applies `other_programs/table.yaml` and `translation.yaml`; `text` writes YAML and the account of every
setting.
"""
