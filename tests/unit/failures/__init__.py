"""Errors of the library, by what is wrong: each row has the error, its text, and a call that provokes it."""
