"""Settings of other programs: what a key of SkyRL, verl, slime or TRL is here, for those who type it.

A table a program (`skyrl` with its older names, `verl` in two parts, `slime`, `trl`), looked up by `lookup`.
docs/migration.md is made from them, and so are the names that docs/configuration.md gives beside a setting.
"""
