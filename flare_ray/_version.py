"""The version, alone in its module so that packaging reads it without importing the package."""

__version__ = "0.1.0"
