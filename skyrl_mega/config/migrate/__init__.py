"""Translation of a run's settings from SkyRL, verl, slime, TRL or NeMo-RL into our settings.

To change how a key is translated: its name here is in `other_programs/table.yaml`, its conversion in
`translation.yaml`, and conversions are in `convert`, `schedules`, `rewards` and, for NeMo-RL alone, `nemo`; `figures`,
`kl` and `data_sets` compute what needs several keys.

`read` finds the settings in arguments, YAML files, shell scripts and Python scripts without running anything;
`translate` applies `other_programs/table.yaml` and `translation.yaml`; `text` writes YAML and the account of every
setting.
"""
