"""Settings of SkyRL, verl, slime and TRL and their counterparts here, for users who type one.

`table.yaml` holds them and `lookup` finds them. docs/migration.md and the names beside the settings of
docs/configuration.md are generated from the table.
"""
