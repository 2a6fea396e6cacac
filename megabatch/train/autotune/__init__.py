"""Autotune: settings that the recipe leaves open, chosen by measurement."""
