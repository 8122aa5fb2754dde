"""The folders of stubs that the unit tests have, for fresh interpreters."""

from tests.unit.conftest import _private, site

__all__ = ["_private", "site"]
