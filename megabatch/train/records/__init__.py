"""Records: the numbers, cuts and times of updates, written to files and shown by loggers."""
