"""Fixtures for the tests of the recipes."""

from tests.support.planned import remembered_plans  # noqa: F401  (for every module of this folder)
