"""Steelyard: long-context language-model training in which nobody waits."""

__version__ = "0.1.0"
