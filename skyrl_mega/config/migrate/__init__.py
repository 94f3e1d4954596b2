"""Translation of a run's settings from SkyRL, verl, slime or TRL into settings of this project.

`read` finds the settings in arguments, YAML files, shell scripts and Python scripts without running anything;
`translate` applies `other_programs/table.yaml` and `translation.yaml`; `text` writes YAML and the account of every
setting.
"""
