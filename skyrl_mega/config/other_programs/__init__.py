"""Settings of SkyRL, verl, slime, TRL and NeMo-RL with their counterparts here, for errors, migration and the manual.

`table.yaml` lists the counterparts and `lookup` searches the table. docs/migration.md, and the names of other programs
in docs/configuration.md, are generated from the table.
"""
