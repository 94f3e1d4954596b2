"""Settings of SkyRL, verl, slime and TRL with their counterparts here, for error messages, migration and the manual.

`table.yaml` lists the counterparts and `lookup` searches the table. docs/migration.md, and the names of other programs
in docs/configuration.md, are generated from the table.
"""
