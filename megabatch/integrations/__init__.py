"""Exact updates inside other libraries' loops. Each module needs the library that it is named after."""
